"""What each PyTorch operator does to a packed pool of blocks: what it does to the slots that it names.

Views as slots or as other blocks, and views of some blocks, share the bytes. An operator that would write in another
way than those here raises; any other reads dequantized values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.packed_op_table import POOL_HANDLERS, handles_pool
from kvcompile.packed_ops import run
from kvcompile.packed_pool import PackedPool
from kvcompile.packed_tensor import PackedTensor
from kvcompile.packed_views import pool_or_slots

aten = torch.ops.aten

_REFUSAL = (
    "{func} would change a packed pool of KV blocks in place, but only whole token vectors can be written to it "
    "(index_put_ or an assignment to blocks and slots, index_copy_ to pool.view(-1, num_kv_heads, head_dim), copy_, "
    "fill_, zero_); or work on pool.dequantize()"
)


def dispatch_pool(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs operator ``func``; at least one argument is, or a list among the arguments holds, a PackedPool.

    Raises:
        NotImplementedError: the operator would write to a pool and is not a write of whole token vectors.
    """
    return run(func, args, kwargs, PackedPool, POOL_HANDLERS, _REFUSAL)


@handles_pool(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(pool: PackedPool) -> PackedPool:
    return PackedPool(_slots_of(aten.alias.default(pool.slots)), pool.shape)


def _slots_of(x: Any) -> PackedTensor:
    assert isinstance(x, PackedTensor), "what views or copies slots as they are keeps them packed"
    return x


@handles_pool(aten.detach_.default)
def _detach_(pool: PackedPool) -> PackedPool:
    return pool


@handles_pool(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)
def _view(pool: PackedPool, size: Sequence[int], **kwargs: Any) -> Any:
    return pool_or_slots(pool.slots, size, pool.shape)


@handles_pool(aten.slice.Tensor)
def _slice(pool: PackedPool, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """Blocks one behind the other are a view."""
    if dim % pool.dim() != 0 or step != 1:
        return NotImplemented
    first, last, _ = slice(start, end).indices(pool.shape[0])
    return _blocks(pool, first, max(last - first, 0))


@handles_pool(aten.select.int)
def _select(pool: PackedPool, dim: int, index: int) -> Any:
    """One block, [block_size, num_kv_heads, head_dim]."""
    if dim % pool.dim() != 0:
        return NotImplemented
    if not -pool.shape[0] <= index < pool.shape[0]:
        raise IndexError(f"index {index} is out of range for dimension {dim} of size {pool.shape[0]}")
    return _blocks(pool, index % pool.shape[0], 1).slots


def _blocks(pool: PackedPool, first: int, count: int) -> PackedPool:
    slots = aten.slice.Tensor(pool.slots, 0, first * pool.block_size, (first + count) * pool.block_size)
    return PackedPool(_slots_of(slots), (count, *pool.shape[1:]))


@handles_pool(aten.clone.default)
def _clone(pool: PackedPool, *, memory_format: torch.memory_format | None = None) -> PackedPool:
    return PackedPool(_slots_of(pool.slots.clone()), pool.shape)


@handles_pool(aten._to_copy.default)
def _to_copy(pool: PackedPool, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Stays packed on another device; another dtype is a read."""
    if dtype is not None and dtype != pool.dtype:
        return NotImplemented
    return PackedPool(_slots_of(aten._to_copy.default(pool.slots, **kwargs)), pool.shape)


@handles_pool(aten.copy_.default)
def _copy_(pool: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(pool, PackedPool):
        return NotImplemented
    same = source.shape == pool.shape
    new = source.slots if isinstance(source, PackedPool) and same else source.expand(pool.shape).flatten(0, 1)
    pool.slots.copy_(new, non_blocking)
    return pool


@handles_pool(aten.zero_.default)
def _zero_(pool: PackedPool) -> PackedPool:
    pool.slots.zero_()
    return pool


@handles_pool(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(pool: Tensor, value: Any) -> Any:
    if not isinstance(pool, PackedPool):
        return NotImplemented
    pool.slots.fill_(value)
    return pool


@handles_pool(aten.index_copy_.default)
def _index_copy_(pool: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    """Whole blocks."""
    if not isinstance(pool, PackedPool) or dim % pool.dim() != 0:
        return NotImplemented
    expected = (index.numel(), *pool.shape[1:])
    if tuple(source.shape) != expected:
        raise RuntimeError(f"index_copy_ into a packed pool: source is {tuple(source.shape)}, expected {expected}")
    return _index_put_(pool, [index.reshape(-1)], source)


@handles_pool(aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    pool: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not isinstance(pool, PackedPool) or accumulate or not _are_slots(indices):
        return NotImplemented
    # The slots that the indices name: index their numbers in the same way, which checks the bounds.
    numbers = torch.arange(pool.slots.shape[0], device=pool.device).view(pool.shape[:2])
    slots = aten.index.Tensor(numbers, indices)
    vectors = values.expand(*slots.shape, *pool.shape[2:]).reshape(-1, *pool.shape[2:])
    aten.index_put_.default(pool.slots, [slots.reshape(-1)], vectors)
    return pool


def _are_slots(indices: Sequence[Tensor | None]) -> bool:
    """Whether the indices are of blocks and of slots within them, and of nothing else."""
    masks = [index for index in indices if index is not None and index.dtype in (torch.bool, torch.uint8)]
    return len(indices) - len(masks) + sum(mask.dim() for mask in masks) <= 2


@handles_pool(aten.record_stream.default)
def _record_stream(pool: PackedPool, stream: Any) -> None:
    pool.slots.record_stream(stream)
