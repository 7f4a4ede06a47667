"""What each PyTorch operator does to a stack of packed caches: the same to each part, where that has the same meaning.

A selection of parts is a view of them. An operator that would write to several parts in another way than those here
raises; any other reads dequantized values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.packed_op_table import HANDLERS, STACK_HANDLERS, handles_stack
from kvcompile.packed_ops import run
from kvcompile.packed_stack import PackedStack

aten = torch.ops.aten

_REFUSAL = (
    "{func} would change a stack of packed KV caches in place; write to one cache of it (kv[0], cache[layer, 1]), in a "
    "way in which a packed cache can be written, or work on stack.dequantize()"
)


def dispatch_stack(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs operator ``func``; at least one argument is, or a list among the arguments holds, a PackedStack.

    Raises:
        NotImplementedError: the operator would write to a stack in a way that is not that of its parts.
    """
    return run(func, args, kwargs, PackedStack, STACK_HANDLERS, _REFUSAL)


def _each(stack: PackedStack, change: Callable[[Tensor], Tensor]) -> PackedStack:
    """The stack of what ``change`` makes of the parts."""
    parts = [change(part) for part in stack.parts]
    return PackedStack(parts, (*stack.stack_shape, *parts[0].shape))


def _sources(stack: PackedStack, source: Tensor, size: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """The parts, each with what is written to it of ``source``, broadcast to ``size`` of each part."""
    source = source.expand(*stack.stack_shape, *size)
    if isinstance(source, PackedStack) and source.stack_shape == stack.stack_shape:
        sources: Sequence[Tensor] = source.parts
    else:
        sources = source.reshape(-1, *size).unbind()
    return zip(stack.parts, sources, strict=True)


@handles_stack(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(stack: PackedStack) -> PackedStack:
    return _each(stack, aten.alias.default)


@handles_stack(aten.detach_.default)
def _detach_(stack: PackedStack) -> PackedStack:
    return stack


@handles_stack(aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)
def _view(stack: PackedStack, size: Sequence[int], **kwargs: Any) -> Any:
    same = len(size) == stack.dim() and all(new in (-1, old) for new, old in zip(size, stack.shape, strict=True))
    return _alias(stack) if same else NotImplemented


@handles_stack(aten.select.int)
def _select(stack: PackedStack, dim: int, index: int) -> Tensor:
    dim = dim % stack.dim()
    if dim >= stack.num_stack_dims:
        return _each(stack, lambda part: aten.select.int(part, dim - stack.num_stack_dims, index))
    return _chosen(stack, dim, index)


@handles_stack(aten.slice.Tensor)
def _slice(stack: PackedStack, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> PackedStack:
    dim = dim % stack.dim()
    if dim >= stack.num_stack_dims:
        return _each(stack, lambda part: aten.slice.Tensor(part, dim - stack.num_stack_dims, start, end, step))
    return _chosen(stack, dim, slice(start, end, step))


def _chosen(stack: PackedStack, dim: int, index: int | slice) -> Any:
    """A view of the parts that ``index`` of a stack dimension selects."""
    chosen = range(stack.stack_shape[dim])[index]
    kept = chosen if isinstance(chosen, range) else (chosen,)
    parts = [aten.alias.default(part) for place, part in stack.items() if place[dim] in kept]
    if not parts:
        return NotImplemented
    size = list(stack.shape)
    size[dim : dim + 1] = [len(kept)] if isinstance(chosen, range) else []
    return PackedStack(parts, size) if len(size) > parts[0].dim() else parts[0]


STACK_HANDLERS.update({op: HANDLERS[op] for op in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)})


@handles_stack(aten.clone.default)
def _clone(stack: PackedStack, *, memory_format: torch.memory_format | None = None) -> PackedStack:
    return _each(stack, lambda part: part.clone(memory_format=torch.contiguous_format))


@handles_stack(aten._to_copy.default)
def _to_copy(stack: PackedStack, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """Stays packed on another device; another dtype is a read."""
    if dtype is not None and dtype != stack.dtype:
        return NotImplemented
    return _each(stack, lambda part: aten._to_copy.default(part, **kwargs))


@handles_stack(aten.index_select.default)
def _index_select(stack: Tensor, dim: int, index: Tensor) -> Any:
    """Reorders sequences (or heads, or tokens) of every part."""
    if not isinstance(stack, PackedStack) or dim % stack.dim() < stack.num_stack_dims:
        return NotImplemented
    dim = dim % stack.dim() - stack.num_stack_dims
    return _each(stack, lambda part: part.index_select(dim, index))


@handles_stack(aten.index.Tensor)
def _index(stack: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """An index of dimensions of the parts; one of the stack's own is a read."""
    if not isinstance(stack, PackedStack) or _indexed(stack, indices) != 1:
        return NotImplemented
    return _each(stack, lambda part: aten.index.Tensor(part, indices[stack.num_stack_dims :]))


def _indexed(stack: PackedStack, indices: Sequence[Tensor | None]) -> int:
    """How many dimensions of parts are indexed by a vector; 0 if others are as well, or in another way."""
    own, of_parts = indices[: stack.num_stack_dims], indices[stack.num_stack_dims :]
    given = [index for index in of_parts if index is not None]
    plain = all(index.dim() == 1 and index.dtype not in (torch.bool, torch.uint8) for index in given)
    return len(given) if plain and all(index is None for index in own) else 0


@handles_stack(aten.copy_.default)
def _copy_(stack: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(stack, PackedStack):
        return NotImplemented
    for part, new in _sources(stack, source, stack.parts[0].shape):
        part.copy_(new, non_blocking)
    return stack


@handles_stack(aten.zero_.default)
def _zero_(stack: PackedStack) -> PackedStack:
    for part in stack.parts:
        part.zero_()
    return stack


@handles_stack(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(stack: Tensor, value: Any) -> Any:
    if not isinstance(stack, PackedStack):
        return NotImplemented
    for part in stack.parts:
        part.fill_(value)
    return stack


@handles_stack(aten.index_copy_.default)
def _index_copy_(stack: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not isinstance(stack, PackedStack) or dim % stack.dim() < stack.num_stack_dims:
        return NotImplemented
    expected = [*stack.shape[: dim % stack.dim()], index.numel(), *stack.shape[dim % stack.dim() + 1 :]]
    if list(source.shape) != expected:
        raise RuntimeError(
            f"index_copy_ into a stack of packed caches: source is {tuple(source.shape)}, expected {tuple(expected)}"
        )
    for part, new in _sources(stack, source, expected[stack.num_stack_dims :]):
        part.index_copy_(dim % stack.dim() - stack.num_stack_dims, index, new)
    return stack


@handles_stack(aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    stack: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """``kv[:, :, :, positions] = x``: one vector of indices along a dimension of the parts."""
    if not isinstance(stack, PackedStack) or accumulate or _indexed(stack, indices) != 1:
        return NotImplemented
    of_parts = indices[stack.num_stack_dims :]
    size = [
        part if index is None else index.shape[0]
        for part, index in zip(
            stack.shape[stack.num_stack_dims :],
            [*of_parts, *[None] * (stack.parts[0].dim() - len(of_parts))],
            strict=True,
        )
    ]
    for part, new in _sources(stack, values, size):
        aten.index_put_.default(part, of_parts, new)
    return stack


@handles_stack(aten.record_stream.default)
def _record_stream(stack: PackedStack, stream: Any) -> None:
    for part in stack.parts:
        part.record_stream(stream)
