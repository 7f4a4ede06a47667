"""Views that share the bytes of a packed cache: slices of tokens, sequences and heads, and reordered axes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from kvcompile.compat.symbols import check, without_excluded_cases
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, MIN_GROWING_BLOCKS, num_blocks
from kvcompile.packed.op_table import handles
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import CHANNELS, PACKED_DIM, PackedTensor

aten = torch.ops.aten


@handles(PackedTensor, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(cache: PackedTensor) -> PackedTensor:
    return cache.view_as_part(cache.shape, cache.stride())


def keeps_shape(cache: PackedSubclass, size: Sequence[int]) -> bool:
    """Whether a view to ``size``, in which -1 stands for any size, has the shape of ``cache``."""
    return len(size) == cache.dim() and all(new in (-1, old) for new, old in zip(size, cache.shape, strict=True))


@handles(PackedTensor, aten.slice.Tensor)
def _slice(cache: PackedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = dim % cache.dim()
    axis, extent = cache.axes[dim], cache.shape[dim]
    start, end = _clamp(0 if start is None else start, extent), _clamp(extent if end is None else end, extent)
    length = max(end - start, 0) if isinstance(end - start, int) else torch.sym_max(end - start, 0)
    if axis in CHANNELS:
        return alias(cache) if start == 0 and length == extent and step == 1 else NotImplemented
    if axis == "t" and step != 1:
        return NotImplemented
    size, stride = list(cache.shape), list(cache.stride())
    size[dim], stride[dim] = (length + step - 1) // step, stride[dim] * step
    if axis == "t":
        return _token_range(cache, start, length, size, stride, skipped=start * cache.stride(dim))
    changes: dict[str, Any] = {}
    if axis == "h" and cache.packed_layout.format.is_calibrated:
        if step != 1 or not isinstance(length, int) or length == 0:
            return NotImplemented
        changes = {"layout": cache.packed_layout.of_heads(start, length)}
    packed = aten.slice.Tensor(cache.packed, PACKED_DIM[axis], start, end, step)
    return cache.view_as_part(size, stride, packed, skipped=start * cache.stride(dim), **changes)


def _is_from_data(index: int) -> bool:
    """Whether a number depends on the data of a call (an unbacked symbol)."""
    return isinstance(index, torch.SymInt) and bool(free_unbacked_symbols(index))


def _clamp(index: int, extent: int) -> int:
    """A slice bound, clamped to 0 and ``extent`` by the rules of Python.

    A bound that depends on the data of a call must lie between them. The compiled graph checks it. The end of ``[:]``
    is not compared: for a symbolic extent the comparison would be a guard, which limits the extent.
    """
    if isinstance(index, int) and index == sys.maxsize:
        return extent
    if _is_from_data(index):
        index = without_excluded_cases(index)
        check(index >= 0)
        check(index <= extent)
        return index
    index = index + extent if index < 0 else index
    return 0 if index < 0 else extent if index > extent else index


def _token_range(
    cache: PackedTensor, start: int, length: int, size: Sequence[int], stride: Sequence[int], **changes: Any
) -> PackedTensor:
    """The view of tokens ``start`` to ``start + length``. Its ``packed`` begins at the first block that it needs.

    With a residual, ``packed`` begins at the header, because the header's tags count blocks from the cache's first
    token.
    """
    layout = cache.packed_layout
    begin = cache.start + start
    if _is_from_data(begin) or _is_from_data(length):  # so that the number of blocks does not depend on data
        return cache.view_as_part(size, stride, start=begin, ends_cache=False, **changes)
    first = begin // BLOCK_TOKENS if layout.residual is None else 0
    last = num_blocks(begin + length)
    if cache.growing:
        last = torch.sym_max(last, first + MIN_GROWING_BLOCKS)  # the slice below stops at the storage's end
    packed = cache.packed[first : layout.header_blocks + last]
    return cache.view_as_part(
        size,
        stride,
        packed,
        start=begin - first * BLOCK_TOKENS,
        ends_cache=start + length == cache.num_tokens,
        **changes,
    )


def _index(index: int, dim: int, extent: int) -> int:
    """The non-negative form of an index.

    An index that depends on the data of a call must not be negative. The compiled graph checks it.
    """
    if _is_from_data(index):
        check(index >= 0)
        check(index < extent)
        return index
    if not -extent <= index < extent:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {extent}")
    return index + extent if index < 0 else index


@handles(PackedTensor, aten.select.int)
def _select(cache: PackedTensor, dim: int, index: int) -> Any:
    dim = dim % cache.dim()
    axis = cache.axes[dim]
    if axis in CHANNELS:
        return NotImplemented
    index = _index(index, dim, cache.shape[dim])
    keep = [other for other in range(cache.dim()) if other != dim]
    geometry: dict[str, Any] = {
        "size": [cache.shape[other] for other in keep],
        "stride": [cache.stride(other) for other in keep],
        "axes": cache.axes[:dim] + cache.axes[dim + 1 :],
        "skipped": index * cache.stride(dim),
    }
    if axis == "t":
        return _token_range(cache, index, 1, **geometry)
    if axis == "h":
        geometry["layout"] = cache.packed_layout.of_heads(index, 1)
    return cache.view_as_part(packed=cache.packed.narrow(PACKED_DIM[axis], index, 1), **geometry)


@handles(PackedTensor, aten.permute.default)
def _permute(cache: PackedTensor, dims: Sequence[int]) -> PackedTensor:
    order = [dim % cache.dim() for dim in dims]
    return cache.view_as_part(
        axes="".join(cache.axes[dim] for dim in order),
        size=[cache.shape[dim] for dim in order],
        stride=[cache.stride(dim) for dim in order],
    )


@handles(PackedTensor, aten.transpose.int)
def transpose(cache: PackedSubclass, dim0: int, dim1: int) -> Any:
    order = list(range(cache.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return aten.permute.default(cache, order)


@handles(PackedTensor, aten.split.Tensor)
def split(cache: PackedSubclass, split_size: int, dim: int = 0) -> Any:
    begins = range(0, cache.shape[dim], split_size) if cache.shape[dim] else (0,)
    return [aten.slice.Tensor(cache, dim, begin, begin + split_size) for begin in begins]


@handles(PackedTensor, aten.split_with_sizes.default)
def split_with_sizes(cache: PackedSubclass, split_sizes: Sequence[int], dim: int = 0) -> Any:
    parts, begin = [], 0
    for size in split_sizes:
        parts.append(aten.slice.Tensor(cache, dim, begin, begin + size))
        begin += size
    return parts


@handles(PackedTensor, aten.unbind.int)
def unbind(cache: PackedSubclass, dim: int = 0) -> Any:
    return [aten.select.int(cache, dim, index) for index in range(cache.shape[dim])]
