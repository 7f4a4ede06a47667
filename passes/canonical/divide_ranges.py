"""Give keys and values an index each, in caches that keep them in ranges of their channels.

Multi-query models keep one cache [batch, tokens, 2 * head_dim], or [batch, heads, tokens, 2 * head_dim], and ``split``
it into keys and values. Later passes see the stack [batch, tokens, 2, head_dim] instead, with the same writes. All
ranges have the same number of channels. Every reader reads one range: by a slice, by ``split``, or by a view and an
index.

The caller's tensor keeps its shape. :mod:`~kvcompile.passes.canonical.divide_last` restores this shape for stacks that
are not split. The caller divides the others (:class:`~kvcompile.passes.calling.SplitStack`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.canonical.divide_last import (
    Divided,
    divide_last,
    divider,
    other_copy,
    states_to_divide,
    takes_divided,
)
from kvcompile.passes.graph.aten import CASTS, LIST_OPS, SAME_OPS, SIZE_OPS, WRITE_OPS, Size, same_sizes, shape_of
from kvcompile.passes.graph.index_map import Factor, IndexMap, follow
from kvcompile.passes.graph.inline import behind_placeholders, fake_mode_of, inline
from kvcompile.passes.graph.refused_inputs import note_refusal
from kvcompile.passes.graph.states import states_of
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.stacks.rules import NotAStack

aten = torch.ops.aten


class _Read(NamedTuple):
    """A view of one range.

    Attributes:
        node: the view.
        state: the state of the cache that it views.
        index_map: the elements of ``state`` that it has.
        number: the number of the range.
    """

    node: Node
    state: Node
    index_map: IndexMap
    number: int


def divide_ranges(graph: Graph) -> Divided:
    """Divide the inputs of a functional graph with markers that hold several ranges of channels, in place."""
    divided = Divided()
    for first, width in _inputs(graph).items():
        states = states_to_divide(first, width)
        try:
            reads = _reads(states, width)
        except NotAStack as refusal:
            note_refusal(first, refusal)  # for the sites that read it
            continue
        indexed = {_read_by_index(graph, read, width) for read in reads}
        sizes = {user for state in states for user in state.users if user.target in SIZE_OPS}
        divide_last(graph, first, states, width, divided, indexed | sizes)
    divided.note_indices(graph)
    return divided


def _inputs(graph: Graph) -> dict[Node, int]:
    """The inputs whose ranges are the keys and the values of attention, with the number of channels of a range."""
    keys: dict[Node, set[range]] = {}
    values: dict[Node, set[range]] = {}
    for call in map(Marker.of, markers_of(graph)):
        for operand, ranges in ((call.key, keys), (call.value, values)):
            first, *states = states_of(operand)
            if first.op == "placeholder" and (channels := _channels(first, states)) is not None:
                ranges.setdefault(first, set()).add(channels)
    inputs: dict[Node, int] = {}
    for first in (first for first in keys if first in values):
        width = max(map(len, keys[first] | values[first]))  # attention may read the first channels of a range
        of_keys, of_values = ({_range_of(channels, width) for channels in read[first]} for read in (keys, values))
        is_divided = None not in of_keys | of_values and of_keys.isdisjoint(of_values)
        if is_divided and shape_of(first)[-1] % width == 0:
            inputs[first] = width
    return inputs


def _range_of(channels: range, width: int) -> int | None:
    """The number of the range of ``width`` channels in which ``channels`` lie; None if they lie in several."""
    return channels[0] // width if channels[0] // width == channels[-1] // width else None


def _channels(first: Node, states: Sequence[Node]) -> range | None:
    """The channels of ``first`` that the last of ``states`` reads, if it reads only some."""
    size = shape_of(first)[-1:]
    whole, *chain = first, *states
    while chain and _keeps_channels(chain[0], whole):
        whole = chain.pop(0)
    index_map = follow(IndexMap.identity(shape_of(whole)), *chain)
    if index_map is None or not size or not isinstance(size[0], int):
        return None
    last = len(index_map.base) - 1
    bounds = _bounds(index_map, last)
    return bounds if bounds and len(bounds) < size[0] else None


def _keeps_channels(node: Node, before: Node) -> bool:
    """Whether the last dimension of ``node``, a view or a write of ``before``, has all channels of ``before``."""
    if not isinstance(node.meta.get("val"), Tensor) or shape_of(node)[-1:] != shape_of(before)[-1:]:
        return False
    index_map = follow(IndexMap.identity(shape_of(before)), node) if node.target not in WRITE_OPS else None
    last = len(shape_of(before)) - 1
    return index_map is None or [factor.axis for factor in index_map.dims[-1]] == [last]


def _bounds(index_map: IndexMap, axis: int) -> range | None:
    """From the first to the last index of a view along an axis; None if they are not numbers."""
    factors, start = index_map.factors(axis), index_map.starts[axis]
    numbers = [start, *(number for factor in factors for number in (factor.size, factor.step))]
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return None
    return range(int(start), int(start) + 1 + sum((int(size) - 1) * int(step) for _, size, step in factors))


def _reads(states: Sequence[Node], width: int) -> list[_Read]:
    """All readers of ``states`` except later states, each a view of one range; raises NotAStack for other readers."""
    reads = []
    pending = [
        (user, state, IndexMap.identity(shape_of(state)))
        for state in states
        for user in state.users
        if not takes_divided(user, states) and user.target not in SIZE_OPS
    ]
    while pending:
        node, state, before = pending.pop()
        index_map = None if node.target in (*CASTS, *SAME_OPS) else follow(before, node)
        if index_map is None:
            raise NotAStack(node)
        number = None if node.target in LIST_OPS else _number(index_map, width)
        if number is None:
            pending += [(user, state, index_map) for user in node.users]
        elif any(_slice_of(index_map, axis) is None for axis in range(len(index_map.base))):
            raise NotAStack(node)
        else:
            reads.append(_Read(node, state, index_map, number))
    if (copy := other_copy(states)) is not None:
        raise NotAStack(copy)
    return reads


def _number(index_map: IndexMap, width: int) -> int | None:
    """The number of the only range that a view reads; None if it reads several."""
    bounds = _bounds(index_map, len(index_map.base) - 1)
    repeats = any(factor.axis is None for dim in index_map.dims for factor in dim)
    return None if not bounds or repeats else _range_of(bounds, width)


def _slice_of(index_map: IndexMap, axis: int) -> Factor | None:
    """The slice of an axis that its factors divide, the slowest factor first; None if they do not divide a slice."""
    first, *rest = index_map.factors(axis) or [Factor(axis, 1)]
    for factor in rest:
        if not statically_known_true(first.step == factor.size * factor.step):
            return None
        first = Factor(axis, first.size * factor.size, factor.step)
    return first


def _read_by_index(graph: Graph, read: _Read, width: int) -> Node:
    """Replace a view of one range by the same view of one index of the divided state; returns the index node."""
    state, last = read.state, len(shape_of(read.state)) - 1
    with graph.inserting_before(behind_placeholders(state) if state.op == "placeholder" else state.next):
        index = graph.call_function(aten.select.int, (state, last, read.number))
    with fake_mode_of(graph):
        index.meta["val"] = divider(width)(state.meta["val"]).select(last, read.number)
    shape = shape_of(read.node)
    with graph.inserting_before(read.node):
        view = inline(graph, lambda x: _viewed(x, read.index_map, read.number * width, shape), index)
    read.node.replace_all_uses_with(view)
    node: Node = read.node
    while node is not state and not node.users:
        node, gone = node.args[0], node  # type: ignore[assignment]
        graph.erase_node(gone)
    return index


def _viewed(x: Tensor, index_map: IndexMap, first_channel: int, shape: torch.Size) -> Tensor:
    """The view that ``index_map`` describes, of ``x``: the channels of the base from ``first_channel`` on."""
    factors: list[tuple[int, int]] = []
    for axis in range(x.dim()):
        start = index_map.starts[axis] - (first_channel if axis == x.dim() - 1 else 0)
        whole = _slice_of(index_map, axis)
        assert whole is not None, "it was checked when the reads were found"
        if not statically_known_true(whole.size == x.shape[axis]):
            x = aten.slice.Tensor(x, axis, start, start + (whole.size - 1) * whole.step + 1, whole.step)
        factors += [(axis, place) for place in range(len(index_map.factors(axis)))]
    sizes = [index_map.factors(axis)[place].size for axis, place in factors]
    x = _reshaped(x, sizes)
    seen: dict[int, int] = {}
    order = []
    for axis in index_map.axes():
        seen[axis] = seen.get(axis, -1) + 1
        order.append(factors.index((axis, seen[axis])))
    x = x if order == sorted(order) else x.permute(order)
    return _reshaped(x, shape)


def _reshaped(x: Tensor, shape: Sequence[Size]) -> Tensor:
    return x if same_sizes(x.shape, shape) else x.reshape(shape)
