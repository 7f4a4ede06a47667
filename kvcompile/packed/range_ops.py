"""Operators on a stack whose parts are ranges of channels: operators of the divided stack, on divided arguments.

A slice of the last dimension that covers exactly one range is a view of this part. Operators that mix or divide ranges
have no handler here. They follow the general rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.packed.op_table import handles
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.stack_ops import check_index_copy
from kvcompile.packed.views import keeps_shape, split, split_with_sizes, transpose, unbind

aten = torch.ops.aten

handles(PackedRanges, aten.transpose.int)(transpose)
handles(PackedRanges, aten.split.Tensor)(split)
handles(PackedRanges, aten.split_with_sizes.default)(split_with_sizes)
handles(PackedRanges, aten.unbind.int)(unbind)


def _on_divided(op: Any, stack: PackedRanges, *args: Any, **kwargs: Any) -> Any:
    """The result of the operator on the divided stack, with ranges of channels in one dimension again."""
    result = PackedStack.handlers[op](stack.divided, *args, **kwargs)
    return PackedRanges.of(result) if isinstance(result, PackedStack) else result


def _divided_source(stack: PackedRanges, source: Tensor) -> Tensor | None:
    """A source of a write, with a dimension for the ranges; None if it has another number of channels."""
    if isinstance(source, PackedRanges):
        return source.divided if source.num_ranges == stack.num_ranges else _divided_source(stack, source.dequantize())
    if source.dim() == 0 or source.shape[-1] == 1:
        return source.unsqueeze(-1) if source.dim() else source
    return source.unflatten(-1, (stack.num_ranges, -1)) if source.shape[-1] == stack.shape[-1] else None


def _handle_whole(op: Any) -> None:
    """Registers an operator that has no dimension among its arguments, and no source."""

    @handles(PackedRanges, op)
    def handler(stack: PackedRanges, *args: Any, **kwargs: Any) -> Any:
        return _on_divided(op, stack, *args, **kwargs)


def _handle_along(op: Any) -> None:
    """Registers an operator along one dimension, which must not be the last."""

    @handles(PackedRanges, op)
    def handler(stack: Tensor, dim: int, *args: Any) -> Any:
        if not isinstance(stack, PackedRanges) or dim % stack.dim() == stack.dim() - 1:
            return NotImplemented
        return _on_divided(op, stack, dim % stack.dim(), *args)


def _handle_in_place(op: Any) -> None:
    @handles(PackedRanges, op)
    def handler(stack: Tensor, *args: Any) -> Any:
        if not isinstance(stack, PackedRanges):
            return NotImplemented
        PackedStack.handlers[op](stack.divided, *args)
        return stack


for _op in (
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.record_stream.default,
):
    _handle_whole(_op)
for _op in (aten.select.int, aten.index_select.default):
    _handle_along(_op)
for _op in (aten.detach_.default, aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor):
    _handle_in_place(_op)


@handles(PackedRanges, aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)
def _view(stack: PackedRanges, size: Sequence[int], **kwargs: Any) -> Any:
    return _on_divided(aten.alias.default, stack) if keeps_shape(stack, size) else NotImplemented


@handles(PackedRanges, aten.slice.Tensor)
def _slice(stack: PackedRanges, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = dim % stack.dim()
    if dim < stack.dim() - 1:
        return _on_divided(aten.slice.Tensor, stack, dim, start, end, step)
    chosen, width = range(stack.shape[dim])[slice(start, end, step)], stack.divided.shape[-1]
    if step != 1 or not chosen or chosen.start % width or chosen.stop % width:
        return NotImplemented
    first, last = chosen.start // width, chosen.stop // width
    if last - first > 1:
        return _on_divided(aten.slice.Tensor, stack, dim, first, last)
    return PackedStack.handlers[aten.select.int](stack.divided, dim, first)


@handles(PackedRanges, aten.permute.default)
def _permute(stack: PackedRanges, dims: Sequence[int]) -> Any:
    order = [dim % stack.dim() for dim in dims]
    last = stack.dim() - 1
    return _on_divided(aten.permute.default, stack, [*order, last + 1]) if order[-1] == last else NotImplemented


@handles(PackedRanges, aten.index.Tensor)
def _index(stack: Tensor, indices: Sequence[Tensor | None]) -> Any:
    if not isinstance(stack, PackedRanges) or _indexes_channels(stack, indices):
        return NotImplemented
    return _on_divided(aten.index.Tensor, stack, list(indices[: stack.dim() - 1]))


def _indexes_channels(stack: PackedRanges, indices: Sequence[Tensor | None]) -> bool:
    return len(indices) == stack.dim() and indices[-1] is not None


@handles(PackedRanges, aten.copy_.default)
def _copy_(stack: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(stack, PackedRanges):
        return NotImplemented
    divided = _divided_source(stack, source.expand(stack.shape))
    assert divided is not None, "expand gives the source the channels of the stack"
    PackedStack.handlers[aten.copy_.default](stack.divided, divided, non_blocking)
    return stack


@handles(PackedRanges, aten.index_copy_.default)
def _index_copy_(stack: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not isinstance(stack, PackedRanges) or dim % stack.dim() == stack.dim() - 1:
        return NotImplemented
    check_index_copy(stack, dim, index, source)
    return _written(aten.index_copy_.default, stack, source, lambda new: (dim % stack.dim(), index, new))


@handles(PackedRanges, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    stack: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not isinstance(stack, PackedRanges) or _indexes_channels(stack, indices):
        return NotImplemented
    given = list(indices[: stack.dim() - 1])
    return _written(aten.index_put_.default, stack, values, lambda new: (given, new, accumulate, unsafe))


def _written(op: Any, stack: PackedRanges, source: Tensor, arguments: Callable[[Tensor], tuple[Any, ...]]) -> Any:
    """``stack``, after the write of ``op`` with ``arguments`` of the divided source."""
    divided = _divided_source(stack, source)
    if divided is None or PackedStack.handlers[op](stack.divided, *arguments(divided)) is NotImplemented:
        return NotImplemented
    return stack


@handles(PackedRanges, aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    stack, *others = tensors
    if not isinstance(stack, PackedRanges) or dim % stack.dim() == stack.dim() - 1:
        return NotImplemented
    appended = [_divided_source(stack, other) for other in others if other.shape[-1] == stack.shape[-1]]
    if len(appended) != len(others):
        return NotImplemented
    result = PackedStack.handlers[aten.cat.default]([stack.divided, *appended], dim % stack.dim())
    return PackedRanges.of(result) if isinstance(result, PackedStack) else result
