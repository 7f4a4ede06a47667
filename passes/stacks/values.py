"""The values of the *parts* of a stack while a graph is analysed, before any node of a part exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.pytree import tree_leaves
from kvcompile.kernels.layout.axes import PartIndex
from kvcompile.passes.graph.aten import arguments, dtype_of, same_sizes, shape_of
from kvcompile.passes.graph.index_map import Factor, IndexMap

aten = torch.ops.aten


@dataclass(frozen=True)
class Initial:
    """The value of a part of an input when the graph begins."""

    part: PartIndex


@dataclass(frozen=True, eq=False)
class Made:
    """A value that no node of the graph has yet: the operation of ``at`` on all parts, applied to one of them.

    Attributes:
        at: the node in whose place the value is made.
        target: the operator.
        args: its arguments; values may be among them.
        kwargs: its keyword arguments.
    """

    at: Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def operands(self) -> Iterator[Value]:
        return (leaf for leaf in tree_leaves(self.args) if isinstance(leaf, (Initial, Made, Node)))


Value: TypeAlias = Initial | Made | Node
"""The value of a part. A node with that value may select a part itself."""


@dataclass(frozen=True)
class State:
    """The parts that a tensor holds.

    Attributes:
        dims: its stacked dimensions. Its other dimensions are the dimensions of its parts, in their order.
        values: its parts, by one index for each of ``dims``.
    """

    dims: tuple[int, ...]
    values: Mapping[PartIndex, Value]

    def dim_of_part(self, dim: int) -> int:
        """The dimension of parts for ``dim``, a dimension of the tensor that is not stacked."""
        return dim - sum(stacked < dim for stacked in self.dims)

    def size(self, dim: int) -> int:
        """The size of stacked dimension ``dim``."""
        return 1 + max(part[self.dims.index(dim)] for part in self.values)

    def map(self, change: Callable[[PartIndex, Value], Value], dims: tuple[int, ...] | None = None) -> State:
        """The state with changed values, of a tensor whose stacked dimensions are ``dims`` (unchanged if None)."""
        values = {part: change(part, value) for part, value in self.values.items()}
        return State(self.dims if dims is None else dims, values)

    def viewed(self, index_map: IndexMap) -> State | None:
        """The state of a view of the tensor that arranges its dimensions, or takes some indices of stacked dimensions.

        None if the view does more, or if its indices of stacked dimensions are not constants.
        """
        axes = index_map.axes()
        if len(axes) != len(index_map.dims) or any(len(dim) != 1 for dim in index_map.dims):
            return None
        taken: dict[int, range] = {}
        for axis, start in enumerate(index_map.starts):
            (_, size, step), *_ = index_map.factors(axis) or [Factor(axis, 1)]
            if axis not in self.dims:
                if axis not in axes or not statically_known_true(size == index_map.base[axis]):
                    return None
            elif isinstance(start, int) and isinstance(size, int) and isinstance(step, int):
                taken[axis] = range(start, start + size * step, step)
            else:
                return None
        kept = [axis for axis in self.dims if axis in axes]
        values = {}
        for part, value in self.values.items():
            place = dict(zip(self.dims, part, strict=True))
            if all(index in taken[axis] for axis, index in place.items()):
                values[tuple(taken[axis].index(place[axis]) for axis in kept)] = value
        return State(tuple(map(axes.index, kept)), values) if values else None


def without(dims: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """``dims``, except ``dim``, as dimensions of the tensor after ``select`` along ``dim``."""
    return tuple(other - (other > dim) for other in dims if other != dim)


def selected(at: Node, node: Node, dims: tuple[int, ...], part: PartIndex, rank: int) -> Value:
    """The part of ``node`` that is combined with part ``part`` when ``node`` is broadcast to a tensor of parts.

    Args:
        at: the node that combines them.
        node: any tensor of at most ``rank`` dimensions.
        dims: the stacked dimensions of the tensor.
        part: one index for each of ``dims``.
        rank: rank of the tensor.
    """
    value: Value = node
    missing = rank - len(shape_of(node))
    shape = [1] * missing + list(shape_of(node))
    for dim, index in sorted(zip(dims, part, strict=True), reverse=True):
        if dim < missing:
            continue  # the same for all parts
        index = 0 if statically_known_true(shape[dim] == 1) else index
        value = _one_of(at, value, dim - missing, index)
    return value


def _one_of(at: Node, value: Value, dim: int, index: int) -> Value:
    """``select`` of a value. If the value was stacked along ``dim``, it is the tensor at ``index`` of the stack."""
    pieces = _stacked(value, dim) if isinstance(value, Node) else None
    return Made(at, aten.select.int, (value, dim, index)) if pieces is None else pieces[index]


def _stacked(node: Node, dim: int) -> list[Value] | None:
    """The tensors that ``stack`` (or ``unsqueeze`` and ``cat``) joined to ``node`` along ``dim``; else None."""
    if node.target is aten.permute.default:
        return _stacked_and_permuted(node, dim)
    joined = node.args[0] if node.target is aten.view.default else node
    if joined.op != "call_function" or joined.target is not aten.cat.default:
        return None
    pieces, axis = arguments(joined)
    if axis != dim:
        return None
    shape = list(shape_of(node))
    if joined is node:
        if any(piece.target is not aten.unsqueeze.default or arguments(piece)[1] != dim for piece in pieces):
            return None
        pieces = [piece.args[0] for piece in pieces]
    whole = statically_known_true(shape.pop(dim) == len(pieces))
    alike = all(same_sizes(shape_of(piece), shape) and dtype_of(piece) == dtype_of(node) for piece in pieces)
    return list(pieces) if whole and alike else None


def _stacked_and_permuted(node: Node, dim: int) -> list[Value] | None:
    source, order = arguments(node)
    pieces = _stacked(source, order[dim])
    rest = [other - (other > order[dim]) for other in order if other != order[dim]]
    return pieces and [Made(node, aten.permute.default, (piece, rest)) for piece in pieces]
