"""Operators that copy whole token vectors of a packed cache. The copy is packed, and no vector is quantized again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.gather.words import select
from kvcompile.kernels.layout.packed_layout import growing_blocks, num_blocks
from kvcompile.packed.op_table import handles
from kvcompile.packed.tensor import CHANNELS, PACKED_DIM, PackedTensor
from kvcompile.packed.tracing import is_traced
from kvcompile.packed.view_geometry import stride_of_clone
from kvcompile.packed.writes import coordinates_of, encoded, not_from_end, plain, put, put_tokens, read

aten = torch.ops.aten


def _fresh(cache: PackedTensor, data: Tensor, size: Sequence[int], start: int | None = None) -> PackedTensor:
    """A cache that owns ``data`` and has the axes of ``cache``."""
    meta = cache.cache_meta if start is None else replace(cache.cache_meta, start=start)
    return PackedTensor.owning(data, meta, size)


@handles(PackedTensor, aten.clone.default)
def _clone(cache: PackedTensor, *, memory_format: torch.memory_format | None = None) -> PackedTensor:
    copy = _fresh(cache, cache.packed.clone(memory_format=torch.contiguous_format), cache.shape)
    return _in_memory_order(cache, copy, memory_format)


def _in_memory_order(cache: PackedTensor, copy: PackedTensor, memory_format: torch.memory_format | None) -> Any:
    """``copy`` with the strides of a copy of an equal plain tensor."""
    if memory_format not in (None, torch.preserve_format) or cache.is_contiguous():
        return copy
    return copy.with_stride(stride_of_clone(cache))


@handles(PackedTensor, aten._to_copy.default)
def _to_copy(
    cache: PackedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
    **kwargs: Any,
) -> Any:
    """A copy to another device is packed. A copy in another dtype is a plain tensor."""
    if dtype is not None and dtype != cache.dtype:
        return NotImplemented
    data = aten._to_copy.default(cache.packed, device=device, non_blocking=non_blocking)
    return _in_memory_order(cache, _fresh(cache, data, cache.shape), memory_format)


@handles(PackedTensor, aten.index_select.default)
def _index_select(cache: Tensor, dim: int, index: Tensor) -> Any:
    """Copies bytes, so reordering beams or evicting tokens quantizes nothing again.

    A selection of tokens from a cache with a residual is a read, because tokens in other blocks would be quantized
    again. A selection of heads from a cache in a calibrated format is also a read, because every head has its own
    basis.
    """
    if not isinstance(cache, PackedTensor) or cache.axes[dim] in CHANNELS:
        return NotImplemented
    axis = cache.axes[dim]
    if axis == "t" and cache.packed_layout.residual is not None:
        return NotImplemented
    if axis == "h" and cache.packed_layout.format.is_calibrated:
        return NotImplemented
    index = index.reshape(-1)
    size = list(cache.shape)
    size[dim] = index.shape[0]
    if axis != "t":
        copy = Tensor.index_select if is_traced(cache.packed) else select
        return _fresh(cache, copy(cache.packed, PACKED_DIM[axis], index), size)
    values = read(cache, coordinates_of(cache, "t", not_from_end(index, cache.num_tokens)))
    blocks = growing_blocks(index.shape[0]) if cache.growing else num_blocks(index.shape[0])
    result = _fresh(cache, cache.packed.new_zeros((blocks, *cache.packed.shape[1:])), size, start=0)
    put(result, result.packed, coordinates_of(result), values)
    return result


@handles(PackedTensor, aten.index.Tensor)
def _index(cache: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """A single 1-D index selects along its dimension. Any other combination of indices is a read."""
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if not isinstance(cache, PackedTensor) or len(indexed) != 1:
        return NotImplemented
    index = indices[indexed[0]]
    if index is None or index.dim() != 1:
        return NotImplemented
    selected = torch.arange(cache.shape[indexed[0]], device=cache.device)[index]
    return _index_select(cache, indexed[0], selected)


@handles(PackedTensor, aten.gather.default)
def _gather(cache: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """An expanded index, such as ``beams.view(-1, 1, 1, 1).expand(shape)``, selects. Any other index is a read."""
    if not isinstance(cache, PackedTensor) or index.dim() != cache.dim() or index.numel() == 0:
        return NotImplemented
    dim %= cache.dim()
    others = [other for other in range(cache.dim()) if other != dim]
    repeats = (index.stride(other) == 0 or index.shape[other] == 1 for other in others)
    if not all(repeats) or any(index.shape[other] != cache.shape[other] for other in others):
        return NotImplemented
    for other in reversed(others):
        index = index.select(other, 0)
    return _index_select(cache, dim, index)


@handles(PackedTensor, aten.roll.default)
def _roll(cache: PackedTensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if len(shifts) != 1 or len(dims) != 1:
        return NotImplemented
    extent = cache.shape[dims[0]]
    return _index_select(cache, dims[0], (torch.arange(extent, device=cache.device) - shifts[0]) % extent)


_IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
}
"""Maps operators that write whole vectors out of place to their in-place forms."""


def _written_copy(op: Any, cache: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A written copy of the cache. If the operator writes parts of vectors, the copy is a plain tensor."""
    if not isinstance(cache, PackedTensor):
        return NotImplemented
    try:
        return PackedTensor.handlers[_IN_PLACE[op]](_clone(cache), *args, **kwargs)
    except NotImplementedError:  # it does not write whole vectors
        return NotImplemented


