"""Map the elements of a view to elements of the tensor that it views. All passes read views through these maps.

Every dimension of a view is a product of factors, the slowest factor first. A factor steps along one *axis*, a
dimension of the base, or it repeats. This covers divided and merged dimensions, slices with steps, and repeated heads.
The element of the view at digits ``i`` of its factors is the element of the base at ``starts[axis] + sum(step * i)``
along each axis.

A map is exact. A view has no map if its operator is unknown, or if its sizes are symbols that do not prove the map.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.pytree import tree_leaves
from kvcompile.passes.graph.aten import (
    CASTS,
    LIST_OPS,
    RESHAPES,
    SAME_OPS,
    SQUEEZES,
    Size,
    arguments,
    known_size,
    shape_of,
)

aten = torch.ops.aten


class Factor(NamedTuple):
    """A factor of a dimension.

    Attributes:
        axis: the dimension of the base that it steps along; None for a repetition.
        size: number of elements.
        step: the distance between neighbouring elements along the axis.
    """

    axis: int | None
    size: Size
    step: Size = 1


Dim = tuple[Factor, ...]


@dataclass(frozen=True)
class IndexMap:
    """The elements of the base that a view has.

    Attributes:
        base: shape of the base.
        starts: the first index along every axis.
        dims: the factors of every dimension of the view, the slowest first. An axis without factors has one index.
    """

    base: tuple[Size, ...]
    starts: tuple[Size, ...]
    dims: tuple[Dim, ...]

    @staticmethod
    def identity(shape: Iterable[Size]) -> IndexMap:
        """The map of a tensor of this shape to itself."""
        base = tuple(shape)
        return IndexMap(base, (0,) * len(base), tuple((Factor(axis, size),) for axis, size in enumerate(base)))

    def factors(self, axis: int) -> list[Factor]:
        """The factors along an axis, in the order of the view."""
        return [factor for dim in self.dims for factor in dim if factor.axis == axis]

    def axes(self) -> list[int]:
        """The axes of the view's factors, in the order of the view."""
        return [factor.axis for dim in self.dims for factor in dim if factor.axis is not None]

    def is_one(self, factor: Factor) -> bool:
        """Whether a factor and its axis both have size 1, so that the factor has no effect."""
        whole = 1 if factor.axis is None else self.base[factor.axis]
        return statically_known_true(factor.size == 1) and statically_known_true(whole == 1)

    def permuted(self, order: Sequence[int]) -> IndexMap:
        return replace(self, dims=tuple(self.dims[dim] for dim in order))

    def unsqueezed(self, dim: int) -> IndexMap:
        return replace(self, dims=(*self.dims[:dim], (), *self.dims[dim:]))

    def first_of(self, *dims: int) -> IndexMap:
        """The map of the first element of some dimensions, which are removed."""
        return replace(self, dims=tuple(factors for dim, factors in enumerate(self.dims) if dim not in dims))

    def repeated(self, counts: Sequence[Size]) -> IndexMap:
        """The map after ``repeat``, of as many dimensions as there are ``counts``."""
        dims = ((),) * (len(counts) - len(self.dims)) + self.dims
        turns = [() if statically_known_true(count == 1) else (Factor(None, count),) for count in counts]
        return replace(self, dims=tuple(turn + dim for turn, dim in zip(turns, dims, strict=True)))

    def sliced(self, dim: int, start: Size, size: Size, step: Size = 1) -> IndexMap | None:
        """The map of ``size`` elements of a dimension, from ``start`` on; None for a dimension of several factors."""
        if len(self.dims[dim]) != 1:
            return None
        axis, _, width = self.dims[dim][0]
        starts = tuple(first + start * width if at == axis else first for at, first in enumerate(self.starts))
        part = (Factor(axis, size, step * width),)
        return IndexMap(self.base, starts, (*self.dims[:dim], part, *self.dims[dim + 1 :]))

    def reshaped(self, shape: Sequence[Size]) -> IndexMap | None:
        """The map after a reshape, which merges dimensions and divides factors; None if it regroups parts of them."""
        factors = [factor for dim in self.dims for factor in dim if not self.is_one(factor)]
        groups = reshape_groups([factor.size for factor in factors], shape)
        if groups is None:
            return None
        dims: list[Dim] = []
        for num_factors, num_dims in groups:
            group, factors = _merged(factors[:num_factors]), factors[num_factors:]
            if num_dims > 1 and len(group) != 1:
                return None
            sizes = shape[len(dims) : len(dims) + num_dims]
            dims += _divided(group[0], sizes) if num_dims > 1 else [group] * num_dims
        return replace(self, dims=tuple(dims))


def reshape_groups(before: Sequence[Size], after: Sequence[Size]) -> list[tuple[int, int]] | None:
    """The smallest groups of neighbouring sizes with equal products, as (number before, number after).

    None if the sizes are symbols that do not prove such groups, or if the products differ.
    """
    groups: list[tuple[int, int]] = []
    while before or after:
        pairs = [(one, other) for other in range(1, len(after) + 1) for one in (*range(1, len(before) + 1), 0)]
        group = next(
            (pair for pair in pairs or [(len(before), 0)] if _are_equal(before[: pair[0]], after[: pair[1]])), None
        )
        if group is None:
            return None
        groups.append(group)
        before, after = before[group[0] :], after[group[1] :]
    return groups


