"""The effect of each operator on the parts of a stack: it does the same to every part, or it selects or arranges them.

A rule takes the reader of a graph (:mod:`kvcompile.passes.stacks.analyse`) and a node with an operand that holds parts.
It returns the parts of the node. Operators without a rule, and uses that no rule covers, depend on more than single
parts: they raise NotAStack.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.fx import Node

from kvcompile.kernels.layout.axes import PartIndex, stacked_dims_of_source
from kvcompile.passes.graph.aten import CASTS, LIST_OPS, SAME_OPS, arguments, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.names import user_name
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.stacks.values import Made, State, Value, without

aten = torch.ops.aten


class NotAStack(Refusal):
    """Raised if an input cannot be split into parts because of its use by ``user``."""

    def __init__(self, user: Node) -> None:
        super().__init__(Reason.part_of_tensor, detail=f"which is also used by {user_name(user)}")


class Reader(Protocol):
    """The parts that the nodes of a graph hold, up to the node that is read."""

    def find(self, operand: Node) -> State | None:
        """The parts of ``operand``; None if it holds none."""

    def state(self, operand: Node, user: Node) -> State:
        """The parts of ``operand``, or of the tensor that it divides; raises NotAStack if it holds none."""

    def part(self, user: Node, operand: Node, dims: tuple[int, ...], part: PartIndex, rank: int) -> Value:
        """The part of ``operand`` that ``user`` combines with ``part`` of a tensor of ``rank`` and stacked ``dims``."""


Rule = Callable[[Reader, Node], State]


def _same(reader: Reader, user: Node) -> State:
    return reader.state(user.args[0], user)


def _cast(reader: Reader, user: Node) -> State:
    state = reader.state(user.args[0], user)
    return state.map(lambda part, value: Made(user, user.target, (value, *user.args[1:]), user.kwargs))


def _take(reader: Reader, user: Node) -> State:
    """``select`` and ``slice``."""
    operand, dim, *where = arguments(user)
    state = reader.state(operand, user)
    if dim in state.dims:
        return _view(reader, user)
    args = (state.dim_of_part(dim), *where)
    dims = without(state.dims, dim) if user.target is aten.select.int else state.dims
    return state.map(lambda part, value: Made(user, user.target, (value, *args)), dims)


def _view(reader: Reader, user: Node) -> State:
    """A view that takes indices of stacked dimensions, or that arranges dimensions."""
    state = reader.state(user.args[0], user)
    whole = user.args[0].args[0] if user.target is operator.getitem else user.args[0]
    index_map = follow(IndexMap.identity(shape_of(whole)), user)
    viewed = state.viewed(index_map) if index_map is not None else None
    if index_map is None or viewed is None:
        raise NotAStack(user)
    order = [state.dim_of_part(axis) for axis in index_map.axes() if axis not in state.dims]
    if order == sorted(order):
        return viewed
    return viewed.map(lambda part, value: Made(user, aten.permute.default, (value, order)))


def _divide(reader: Reader, user: Node) -> State:
    """A list of tensors, with the parts of the tensor that it divides."""
    state, (*_, dim) = reader.state(user.args[0], user), arguments(user)
    if dim not in state.dims:
        raise NotAStack(user)
    return state


def _copy(reader: Reader, user: Node) -> State:
    state, rank = reader.state(user.args[0], user), len(shape_of(user))

    def copied(part: PartIndex, value: Value) -> Value:
        return Made(user, user.target, (value, reader.part(user, user.args[1], state.dims, part, rank)))

    return state.map(copied)


def _where(reader: Reader, user: Node) -> State:
    rank = len(shape_of(user))
    states = [reader.find(arg) for arg in user.args[1:] if len(shape_of(arg)) == rank]
    state = next((state for state in states if state is not None), None)
    if state is None:
        raise NotAStack(user)
    dims = state.dims

    def chosen(part: PartIndex, value: Value) -> Value:
        return Made(user, user.target, tuple(reader.part(user, arg, dims, part, rank) for arg in user.args))

    return state.map(chosen)


def _cat(reader: Reader, user: Node) -> State:
    """``cat`` along a dimension of the parts, where each part grows."""
    tensors, dim = arguments(user)
    state, rank = reader.state(tensors[0], user), len(shape_of(user))
    if dim in state.dims or any(len(shape_of(tensor)) != rank for tensor in tensors):
        raise NotAStack(user)

    def longer(part: PartIndex, value: Value) -> Value:
        others = [reader.part(user, tensor, state.dims, part, rank) for tensor in tensors[1:]]
        return Made(user, user.target, ([value, *others], state.dim_of_part(dim)))

    return state.map(longer)


def _scatter(reader: Reader, user: Node) -> State:
    """``select_scatter`` and ``slice_scatter``."""
    selects = user.target is aten.select_scatter.default
    base, source, dim, *where = arguments(user)
    state, rank = reader.state(base, user), len(shape_of(base))
    dims = without(state.dims, dim) if selects else state.dims

    def changed(part: PartIndex, value: Value) -> Value:
        new = reader.part(user, source, dims, part, rank - selects)
        place = (state.dim_of_part(dim), *where)
        taken = aten.select.int if selects else aten.slice.Tensor
        return value if _is_taken(new, taken, value, place) else Made(user, user.target, (value, new, *place))

    if dim not in state.dims:
        return state.map(changed)
    at, size = state.dims.index(dim), state.size(dim)
    indices: Sequence[int] = [_constant(user, where[0], size)] if selects else _range(user, where, size)

    def replaced(part: PartIndex, value: Value) -> Value:
        if part[at] not in indices:
            return value
        place = () if selects else (indices.index(part[at]),)
        return reader.part(user, source, dims, part[:at] + place + part[at + 1 :], rank - selects)

    return state.map(replaced)


def _is_taken(new: Value, target: Any, value: Value, place: tuple[Any, ...]) -> bool:
    """Whether ``new`` is the slice or index of ``value`` at ``place``. To put it back there changes nothing.

    A write of keys through ``kv[:, :batch]`` also puts back the values of these sequences, as they are.
    """
    return isinstance(new, Made) and new.target is target and new.args == (value, *place)


def _index(reader: Reader, user: Node) -> State:
    """An index of one dimension of the parts by one vector."""
    base, indices = user.args
    state = reader.state(base, user)
    of_parts, given = _indices(user, state, indices, len(shape_of(base)))
    if len(given) != 1 or any(len(shape_of(index)) != 1 for index in given.values()):
        raise NotAStack(user)
    return state.map(lambda part, value: Made(user, user.target, (value, of_parts)))


def _index_put(reader: Reader, user: Node) -> State:
    base, indices, source, accumulate = arguments(user)
    state, rank = reader.state(base, user), len(shape_of(base))
    of_parts, given = _indices(user, state, indices, rank)
    num_index_dims = max(len(shape_of(index)) for index in given.values())
    dims = stacked_dims_of_source(list(given), num_index_dims, rank, state.dims)
    if dims is None:
        raise NotAStack(user)

    def changed(part: PartIndex, value: Value) -> Value:
        new = reader.part(user, source, dims, part, rank - len(given) + num_index_dims)
        return Made(user, user.target, (value, of_parts, new, accumulate))

    return state.map(changed)


def _indices(
    user: Node, state: State, indices: Sequence[Node | None], rank: int
) -> tuple[list[Node | None], dict[int, Node]]:
    """The index of every dimension of parts up to the last index, and all indices by dimension; raises NotAStack.

    It raises for indices of stacked dimensions, and for masks: a mask indexes several dimensions, which no write of
    tokens does.
    """
    of_parts = [*indices, *[None] * (rank - len(indices))]
    given = {dim: index for dim, index in enumerate(of_parts) if index is not None}
    masks = any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in given.values())
    if masks or not given or not given.keys().isdisjoint(state.dims):
        raise NotAStack(user)
    last = max(given)
    return [index for dim, index in enumerate(of_parts[: last + 1]) if dim not in state.dims], given


def _constant(user: Node, index: Any, size: int) -> int:
    """``index`` counted from the first; raises NotAStack if it is not a constant within range."""
    if not isinstance(index, int) or not -size <= index < size:
        raise NotAStack(user)
    return index % size


def _range(user: Node, bounds: Sequence[Any], size: int) -> range:
    """The indices of a slice; raises NotAStack if its bounds are not constants, or if it is empty."""
    if not all(bound is None or isinstance(bound, int) for bound in bounds):
        raise NotAStack(user)
    indices = range(size)[slice(*bounds)]
    if not indices:
        raise NotAStack(user)
    return indices


RULES: dict[Any, Rule] = {
    **dict.fromkeys(SAME_OPS, _same),
    **dict.fromkeys(CASTS, _cast),
    **dict.fromkeys(LIST_OPS, _divide),
    aten.permute.default: _view,
    aten.transpose.int: _view,
    aten.squeeze.dim: _view,
    operator.getitem: _view,
    aten.select.int: _take,
    aten.slice.Tensor: _take,
    aten.copy.default: _copy,
    aten.where.self: _where,
    aten.cat.default: _cat,
    aten.select_scatter.default: _scatter,
    aten.slice_scatter.default: _scatter,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
}