for _op in _IN_PLACE:
    handles(PackedTensor, _op)(functools.partial(_written_copy, _op))


@handles(PackedTensor, aten.slice_scatter.default)
def _slice_scatter(cache: Tensor, source: Tensor, dim: int = 0, *place: Any, **kwargs: Any) -> Any:
    return _scattered(cache, lambda x: aten.slice.Tensor(x, dim, *place, **kwargs), source, dim)


@handles(PackedTensor, aten.select_scatter.default)
def _select_scatter(cache: Tensor, source: Tensor, dim: int, index: int) -> Any:
    return _scattered(cache, lambda x: aten.select.int(x, dim, index), source, dim)


def _scattered(cache: Tensor, part_of: Callable[[Tensor], Tensor], source: Tensor, dim: int) -> Any:
    if not isinstance(cache, PackedTensor) or cache.axes[dim] in CHANNELS:
        return NotImplemented
    result = _clone(cache)
    part = part_of(result)
    if not isinstance(part, PackedTensor):
        return NotImplemented
    part.copy_(source)
    return result


@handles(PackedTensor, aten.where.self)
def _where(condition: Tensor, chosen: Tensor, otherwise: Tensor) -> Any:
    """A masked update: ``where(mask, new, cache)`` or ``where(mask, cache, new)`` with one mask value per vector."""
    cache, new, keep = (
        (chosen, otherwise, condition) if isinstance(chosen, PackedTensor) else (otherwise, chosen, ~condition)
    )
    if not isinstance(cache, PackedTensor) or isinstance(new, PackedTensor) or new.dtype != cache.dtype:
        return NotImplemented
    if cache.axes[-1] != "d" or condition.dim() == 0 or (condition.shape[-1] != 1 and condition.stride(-1) != 0):
        return NotImplemented
    if torch.broadcast_shapes(condition.shape, new.shape, cache.shape) != cache.shape:
        return NotImplemented
    result = _clone(cache)
    keep = cache.to_stored_axes(keep[..., :1].expand(*cache.shape[:-1], 1))
    written = encoded(cache, cache.to_stored_axes(plain(new).expand(cache.shape)))
    put(result, result.packed, coordinates_of(result), written, valid=~keep[..., 0])
    return result


@handles(PackedTensor, aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Appends to the first tensor, a packed cache, along tokens; joins packed caches along sequences or heads."""
    cache, *others = tensors
    if not isinstance(cache, PackedTensor) or any(other.dtype != cache.dtype for other in others):
        return NotImplemented
    others = [other for other in others if tuple(other.shape) != (0,)]
    axis = cache.axes[dim]
    if axis in CHANNELS:
        return NotImplemented
    if axis == "t":
        return _append(cache, others, dim)
    if axis == "h" and cache.packed_layout.format.is_calibrated:
        return NotImplemented
    joined = [cache]
    for other in others:
        if not isinstance(other, PackedTensor) or _kind(other) != _kind(cache):
            return NotImplemented
        joined.append(other)
    size = list(cache.shape)
    size[dim] = sum(part.shape[dim] for part in joined)
    blocks = min(part.packed.shape[0] for part in joined)
    return _fresh(cache, torch.cat([part.packed[:blocks] for part in joined], PACKED_DIM[axis]), size)


def _kind(cache: PackedTensor) -> tuple[Any, ...]:
    return cache.packed_layout, cache.axes, cache.start, cache.num_tokens


def _append(cache: PackedTensor, others: Sequence[Tensor], dim: int) -> PackedTensor:
    dim = dim % cache.dim()
    for other in others:
        expected = [*cache.shape[:dim], other.shape[dim], *cache.shape[dim + 1 :]]
        if list(other.shape) != expected:
            raise RuntimeError(
                f"cat: a tensor of shape {tuple(other.shape)} does not extend a packed cache of shape "
                f"{tuple(cache.shape)} along dimension {dim}; only this dimension may differ"
            )
    result = cache.extended(sum(other.shape[dim] for other in others))
    begin = cache.shape[dim]
    for other in others:
        tokens = torch.arange(begin, begin + other.shape[dim], device=cache.device)
        # No other cache sees the new slots, so they are written in place even if the storage is shared.
        put_tokens(result, result.packed, tokens, other)
        begin = begin + other.shape[dim]
    return result