def _are_equal(before: Sequence[Size], after: Sequence[Size]) -> bool:
    return statically_known_true(math.prod(before) == math.prod(after))


def _merged(factors: Iterable[Factor]) -> Dim:
    """One dimension of the factors. Neighbours that divide an axis become one factor."""
    merged: list[Factor] = []
    for factor in factors:
        slower = merged[-1] if merged else Factor(None, 1)
        is_divided = slower.axis is not None and slower.axis == factor.axis
        if is_divided and statically_known_true(slower.step == factor.step * factor.size):
            merged[-1] = Factor(factor.axis, slower.size * factor.size, factor.step)
        else:
            merged.append(factor)
    return tuple(merged)


def _divided(factor: Factor, sizes: Sequence[Size]) -> list[Dim]:
    """The dimensions that divide a factor."""
    steps = [factor.step * math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    parts = [Factor(factor.axis, size, step) for size, step in zip(sizes, steps, strict=True)]
    return [() if statically_known_true(part.size == 1) else (part,) for part in parts]


# The views that have a map


def follow(index_map: IndexMap, *nodes: Node) -> IndexMap | None:
    """The map after ``nodes``, each a view of the node before it; None if one of them has no map.

    The first node views a tensor with ``index_map``. A list of views, such as the result of ``split``, has the map of
    the tensor that it divides.
    """
    found: IndexMap | None = index_map
    for node in nodes:
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        found = rule(found, node) if rule is not None and found is not None else None
    return found


def _same(index_map: IndexMap, node: Node) -> IndexMap:
    return index_map


def _permute(index_map: IndexMap, node: Node) -> IndexMap:
    return index_map.permuted(arguments(node)[1])


def _transpose(index_map: IndexMap, node: Node) -> IndexMap:
    order = list(range(len(index_map.dims)))
    _, one, other = arguments(node)
    order[one], order[other] = order[other], order[one]
    return index_map.permuted(order)


def _unsqueeze(index_map: IndexMap, node: Node) -> IndexMap:
    return index_map.unsqueezed(arguments(node)[1])


def _squeeze(index_map: IndexMap, node: Node) -> IndexMap | None:
    whole, *dims = arguments(node)
    shape = shape_of(whole)
    chosen = tree_leaves(dims) if dims else range(len(shape))
    ones = {dim for dim in chosen if statically_known_true(shape[dim] == 1)}
    return index_map.first_of(*ones) if len(shape) - len(ones) == len(shape_of(node)) else None


def _reshape(index_map: IndexMap, node: Node) -> IndexMap | None:
    return index_map.reshaped(shape_of(node))


def _expand(index_map: IndexMap, node: Node) -> IndexMap | None:
    new, old = shape_of(node), shape_of(node.args[0])
    counts: list[Size] = list(new[: len(new) - len(old)])
    for size, was in zip(new[len(counts) :], old, strict=True):
        is_kept = statically_known_true(size == was)
        if not is_kept and not statically_known_true(was == 1):
            return None
        counts.append(1 if is_kept else size)
    return index_map.repeated(counts)


def _repeat(index_map: IndexMap, node: Node) -> IndexMap:
    return index_map.repeated([_number(count) for count in arguments(node)[1]])


def _slice(index_map: IndexMap, node: Node) -> IndexMap | None:
    whole, dim, start, _, step = arguments(node)
    return _range(index_map, whole, dim, _number(start or 0), shape_of(node)[dim], _number(step))


def _select(index_map: IndexMap, node: Node) -> IndexMap | None:
    whole, dim, index = arguments(node)
    return _one(index_map, whole, dim, _number(index))


def _item(index_map: IndexMap, node: Node) -> IndexMap | None:
    """One view of a list."""
    division, index = node.args
    if division.target not in LIST_OPS:
        return None
    whole, *_, dim = arguments(division)
    if division.target is aten.unbind.int:
        return _one(index_map, whole, dim, index)
    sizes = [known_size(view.shape[dim]) for view in division.meta["val"]]
    return _range(index_map, whole, dim, sum(sizes[:index]), sizes[index])


def _one(index_map: IndexMap, whole: Node, dim: int, index: Size) -> IndexMap | None:
    """The map of one index of a dimension, without that dimension."""
    found = _range(index_map, whole, dim, index, 1)
    return found and found.first_of(dim)


def _range(index_map: IndexMap, whole: Node, dim: int, start: Size, size: Size, step: Size = 1) -> IndexMap | None:
    """The map of a slice of ``whole``, which has ``index_map``. Its start may be negative and count from the end."""
    full = shape_of(whole)[dim]
    if statically_known_true(size == full):
        return index_map
    if statically_known_true(start < 0):
        start = torch.sym_max(start + full, 0)
    return index_map.sliced(dim, start, size, step) if statically_known_true(start >= 0) else None


def _number(value: Any) -> Size:
    """A size that is an argument."""
    number: Size = value.meta["val"] if isinstance(value, Node) else value
    return number


_RULES: dict[Any, Callable[[IndexMap, Node], IndexMap | None]] = {
    **dict.fromkeys((*SAME_OPS, *CASTS, *LIST_OPS), _same),
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(SQUEEZES, _squeeze),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.repeat.default: _repeat,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    operator.getitem: _item,
}
