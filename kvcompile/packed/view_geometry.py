"""Shapes and strides of views, found by applying view operators to tensors without memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true


@dataclass(frozen=True)
class ViewStep:
    """A view operator and its arguments after the viewed tensor.

    Attributes:
        func: the operator (overload).
        args: its other positional arguments, with tuples for lists.
        kwargs: names and values of its keyword arguments.
        place: index of the result, for an operator that returns several tensors.
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    place: int | None = None

    def of(self, x: Tensor) -> Tensor:
        """Applies the view operator to ``x``."""
        result = self.func(x, *self.args, **dict(self.kwargs))
        return result if self.place is None else result[self.place]

    @property
    def is_symbolic(self) -> bool:
        """Whether an argument is a symbolic size, known only at run time."""
        values = [*self.args, *(value for _, value in self.kwargs)]
        flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        return any(isinstance(item, torch.SymInt) for item in flat)


def frozen(value: Any) -> Any:
    """``value`` with tuples instead of lists, as :class:`ViewStep` stores it."""
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def geometry_of(x: Tensor) -> Tensor:
    """A tensor on the meta device with the shape, strides and dtype of ``x`` and a storage offset of 0."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def stride_of_clone(x: Tensor) -> tuple[int, ...]:
    """The strides of a clone of a plain tensor with the shape and strides of ``x`` (``torch.preserve_format``)."""
    return torch.empty_like(geometry_of(x)).stride()


def order_of_clone(x: Tensor) -> list[int] | None:
    """The dimensions of a clone of ``x`` from the outermost to the innermost in memory; None if it is contiguous."""
    clone = torch.empty_like(geometry_of(x))
    return None if clone.is_contiguous() else memory_order(clone)


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """``x`` in memory without gaps, with its dimensions in ``order``, from the outermost to the innermost."""
    return x.permute(tuple(order)).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of ``x`` from the outermost to the innermost in memory.

    Dimensions keep their order if the order of their strides is not known.
    """
    stride = x.stride()

    def compared(one: int, other: int) -> int:
        is_inner, is_outer = stride[one] < stride[other], stride[one] > stride[other]
        return int(statically_known_true(is_inner)) - int(statically_known_true(is_outer))

    return sorted(range(x.dim()), key=functools.cmp_to_key(compared))


def is_permuted(x: Tensor) -> bool:
    """Whether ``x`` is a contiguous tensor with its dimensions in any order: it has no gaps, and no element twice."""
    return x.permute(memory_order(x)).is_contiguous()


def laid_out_as(like: Tensor, values: Tensor) -> Tensor:
    """``values`` with the memory order of dimensions of ``like``, in traced code.

    Every view of ``like`` is then a valid view of ``values``.
    """
    return in_memory_order(values, memory_order(like))


def strided_as(like: Tensor, values: Tensor) -> Tensor:
    """``values`` in memory with exactly the strides of ``like``, a tensor of the same shape.

    Dimensions of stride 0 (``expand``) repeat their first element.
    """
    stride = like.stride()
    if values.stride() == stride:
        return values
    distinct = tuple(slice(None) if step else slice(1) for step in stride)
    result = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
    result[distinct] = values[distinct]
    return result
