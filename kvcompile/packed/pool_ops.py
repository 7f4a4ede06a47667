"""Operators on a packed pool of blocks, applied to the slots that they address.

These views share the bytes: the pool as slots, the pool with another block size, and some blocks of the pool. Other
operators follow the general rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout.axes import SLOT_AXES
from kvcompile.packed.op_table import handles
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.views import alias, keeps_shape

aten = torch.ops.aten


@handles(PackedPool, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(pool: PackedPool) -> PackedPool:
    return _with_slots(pool, aten.alias.default(pool.slots))


def _with_slots(pool: PackedPool, slots: Any) -> PackedPool:
    """A pool with the shape of ``pool`` and other slots."""
    return PackedPool(_slots_of(slots), pool.shape, pool.heads_first)


def _slots_of(x: Any) -> PackedTensor:
    assert isinstance(x, PackedTensor), "a view or copy of whole slots is packed"
    return x


@handles(PackedPool, aten.detach_.default)
def _detach_(pool: PackedPool) -> PackedPool:
    return pool


_SHAPE_OPS = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)


@handles(PackedTensor, *_SHAPE_OPS)
def _view_cache(cache: PackedTensor, size: Sequence[int], **kwargs: Any) -> Any:
    if cache.axes == SLOT_AXES:
        return _pool_or_slots(cache, size, cache.shape)
    return alias(cache) if keeps_shape(cache, size) else NotImplemented


def _pool_or_slots(slots: PackedTensor, size: Sequence[int], shape: Sequence[int]) -> Any:
    """Views ``slots``, now of ``shape``, in ``size``: as slots or as blocks of slots. Other sizes are not packed."""
    if not slots.is_contiguous():
        return NotImplemented
    if len(size) == len(shape):
        size = [old if new == -1 else new for new, old in zip(size, shape, strict=True)]
    elif -1 in size:
        numel = math.prod(shape)
        size = [new if new != -1 else numel // -math.prod(size) for new in size]
    if len(size) not in (3, 4) or list(size[-2:]) != list(slots.shape[1:]) or math.prod(size) != math.prod(shape):
        return NotImplemented
    own = alias(slots)
    return own if len(size) == 3 else PackedPool(own, size)


@handles(PackedPool, *_SHAPE_OPS)
def _view(pool: PackedPool, size: Sequence[int], **kwargs: Any) -> Any:
    if not pool.heads_first:
        return _pool_or_slots(pool.slots, size, pool.shape)
    return _alias(pool) if keeps_shape(pool, size) else NotImplemented


@handles(PackedPool, aten.transpose.int)
def _transpose(pool: PackedPool, dim0: int, dim1: int) -> Any:
    return _alias(pool).exchanged() if {dim0 % 4, dim1 % 4} == {1, 2} else NotImplemented


@handles(PackedPool, aten.permute.default)
def _permute(pool: PackedPool, dims: Sequence[int]) -> Any:
    return _alias(pool).exchanged() if [dim % 4 for dim in dims] == [0, 2, 1, 3] else NotImplemented


@handles(PackedPool, aten.slice.Tensor)
def _slice(pool: PackedPool, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """A slice of consecutive blocks is a packed view.

    A full slice of another dimension is a packed view too; indexing with a symbolic size issues such slices.
    """
    if dim % pool.dim() != 0 or step != 1:
        is_whole = step == 1 and start in (None, 0) and (end is None or end >= pool.shape[dim])
        return _alias(pool) if is_whole else NotImplemented
    first, last, _ = slice(start, end).indices(pool.shape[0])
    return _blocks(pool, first, max(last - first, 0))


@handles(PackedPool, aten.select.int)
def _select(pool: PackedPool, dim: int, index: int) -> Any:
    """Selects one block, [block_size, num_kv_heads, head_dim] or with heads first."""
    if dim % pool.dim() != 0:
        return NotImplemented
    if not -pool.shape[0] <= index < pool.shape[0]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {pool.shape[0]}")
    slots = _blocks(pool, index % pool.shape[0], 1).slots
    return slots.transpose(0, 1) if pool.heads_first else slots


def _blocks(pool: PackedPool, first: int, count: int) -> PackedPool:
    slots = aten.slice.Tensor(pool.slots, 0, first * pool.block_size, (first + count) * pool.block_size)
    return PackedPool(_slots_of(slots), (count, *pool.shape[1:]), pool.heads_first)


@handles(PackedPool, aten.clone.default)
def _clone(pool: PackedPool, *, memory_format: torch.memory_format | None = None) -> PackedPool:
    return _with_slots(pool, pool.slots.clone())


@handles(PackedPool, aten._to_copy.default)
def _to_copy(pool: PackedPool, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """A copy to another device is packed. A copy in another dtype is a plain tensor."""
    if dtype is not None and dtype != pool.dtype:
        return NotImplemented
    return _with_slots(pool, aten._to_copy.default(pool.slots, **kwargs))


@handles(PackedPool, aten.copy_.default)
def _copy_(pool: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(pool, PackedPool):
        return NotImplemented
    same = source.shape == pool.shape
    if isinstance(source, PackedPool) and same and source.heads_first == pool.heads_first:
        new: Tensor = source.slots
    else:
        new = source.expand(pool.shape)
        new = (new.transpose(1, 2) if pool.heads_first else new).flatten(0, 1)
    pool.slots.copy_(new, non_blocking)
    return pool


@handles(PackedPool, aten.zero_.default)
def _zero_(pool: PackedPool) -> PackedPool:
    pool.slots.zero_()
    return pool


@handles(PackedPool, aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(pool: Tensor, value: Any) -> Any:
    if not isinstance(pool, PackedPool):
        return NotImplemented
    pool.slots.fill_(value)
    return pool


@handles(PackedPool, aten.index_copy_.default)
def _index_copy_(pool: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Writes whole blocks."""
    if not isinstance(pool, PackedPool) or dim % pool.dim() != 0:
        return NotImplemented
    expected = (index.numel(), *pool.shape[1:])
    if tuple(source.shape) != expected:
        raise RuntimeError(f"index_copy_ into a packed pool: source is {tuple(source.shape)}, expected {expected}")
    return _index_put_(pool, [index.reshape(-1)], source)


