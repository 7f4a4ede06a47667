"""Save packed caches to safetensors files without dequantizing, and load them, so that a prompt runs only once."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kvcompile.caches import objects
from kvcompile.caches.description import Reader, Writer
from kvcompile.errors import CacheFileError, one_line, shown
from kvcompile.files import digests

FORMAT = "kvcompile.cache"
VERSION = 4
"""Version of the description, the digests and the layout of packed bytes. Files of other versions are refused."""

_NOT_VALID = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, StopIteration)
"""Errors of code that reads a malformed description, or that makes tensors of the sizes in it."""

_OWN_ENTRIES = ("format", "version", "content", "digests", "digest", "fingerprint", "transformers")


def save_cache(
    cache: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    model: nn.Module | None = None,
) -> None:
    """Write a cache to a safetensors file. Packed tensors stay packed; growing ones lose their spare room.

    Every tensor in the file is named by its place in the cache. The file's metadata describe the tensors in JSON under
    ``content``: the layout, axes, dtype and shape of packed tensors, and all other state of the cache, such as its
    number of tokens. ``digests`` holds the XXH3 digest of each tensor, and ``digest`` covers all metadata. The file
    is written beside ``path``, flushed to the disk, and then renamed, so that ``path`` never holds half a cache.

    Args:
        cache: a tensor, packed or plain; lists, tuples and dicts of tensors; or a cache of Transformers (static,
            dynamic, with sliding windows, encoder-decoder).
        path: the file; an existing regular file is replaced.
        metadata: names and values that :func:`load_cache` can check.
        model: the model that computed the cache. The file gets its fingerprint, which :func:`load_cache` can check: the
            keys of one model are noise to another.

    Raises:
        CacheFileError: the cache contains an unsupported object, and the message names its place; ``path`` is a
            symbolic link or not a regular file; or ``metadata`` has an entry that the file needs itself.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a symbolic link" if path.is_symlink() else "no regular file"
        raise CacheFileError(f"save_cache: {path} is {kind}, which is not replaced; give the path of a regular file")
    if taken := sorted(set(_OWN_ENTRIES) & set(metadata or {})):
        raise CacheFileError(f"save_cache: the file writes the metadata {taken[0]!r} itself; choose another name")
    writer = Writer()
    content = writer.describe(cache, "")
    header = {
        **dict(metadata or {}),
        "format": FORMAT,
        "version": str(VERSION),
        "content": json.dumps(content),
        "digests": json.dumps(digests.of_tensors(writer.tensors)),
        **objects.versions(),
    }
    if model is not None:
        header["fingerprint"] = digests.of_model(model)
    header["digest"] = digests.of_header(header)
    _write(writer.tensors, path, header)


def _write(tensors: dict[str, Tensor], path: Path, header: dict[str, str]) -> None:
    """Write the file under another name, and rename it when its bytes are on the disk."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        complete, mode = Path(folder, "complete"), Path(folder, "mode")
        save_file(tensors, complete, header)
        mode.touch()
        complete.chmod(stat.S_IMODE(mode.stat().st_mode))  # as the umask says; safetensors writes private files
        _flush(complete)
        complete.replace(path)
        _flush(path.parent)


def _flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_cache(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    metadata: Mapping[str, str] | None = None,
    *,
    model: nn.Module | None = None,
    verify: bool = True,
) -> Any:
    """Load a cache that :func:`save_cache` wrote: an equal cache with its own storage, ready to be extended.

    Args:
        path: the file.
        device: device of the loaded tensors.
        metadata: names and values that the file must have, as given to :func:`save_cache`.
        model: the model that will continue the cache. The file must have its fingerprint.
        verify: compare every tensor with its digest. False skips it and saves the time to read each byte once more;
            the description is checked in any case.

    Raises:
        CacheFileError: the file is not a cache, is damaged, has another format version, comes from another minor
            version of Transformers or from another model, has other ``metadata``, or its bytes contradict its
            description.
        OSError: the file cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CacheFileError(f"{path} is not a regular file; load_cache reads the files of save_cache")
    try:
        with safe_open(os.fspath(path), "pt", device="cpu") as file:
            header = file.metadata() or {}
            _check(header, metadata or {}, model, path)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise CacheFileError(f"{path}: {one_line(error)}") from error
    try:
        if verify:
            _check_bytes(tensors, json.loads(header["digests"]), path)
        return Reader(tensors, header, torch.device(device), path).make(json.loads(header["content"]))
    except CacheFileError:
        raise
    except _NOT_VALID as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise CacheFileError(
            f"{path}: its description is not valid ({reason}); compute it again from its prompt"
        ) from error


def _check(header: Mapping[str, str], expected: Mapping[str, str], model: nn.Module | None, path: Any) -> None:
    if header.get("format") != FORMAT:
        raise CacheFileError(f"{path} is not a cache: its metadata lack format={FORMAT!r}; use save_cache")
    if header.get("version") != str(VERSION):
        raise CacheFileError(
            f"{path} has version {one_line(header.get('version'))} of the format, and this kvcompile reads {VERSION}; "
            "compute it again from its prompt"
        )
    if header.get("digest") != digests.of_header(header):
        raise CacheFileError(f"{path} is damaged: its metadata have another digest; compute it again from its prompt")
    for name, value in expected.items():
        if header.get(name) != value:
            raise CacheFileError(f"{path}: {name} is {shown(header.get(name))} in the file, and {value!r} was expected")
    if model is not None and header.get("fingerprint") != digests.of_model(model):
        reason = "another model computed it" if "fingerprint" in header else "it was saved without a model"
        raise CacheFileError(f"{path} does not belong to this model: {reason}; compute it again from its prompt")


def _check_bytes(tensors: Mapping[str, Tensor], expected: Mapping[str, str], path: Any) -> None:
    found = digests.of_tensors(tensors)
    for name in sorted({*found, *expected}):
        if found.get(name) != expected.get(name):
            raise CacheFileError(
                f"{path} is damaged: {one_line(name)} has another digest; compute it again from its prompt"
            )
