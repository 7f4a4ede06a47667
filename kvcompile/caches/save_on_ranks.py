"""Save a cache that several ranks hold: a file for each rank, and an index that names them.

The ranks first exchange descriptions of their parts and compare them. Each rank then writes its file under the name of
this save, and rank 0 replaces the index. An earlier save in the folder stays complete until then, and its files are
deleted afterwards.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kvcompile.caches import objects
from kvcompile.caches.description import Writer, places_in_blocks
from kvcompile.caches.disk import write_file, write_tensors
from kvcompile.caches.division import BLOCK_DIM, head_dim_of, mapped, name_of, with_heads
from kvcompile.caches.pieces import Piece
from kvcompile.caches.source import INDEX, INDEX_FORMAT, INDEX_VERSION, PART_FORMAT, VERSION, names_of_parts, read_index
from kvcompile.errors import CacheFileError
from kvcompile.files import digests
from kvcompile.kernels.layout.packed_layout import PackedLayout, num_blocks
from kvcompile.parallel.ranks import Ranks

_FUNCTION = "save_cache"


@dataclass(frozen=True)
class Held:
    """The part of a tensor that one rank holds.

    Attributes:
        digest: the digest of its bytes, name, dtype and shape. Digests of ranks that divide the tokens of a
            tensor are not compared with each other, because these ranks may have different numbers of blocks.
        is_zero: whether all its bytes are zero.
        shape: the shape of its data.
        blocks: the number of blocks of the whole cache, if the ranks divide its tokens.
        head_dim: the dimension of the heads; None if it has no heads.
        is_calibrated: whether its format is calibrated.
    """

    digest: str
    is_zero: bool
    shape: tuple[int, ...]
    blocks: int | None
    head_dim: int | None
    is_calibrated: bool


@dataclass(frozen=True)
class Described:
    """The description that a rank sends before anything is written: its cache, its tensors and its arguments."""

    save: str
    content: Any
    header: dict[str, Any]
    held: dict[str, Held]


def save_on_ranks(
    cache: Any, folder: Path, metadata: Mapping[str, str], fingerprint: Mapping[str, str], ranks: Ranks
) -> None:
    """Write the cache of all ranks to ``folder``. Every rank must call it at the same time.

    Args:
        cache: the cache of this rank.
        folder: on a file system that all ranks share; made if it does not exist.
        metadata: names and values of the user, equal on all ranks.
        fingerprint: the entry ``fingerprint`` of the index, or nothing.
        ranks: all ranks, including this rank.

    Raises:
        CacheFileError: on every rank, if one of them cannot save its part, or the ranks hold different caches.
    """
    writer = Writer(ranks.shard)
    described = ranks.together(
        _FUNCTION, lambda: _described(cache, writer, folder, {"metadata": dict(metadata), **fingerprint})
    )
    _check_alike(described, ranks)
    division = _Division([one.held for one in described], ranks)
    content = division.whole(described[0].content)
    own = {name: x for name, x in writer.tensors.items() if division.piece(name, ranks.rank) is not None}
    save = described[0].save
    name = f"{save}-rank-{ranks.rank}-of-{ranks.size}.safetensors"
    try:
        entries = ranks.together(_FUNCTION, lambda: _write_part(own, folder / name, save, ranks))
        index = {
            **described[0].header,
            "format": INDEX_FORMAT,
            "version": str(INDEX_VERSION),
            "description": VERSION,
            "save": save,
            "ranks": {"context_parallel": ranks.context.size, "tensor_parallel": ranks.tensor.size},
            "files": entries,
            "tensors": division.tensors(),
            "layouts": places_in_blocks(content),
            "content": content,
            **objects.versions(),
        }
        ranks.together(_FUNCTION, lambda: _write_index(index, folder) if ranks.rank == 0 else None)
    except CacheFileError:
        (folder / name).unlink(missing_ok=True)
        raise


def _described(cache: Any, writer: Writer, folder: Path, header: Mapping[str, Any]) -> Described:
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CacheFileError(f"save_cache: {folder} is not a folder; give a folder, in which each rank writes a file")
    folder.mkdir(exist_ok=True)
    content = writer.describe(cache, "")
    found, held = digests.of_tensors(writer.tensors), {}

    def note(one: dict[str, Any], place: str) -> dict[str, Any]:
        name = name_of(one)
        if name in writer.tensors:
            held[name] = _held(one, place, writer.tensors[name], found[name], name in writer.split)
        return one

    mapped(content, note)
    for name in writer.tensors.keys() - held.keys():  # the tensors of bases
        held[name] = Held(found[name], False, tuple(writer.tensors[name].shape), None, None, False)
    return Described(secrets.token_hex(8), content, dict(header), held)


def _held(one: Mapping[str, Any], place: str, data: Tensor, digest: str, is_split: bool) -> Held:
    layout = PackedLayout.parse(*one["layout"]) if "packed" in one else None
    blocks = num_blocks(one["shape"][one["axes"].index("t")]) if is_split else None
    return Held(
        digest,
        not bool(data.any()),
        tuple(data.shape),
        blocks,
        head_dim_of(one, data.dim(), place),
        layout is not None and layout.format.is_calibrated,
    )


def _check_alike(described: Sequence[Described], ranks: Ranks) -> None:
    """Raise CacheFileError if the ranks describe different caches, or were given different metadata or models."""
    first = described[0]
    for rank, other in enumerate(described):
        if other.header != first.header:
            what = "metadata or models"
        elif other.content != first.content or other.held.keys() != first.held.keys():
            what = "caches"
        else:
            continue
        raise CacheFileError(
            f"save_cache: {ranks.name(0)} and {ranks.name(rank)} have different {what}; let all ranks save the same "
            "cache after the same step"
        )


class _Division:
    """Which rank writes which part of each tensor."""

    def __init__(self, held: Sequence[Mapping[str, Held]], ranks: Ranks) -> None:
        """
        Raises:
            CacheFileError: ranks hold different values of a tensor that they cannot divide.
        """
        self._ranks = ranks
        self._held = held
        self._copies = {name: self._copies_of(name) for name in held[0]}

    def _copies_of(self, name: str) -> int:
        """The number of consecutive tensor-parallel ranks that hold the same heads of a tensor."""
        size, rows, one = self._ranks.tensor.size, self._ranks.context.size, self._held[0][name]
        grid = [[self._held[row * size + rank][name] for rank in range(size)] for row in range(rows)]
        if one.blocks is None and any(len({row[rank].digest for row in grid}) > 1 for rank in range(size)):
            raise _differ(name, "context-parallel")
        columns = [tuple(row[rank].digest for row in grid) for rank in range(size)]
        distinct = list(dict.fromkeys(columns))
        if one.is_calibrated and size > 1:
            raise CacheFileError(
                f"save_cache: {name} has a calibrated format, which tensor-parallel ranks cannot save; save its "
                "dequantize()"
            )
        if one.head_dim is None:
            if len(distinct) > 1:
                raise _differ(name, "tensor-parallel")
            return size
        if all(cell.is_zero for row in grid for cell in row):
            return 1
        copies = size // len(distinct)
        in_a_row = [distinct[rank // copies] for rank in range(copies * len(distinct))]
        return copies if columns == in_a_row else 1

    def whole(self, content: Any) -> Any:
        """The description of the whole cache, from the description of one rank."""
        size = self._ranks.tensor.size

        def change(one: dict[str, Any], place: str) -> dict[str, Any]:
            name = name_of(one)
            if size == 1:
                return one
            if name in self._copies and self._copies[name] == size:
                return {**one, "alike": True}
            return with_heads(one, lambda name, heads: heads * (size // self._copies[name]))

        return mapped(content, change)

    def piece(self, name: str, rank: int) -> Piece | None:
        """The part of a tensor that ``rank`` writes; None if another rank writes it."""
        row, column = divmod(rank, self._ranks.tensor.size)
        held, copies = self._held[rank][name], self._copies[name]
        if column % copies != 0 or (row > 0 and (held.blocks is None or held.shape[BLOCK_DIM] == 0)):
            return None
        ranges = {}
        if held.blocks is not None and self._ranks.context.size > 1:
            ranges[BLOCK_DIM] = range(row, held.blocks, self._ranks.context.size)
        if held.head_dim is not None and copies < self._ranks.tensor.size:
            heads = held.shape[held.head_dim]
            ranges[held.head_dim] = range(column // copies * heads, (column // copies + 1) * heads)
        return Piece(rank, ranges)

    def tensors(self) -> dict[str, Any]:
        """The entry ``tensors`` of the index: shape and pieces of each tensor, by name."""
        return {name: {"shape": self._shape(name), "pieces": self._pieces(name)} for name in sorted(self._copies)}

    def _pieces(self, name: str) -> list[dict[str, Any]]:
        pieces = (self.piece(name, rank) for rank in range(self._ranks.size))
        return [piece.to_json() for piece in pieces if piece is not None]

    def _shape(self, name: str) -> list[int]:
        held = self._held[0][name]
        shape = list(held.shape)
        if held.blocks is not None:
            shape[BLOCK_DIM] = held.blocks
        if held.head_dim is not None:
            shape[held.head_dim] *= self._ranks.tensor.size // self._copies[name]
        return shape


def _differ(name: str, kind: str) -> CacheFileError:
    return CacheFileError(
        f"save_cache: {kind} ranks hold different values of {name}, which is neither a packed cache nor the keys or "
        "values of a layer; save a tensor that all of them hold"
    )


def _write_part(tensors: dict[str, Tensor], path: Path, save: str, ranks: Ranks) -> dict[str, Any]:
    """Write the file of this rank; returns its entry in the index."""
    header = {
        "format": PART_FORMAT,
        "version": str(INDEX_VERSION),
        "save": save,
        "ranks": json.dumps({"context_parallel": ranks.context.rank, "tensor_parallel": ranks.tensor.rank}),
        "digests": json.dumps(digests.of_tensors(tensors)),
    }
    header["digest"] = digests.of_header(header)
    write_tensors(tensors, path, header)
    return {"name": path.name, "bytes": path.stat().st_size, "digest": header["digest"]}


def _write_index(index: dict[str, Any], folder: Path) -> None:
    """Replace the index, and delete the files of the save that it described before.

    No error follows the replacement: the ranks delete the files of this save after an error.
    """
    for entry in index["files"]:
        path = folder / entry["name"]
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise CacheFileError(f"save_cache: this rank does not see {path}; give a folder that all ranks share")
    try:
        earlier = names_of_parts(read_index(folder))
    except (CacheFileError, OSError, LookupError, TypeError):
        earlier = []
    index["digest"] = digests.of_header(index)
    write_file(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=1), encoding="utf-8"))
    for name in earlier:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