@handles(PackedPool, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    pool: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not isinstance(pool, PackedPool) or accumulate:
        return NotImplemented
    of_slots = _indices_of_slots(pool, indices)
    if of_slots is None:
        return NotImplemented
    # Index the slot numbers in the same way to find the addressed slots; this also checks the bounds.
    vector_shape = pool.slots.shape[1:]
    numbers = torch.arange(pool.slots.shape[0], device=pool.device).view(-1, pool.block_size)
    slots = aten.index.Tensor(numbers, of_slots)
    if pool.heads_first and all(index is None for index in of_slots[1:]):
        num_kv_heads, head_dim = vector_shape
        values = values.expand(*slots.shape[:-1], num_kv_heads, slots.shape[-1], head_dim).transpose(-3, -2)
    vectors = values.expand(*slots.shape, *vector_shape).reshape(-1, *vector_shape)
    aten.index_put_.default(pool.slots, [slots.reshape(-1)], vectors)
    return pool


def _indices_of_slots(pool: PackedPool, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """The indices of blocks and of slots within blocks; None if ``indices`` also index heads or channels."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    if not pool.heads_first:
        return list(indices) if len(indices) - len(masks) + sum(mask.dim() for mask in masks) <= 2 else None
    if any(mask.dim() > 1 for mask in masks):
        return None
    missing: list[Tensor | None] = [None] * (4 - len(indices))
    blocks, heads, slots, channels = [*indices, *missing]
    return [blocks, slots] if blocks is not None and heads is None and channels is None else None


@handles(PackedPool, aten.record_stream.default)
def _record_stream(pool: PackedPool, stream: Any) -> None:
    pool.slots.record_stream(stream)
