"""Operators on a stack of packed caches. They are applied part by part if this gives the same result.

A selection of parts is a view of these parts. Other operators follow the general rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout.axes import stacked_dims_of_source
from kvcompile.packed.op_table import handles
from kvcompile.packed.stack import PackedStack, unstacked
from kvcompile.packed.views import keeps_shape, split, split_with_sizes, transpose, unbind

aten = torch.ops.aten


def _each(
    stack: PackedStack, change: Callable[[Tensor], Tensor], stacked_dims: Sequence[int] | None = None
) -> PackedStack:
    """Applies ``change`` to every part and stacks the results. ``stacked_dims`` replaces the stacked dimensions."""
    parts = [change(part) for part in stack.parts]
    return PackedStack.of_parts(parts, stack.stack_shape, stacked_dims or stack.stacked_dims)


def _sources(stack: PackedStack, source: Tensor, stacked_dims: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a part and the piece of ``source`` to write to it; ``source`` is broadcast along ``stacked_dims``."""
    size = [-1] * source.dim()
    for dim, extent in zip(stacked_dims, stack.stack_shape, strict=True):
        size[dim] = extent
    return zip(stack.parts, _parts_of(source.expand(size), stacked_dims), strict=True)


def _parts_of(x: Tensor, stacked_dims: Sequence[int]) -> Sequence[Tensor]:
    if isinstance(x, PackedStack):
        return x.parts if x.stacked_dims == tuple(stacked_dims) else unstacked(x.dequantize(), stacked_dims)
    return unstacked(x, stacked_dims)


