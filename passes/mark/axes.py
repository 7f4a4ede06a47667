"""Follow the dimensions of tensors in attention through views, and bring the tensors to four dimensions.

Every dimension of a tensor is a product of named axes. Scores [batch, heads, q_len, kv_len] may appear as
[batch * heads, q_len, kv_len], as [batch, q_len, heads, kv_len] or as [batch, kv_heads, group, q_len, kv_len]. Axes of
size 1 are dropped, so that a dimension without axes has size 1 or is broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import Size
from kvcompile.passes.graph.index_map import reshape_groups


class Axis(NamedTuple):
    """A logical axis."""

    name: str
    size: Size


Layout = tuple[tuple[Axis, ...], ...]
"""The axes of every dimension of a tensor, the slowest axis first."""

Dims = tuple[tuple[str, ...], ...]
"""The names of the axes wanted for every dimension; axes that a tensor lacks are skipped."""


def axes_of(*axes: Axis) -> tuple[Axis, ...]:
    """One dimension with these axes; axes of size 1 are dropped."""
    return tuple(axis for axis in axes if not statically_known_true(axis.size == 1))


def names_of(layout: Layout) -> list[str]:
    return [axis.name for dim in layout for axis in dim]


def regroup(layout: Layout, shape: torch.Size) -> Layout | None:
    """The layout after a reshape to ``shape``, with the axes in the same order; None if it splits an axis."""
    axes = [axis for dim in layout for axis in dim]
    groups = reshape_groups([axis.size for axis in axes], shape)
    if groups is None or any(num_dims != 1 for _, num_dims in groups):
        return None
    rest = iter(axes)
    return tuple(tuple(islice(rest, num_axes)) for num_axes, _ in groups)


class Step(NamedTuple):
    """One view method and its arguments."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Rearrangement:
    """Views that bring a tensor from one layout to another, and the views that lead back."""

    steps: tuple[Step, ...] = ()
    back: tuple[Step, ...] = ()

    def then(self, step: Step, back: Step) -> Rearrangement:
        return Rearrangement((*self.steps, step), (back, *self.back))


def rearrange(layout: Layout, dims: Dims) -> Rearrangement | None:
    """The views that bring a tensor from ``layout`` to ``dims``; None if no sequence of simple views does it.

    The result is also None if ``layout`` has an axis that is not in ``dims``.
    """
    wanted = [[name for name in dim if name in names_of(layout)] for dim in dims]
    if [[axis.name for axis in dim] for dim in layout] == wanted:
        return Rearrangement()
    result: Rearrangement | None = Rearrangement()
    for index in reversed(range(len(layout))):
        result = _split(result, index, layout[index]) if result is not None else None
    axes = [axis for dim in layout for axis in dim]
    order = [names_of(layout).index(name) for names in wanted for name in names]
    if result is None or len(order) != len(axes):
        return None
    if order != sorted(order):
        inverse = tuple(order.index(index) for index in range(len(order)))
        result = result.then(Step("permute", (tuple(order),)), Step("permute", (inverse,)))
    for index, names in enumerate(wanted):
        if not names:
            result = result.then(Step("unsqueeze", (index,)), Step("squeeze", (index,)))
        elif len(names) > 1:
            sizes = _unflatten_sizes([axis for name in names for axis in axes if axis.name == name])
            if sizes is None:
                return None
            flat = Step("flatten", (index, index + len(names) - 1))
            result = result.then(flat, Step("unflatten", (index, sizes)))
    return result


def _split(result: Rearrangement, index: int, dim: tuple[Axis, ...]) -> Rearrangement | None:
    """Add the views that make every axis of dimension ``index`` a separate dimension."""
    if not dim:
        return result.then(Step("squeeze", (index,)), Step("unsqueeze", (index,)))
    if len(dim) == 1:
        return result
    sizes = _unflatten_sizes(list(dim))
    if sizes is None:
        return None
    return result.then(Step("unflatten", (index, sizes)), Step("flatten", (index, index + len(dim) - 1)))


def _unflatten_sizes(axes: list[Axis]) -> tuple[int, ...] | None:
    """Sizes for ``unflatten``, with -1 for a symbolic size; None if several are symbolic."""
    sizes = tuple(axis.size if isinstance(axis.size, int) else -1 for axis in axes)
    return sizes if sizes.count(-1) <= 1 else None
