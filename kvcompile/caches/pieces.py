"""Stored tensors in pieces: each file has some blocks and some heads of a tensor.

A piece is ``tensor[first : first + step * count : step]`` along each divided dimension. The index of a saved cache
lists the pieces of every tensor, so any number of ranks can collect their blocks and heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.errors import CacheFileError

Ranges = Mapping[int, range]
"""The indices along the divided dimensions of a tensor; all indices along the others."""


@dataclass(frozen=True)
class Piece:
    """The part of a tensor in one file.

    Attributes:
        file: number of the file in the index.
        ranges: the indices of the tensor in this piece, by dimension.
    """

    file: int
    ranges: Ranges

    def shape(self, whole: Sequence[int]) -> list[int]:
        """The shape of the piece of a tensor of shape ``whole``."""
        return [len(self.ranges.get(dim, range(size))) for dim, size in enumerate(whole)]

    def to_json(self) -> dict[str, Any]:
        ranges = {str(dim): [one.start, one.step, len(one)] for dim, one in self.ranges.items()}
        return {"file": self.file, "ranges": ranges}

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Piece:
        """Inverse of :meth:`to_json`. Raises KeyError, TypeError or ValueError for another form."""
        ranges = {}
        for dim, numbers in content["ranges"].items():
            first, step, count = numbers
            if any(type(number) is not int for number in numbers) or min(first, count) < 0 or step < 1:
                raise ValueError(f"{numbers} are not a first index, a step and a count")
            ranges[int(dim)] = range(first, first + step * count, step)
        return cls(content["file"], ranges)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a saved cache: its shape, and the files that have it.

    Attributes:
        shape: the shape of the whole tensor.
        pieces: parts that cover every element once, as :func:`check_pieces` verifies.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def check_pieces(name: str, stored: StoredTensor, shape_in: Callable[[Piece], Sequence[int]], path: Any) -> None:
    """Make sure that the pieces have the shapes that the files hold, and cover each element exactly once.

    Args:
        name: the name of the tensor.
        stored: the tensor.
        shape_in: the shape of a piece in its file.
        path: the saved cache, for messages.

    Raises:
        CacheFileError: the pieces do not match or do not cover the tensor.
    """
    whole, sizes = stored.shape, []
    for piece in stored.pieces:
        sizes.append(math.prod(piece.shape(whole)))
        outside = any(dim >= len(whole) or (one and one[-1] >= whole[dim]) for dim, one in piece.ranges.items())
        if outside or list(shape_in(piece)) != piece.shape(whole):
            found = list(shape_in(piece))
            raise CacheFileError(
                f"{path}: {name} does not fit the index: a file has a piece of shape {found}; save the cache again"
            )
    dims = sorted({dim for piece in stored.pieces for dim in piece.ranges})
    if sum(sizes) != math.prod(whole) or (len(stored.pieces) > 1 and not _are_disjoint(stored, dims)):
        raise CacheFileError(f"{path}: the pieces of {name} do not cover it exactly once; save the cache again")


def _are_disjoint(stored: StoredTensor, dims: Sequence[int]) -> bool:
    taken = torch.zeros([stored.shape[dim] for dim in dims], dtype=torch.bool, device="cpu")
    for piece in stored.pieces:
        own = _grid([piece.ranges.get(dim, range(stored.shape[dim])) for dim in dims])
        if taken[own].any():
            return False
        taken[own] = True
    return True


def _grid(indices: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    """Indices that select the outer product of ``indices``, one for each of the first dimensions."""
    return torch.meshgrid([torch.tensor(list(one), dtype=torch.int64, device="cpu") for one in indices], indexing="ij")


def files_needed(stored: StoredTensor, wanted: Ranges) -> list[int]:
    """The numbers of the files that have some of the indices ``wanted``.

    If no file has any, because a rank of a short cache holds no block, the first file gives the dtype.
    """
    files = [piece.file for piece in stored.pieces if _common(stored, piece, wanted) is not None]
    return files or [stored.pieces[0].file]


def assembled(stored: StoredTensor, wanted: Ranges, read: Callable[[int], Tensor]) -> Tensor:
    """The part of a stored tensor at the indices ``wanted``.

    Args:
        stored: the tensor, checked with :func:`check_pieces`.
        wanted: the indices along each dimension; all indices along dimensions that it does not name.
        read: the piece in a file, by the number of the file; called for :func:`files_needed` only.

    Returns:
        A tensor of the dtype that the files hold. It is the piece itself if the caller wants exactly one piece.
    """
    ranges = [wanted.get(dim, range(size)) for dim, size in enumerate(stored.shape)]
    for piece in stored.pieces:
        if all(own == piece.ranges.get(dim, range(stored.shape[dim])) for dim, own in enumerate(ranges)):
            return read(piece.file)
    result: Tensor | None = None
    for piece in stored.pieces:
        common = _common(stored, piece, wanted)
        if common is None:
            continue
        data = read(piece.file)
        result = data.new_empty([len(one) for one in ranges]) if result is None else result
        target, source = zip(*common, strict=True)
        result[_grid(target)] = data[_grid(source)]
    return result if result is not None else read(stored.pieces[0].file).new_empty([len(one) for one in ranges])


def _common(stored: StoredTensor, piece: Piece, wanted: Ranges) -> list[tuple[list[int], list[int]]] | None:
    """The indices that ``piece`` and ``wanted`` share, for the first dimensions up to the last divided one.

    Returns:
        For each dimension the places in the result and in the piece; None if nothing is shared.
    """
    common = []
    for dim in range(max((*piece.ranges, *wanted), default=-1) + 1):
        every = range(stored.shape[dim])
        own, held = wanted.get(dim, every), piece.ranges.get(dim, every)
        pairs = [(place, held.index(index)) for place, index in enumerate(own) if index in held]
        if not pairs:
            return None
        common.append(([place for place, _ in pairs], [place for _, place in pairs]))
    return common