@handles(PackedStack, aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(stack: PackedStack) -> PackedStack:
    return _each(stack, aten.alias.default)


@handles(PackedStack, aten.detach_.default)
def _detach_(stack: PackedStack) -> PackedStack:
    return stack


@handles(PackedStack, aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)
def _view(stack: PackedStack, size: Sequence[int], **kwargs: Any) -> Any:
    return _alias(stack) if keeps_shape(stack, size) else NotImplemented


@handles(PackedStack, aten.select.int)
def _select(stack: PackedStack, dim: int, index: int) -> Tensor:
    dim = dim % stack.dim()
    if dim in stack.stacked_dims:
        return _chosen(stack, stack.stacked_dims.index(dim), index)
    moved = [stacked - (stacked > dim) for stacked in stack.stacked_dims]
    return _each(stack, lambda part: aten.select.int(part, stack.dim_of_part(dim), index), moved)


@handles(PackedStack, aten.slice.Tensor)
def _slice(stack: PackedStack, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> PackedStack:
    dim = dim % stack.dim()
    if dim in stack.stacked_dims:
        return _chosen(stack, stack.stacked_dims.index(dim), slice(start, end, step))
    return _each(stack, lambda part: aten.slice.Tensor(part, stack.dim_of_part(dim), start, end, step))


def _chosen(stack: PackedStack, at: int, index: int | slice) -> Any:
    """A view of the parts that ``index`` selects along the stacked dimension ``stacked_dims[at]``."""
    chosen = range(stack.stack_shape[at])[index]
    kept = chosen if isinstance(chosen, range) else (chosen,)
    parts = [aten.alias.default(part) for place, part in stack.items() if place[at] in kept]
    if not parts:
        return NotImplemented
    shape, dims = list(stack.stack_shape), list(stack.stacked_dims)
    if isinstance(chosen, range):
        shape[at] = len(kept)
    else:
        gone = dims.pop(at)
        del shape[at]
        dims = [dim - (dim > gone) for dim in dims]
    return PackedStack.of_parts(parts, shape, dims) if dims else parts[0]


@handles(PackedStack, aten.permute.default)
def _permute(stack: PackedStack, dims: Sequence[int]) -> PackedStack:
    order = [dim % stack.dim() for dim in dims]
    own = [stack.stacked_dims.index(dim) for dim in order if dim in stack.stacked_dims]
    of_parts = [stack.dim_of_part(dim) for dim in order if dim not in stack.stacked_dims]
    places = sorted(stack.items(), key=lambda item: [item[0][at] for at in own])
    parts = [aten.permute.default(part, of_parts) for _, part in places]
    return PackedStack.of_parts(
        parts,
        [stack.stack_shape[at] for at in own],
        [new for new, dim in enumerate(order) if dim in stack.stacked_dims],
    )


handles(PackedStack, aten.transpose.int)(transpose)
handles(PackedStack, aten.split.Tensor)(split)
handles(PackedStack, aten.split_with_sizes.default)(split_with_sizes)
handles(PackedStack, aten.unbind.int)(unbind)


@handles(PackedStack, aten.clone.default)
def _clone(stack: PackedStack, *, memory_format: torch.memory_format | None = None) -> PackedStack:
    return _each(stack, lambda part: part.clone(memory_format=torch.contiguous_format))


@handles(PackedStack, aten._to_copy.default)
def _to_copy(stack: PackedStack, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    """A copy to another device is packed. A copy in another dtype is a plain tensor."""
    if dtype is not None and dtype != stack.dtype:
        return NotImplemented
    return _each(stack, lambda part: aten._to_copy.default(part, **kwargs))


@handles(PackedStack, aten.index_select.default)
def _index_select(stack: Tensor, dim: int, index: Tensor) -> Any:
    """Reorders sequences (or heads, or tokens) of every part."""
    if not isinstance(stack, PackedStack) or dim % stack.dim() in stack.stacked_dims:
        return NotImplemented
    of_part = stack.dim_of_part(dim % stack.dim())
    return _each(stack, lambda part: part.index_select(of_part, index))


@handles(PackedStack, aten.index.Tensor)
def _index(stack: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """Indexes the dimensions of the parts. An index of a stacked dimension is a read."""
    if not isinstance(stack, PackedStack):
        return NotImplemented
    given = _indexed(stack, indices)
    if len(given) != 1 or any(index.dim() != 1 for index in given.values()):
        return NotImplemented
    of_part = [index for dim, index in enumerate(indices) if dim not in stack.stacked_dims]
    return _each(stack, lambda part: aten.index.Tensor(part, of_part))


def _indexed(stack: PackedStack, indices: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Maps each indexed dimension to its index. Empty if an index is a mask or belongs to a stacked dimension."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in given.values())
    return {} if masks or not given.keys().isdisjoint(stack.stacked_dims) else given


@handles(PackedStack, aten.copy_.default)
def _copy_(stack: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(stack, PackedStack):
        return NotImplemented
    for part, new in _sources(stack, source.expand(stack.shape), stack.stacked_dims):
        part.copy_(new, non_blocking)
    return stack


@handles(PackedStack, aten.zero_.default)
def _zero_(stack: PackedStack) -> PackedStack:
    for part in stack.parts:
        part.zero_()
    return stack


@handles(PackedStack, aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(stack: Tensor, value: Any) -> Any:
    if not isinstance(stack, PackedStack):
        return NotImplemented
    for part in stack.parts:
        part.fill_(value)
    return stack


@handles(PackedStack, aten.index_copy_.default)
def _index_copy_(stack: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not isinstance(stack, PackedStack) or dim % stack.dim() in stack.stacked_dims:
        return NotImplemented
    check_index_copy(stack, dim, index, source)
    for part, new in _sources(stack, source, stack.stacked_dims):
        part.index_copy_(stack.dim_of_part(dim % stack.dim()), index, new)
    return stack


def check_index_copy(stack: PackedStack, dim: int, index: Tensor, source: Tensor) -> None:
    expected = [*stack.shape[: dim % stack.dim()], index.numel(), *stack.shape[dim % stack.dim() + 1 :]]
    if list(source.shape) != expected:
        raise RuntimeError(
            f"index_copy_ into a stack of packed caches: source is {tuple(source.shape)}, expected {tuple(expected)}"
        )


@handles(PackedStack, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    stack: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    """Writes the parts at indices of their own dimensions, such as ``kv[:, :, :, positions] = x``."""
    given = _indexed(stack, indices) if isinstance(stack, PackedStack) else {}
    if not isinstance(stack, PackedStack) or accumulate or not given:
        return NotImplemented
    shape = torch.broadcast_shapes(*(index.shape for index in given.values()))
    dims = stacked_dims_of_source(list(given), len(shape), stack.dim(), stack.stacked_dims)
    if dims is None:
        return NotImplemented
    of_part = [index for dim, index in enumerate(indices) if dim not in stack.stacked_dims]
    rank = len(shape) + stack.dim() - len(given)
    values = values if values.dim() == rank else values[(None,) * (rank - values.dim())]
    for part, new in _sources(stack, values, dims):
        aten.index_put_.default(part, of_part, new)
    return stack


@handles(PackedStack, aten.cat.default)
def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Concatenates part by part, along a dimension of the parts."""
    stack, *others = tensors
    if not isinstance(stack, PackedStack) or dim % stack.dim() in stack.stacked_dims:
        return NotImplemented
    if any(other.dim() != stack.dim() or other.dtype != stack.dtype for other in others):
        return NotImplemented
    of_part = stack.dim_of_part(dim % stack.dim())
    appended = [_parts_of(other, stack.stacked_dims) for other in others]
    parts = [torch.cat(each, of_part) for each in zip(stack.parts, *appended, strict=True)]
    return PackedStack.of_parts(parts, stack.stack_shape, stack.stacked_dims)


@handles(PackedStack, aten.record_stream.default)
def _record_stream(stack: PackedStack, stream: Any) -> None:
    for part in stack.parts:
        part.record_stream(stream)
