"""A saved cache, open for reading: one file, or a folder with an index and a file for each rank that saved it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcompile.caches.disk import TensorFile
from kvcompile.caches.pieces import Piece, Ranges, StoredTensor, assembled, check_pieces, files_needed
from kvcompile.errors import CacheFileError, one_line, shown
from kvcompile.files import digests
from kvcompile.files.reading import read_text_file

FORMAT = "kvcompile.cache"
VERSION = 5
"""Version of the description, the digests and the layout of packed bytes. Files of other versions are refused."""

INDEX = "index.json"
INDEX_FORMAT = "kvcompile.cache.index"
INDEX_VERSION = 1
"""Version of the entries of the index and of the pieces. The description in it has the version :data:`VERSION`."""

PART_FORMAT = "kvcompile.cache.part"
PART_NAME = re.compile(r"[0-9a-z]+-rank-[0-9]+-of-[0-9]+\.safetensors")

OWN_ENTRIES = ("format", "version", "content", "layouts", "digests", "digest", "fingerprint", "transformers")
"""Names of entries that users cannot give to their own metadata."""

_MOST_INDEX = 1 << 28


class Source(ExitStack):
    """A saved cache. The files are open inside a ``with`` block.

    Attributes:
        path: the file or the folder.
        header: its entries.
        metadata: the names and values of the user, and perhaps other entries.
        content: the description of the whole cache.
        tensors: the stored tensors, by name.
        save: the identifier of this save.
    """

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CacheFileError: a file is missing, was not written by ``save_cache``, or belongs to another save.
            OSError: a file cannot be read.
        """
        super().__init__()
        self.path = path
        self.header: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        self._files: list[TensorFile] = []
        try:
            self._open_folder() if path.is_dir() else self._open_file()
        except BaseException:
            self.close()
            raise

    def _open_file(self) -> None:
        file = self._opened(self.path)
        self.header = self.metadata = file.header
        check_header(self.header, FORMAT, VERSION, self.path)
        self.save, self.content = self.header["digest"], json.loads(self.header["content"])
        self.tensors = {name: StoredTensor(tuple(file.shape(name)), (Piece(0, {}),)) for name in file.names}

    def _open_folder(self) -> None:
        index = self.header = read_index(self.path)
        self.save, self.content, self.metadata = index["save"], index["content"], dict(index["metadata"])
        for entry in index["files"]:
            self._open_part(entry)
        self.tensors = {
            name: StoredTensor(tuple(one["shape"]), tuple(Piece.of_json(piece) for piece in one["pieces"]))
            for name, one in index["tensors"].items()
        }
        for name, stored in self.tensors.items():
            check_pieces(name, stored, lambda piece, name=name: self._files[piece.file].shape(name), self.path)  # type: ignore[misc]

    def _open_part(self, entry: Mapping[str, Any]) -> None:
        name = entry["name"]
        if Path(name).name != name or name in (".", ".."):
            raise CacheFileError(
                f"{self.path}: {shown(name)} is not the name of a file in this folder; save the cache again"
            )
        try:
            part = self._opened(self.path / name)
        except FileNotFoundError as error:
            raise CacheFileError(
                f"{self.path / name} is missing, but the index of this cache names it; copy all files of the folder"
            ) from error
        found = part.header.get("digest")
        if found != digests.of_header(part.header) or found != entry["digest"]:
            raise CacheFileError(
                f"{part.path} is damaged, or belongs to another save than {self.path / INDEX}; copy all files of one "
                "save"
            )

    def _opened(self, path: Path) -> TensorFile:
        file = TensorFile(path)
        self.callback(file.close)
        self._files.append(file)
        return file

    def read(self, ranges: Mapping[str, Ranges], verify: bool) -> dict[str, Tensor]:
        """All tensors. Tensors that ``ranges`` names are cut to its indices.

        Args:
            ranges: the indices along divided dimensions, by the name of a tensor.
            verify: whether to compare the pieces with their digests.
        """
        needed: dict[int, list[str]] = {}
        for name, stored in self.tensors.items():
            for file in files_needed(stored, ranges.get(name, {})):
                needed.setdefault(file, []).append(name)
        pieces = {file: self._files[file].read(names, self._digests(file, verify)) for file, names in needed.items()}
        return {
            name: assembled(stored, ranges.get(name, {}), lambda file, name=name: pieces[file][name])  # type: ignore[misc]
            for name, stored in self.tensors.items()
        }

    def _digests(self, file: int, verify: bool) -> dict[str, str] | None:
        if not verify:
            return None
        expected: dict[str, str] = json.loads(self._files[file].header["digests"])
        return expected


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder, checked against its own digest.

    Raises:
        CacheFileError: the folder has no index, or a damaged one.
        OSError: it cannot be read.
    """
    path = folder / INDEX
    if not path.exists():
        raise CacheFileError(_without_index(folder))
    try:
        index = json.loads(read_text_file(path, _MOST_INDEX))
    except ValueError as error:
        raise CacheFileError(f"{path} is damaged: {one_line(error)}; compute it again from its prompt") from error
    if not isinstance(index, dict):
        raise CacheFileError(f"{path} is not the index of a cache; load the folder that save_cache wrote")
    check_header(index, INDEX_FORMAT, INDEX_VERSION, path)
    if index["description"] != VERSION:
        raise CacheFileError(_other_version(path, index["description"], VERSION))
    return index


def _without_index(folder: Path) -> str:
    if any(PART_NAME.fullmatch(file.name) for file in folder.iterdir()):
        return (
            f"{folder} is not a regular file, and has no {INDEX}: save_cache of several ranks was not completed; "
            "save the cache again"
        )
    return (
        f"{folder} is a folder without a cache; give load_cache the file that save_cache wrote, or the folder of a "
        "completed save_cache of several ranks"
    )


def check_header(header: Mapping[str, Any], kind: str, version: int, path: Any) -> None:
    """Raise CacheFileError if a header has another format or version, or does not fit its digest."""
    if header.get("format") != kind:
        raise CacheFileError(f"{path} is not a cache: its metadata lack format={kind!r}; use save_cache")
    if header.get("version") != str(version):
        raise CacheFileError(_other_version(path, header.get("version"), version))
    if header.get("digest") != digests.of_header(header):
        raise CacheFileError(f"{path} is damaged: its metadata have another digest; compute it again from its prompt")


def _other_version(path: Any, found: object, known: int) -> str:
    return (
        f"{path} has version {one_line(found)} of the format, and this kvcompile reads {known}; compute it again from "
        "its prompt"
    )


def check_origin(source: Source, expected: Mapping[str, str], fingerprint: str | None) -> None:
    """Raise CacheFileError if a saved cache has other metadata than ``expected``, or another ``fingerprint``."""
    path, found = source.path, source.metadata
    for name, value in expected.items():
        if found.get(name) != value:
            raise CacheFileError(f"{path}: {name} is {shown(found.get(name))} in the file, and {value!r} was expected")
    if fingerprint is not None and source.header.get("fingerprint") != fingerprint:
        reason = "another model computed it" if "fingerprint" in source.header else "it was saved without a model"
        raise CacheFileError(f"{path} does not belong to this model: {reason}; compute it again from its prompt")


def names_of_parts(index: Mapping[str, Any]) -> Sequence[str]:
    """The names of the ranks' files in an index. A foreign index may name any file of the folder."""
    names = [str(entry["name"]) for entry in index["files"]]
    return [name for name in names if PART_NAME.fullmatch(name)]
