"""Divide the last dimension of a cache in two, in the whole graph: of an input with all its writes, or of new rows.

The caller's tensor keeps its shape. :func:`merge_last` restores this shape for caches that stay plain.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import SAME_OPS, arguments, shape_of
from kvcompile.passes.graph.inline import behind_placeholders, fake_mode_of, inline

aten = torch.ops.aten

_ALONG = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.cat.default,
)
"""Operators along one dimension. This may be the last dimension only for a write of a range of channels."""


@dataclass
class Divided:
    """The changes of a pass that divides last dimensions.

    Attributes:
        inputs: the placeholders that have one more dimension now, each with its fake value before.
        outputs: the positions of outputs that have one more dimension now, each with the node there.
        indices: the positions of the inputs.
    """

    inputs: dict[Node, Any] = field(default_factory=dict)
    outputs: dict[int, Node] = field(default_factory=dict)
    indices: frozenset[int] = frozenset()

    def note_indices(self, graph: Graph) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        self.indices = frozenset(place for place, node in enumerate(placeholders) if node in self.inputs)


def merge_last(graph: Graph, divided: Divided) -> None:
    """Restore the caller's shapes of the inputs and outputs that stay plain."""
    present = set(graph.nodes)
    for node, value in divided.inputs.items():
        if node not in present:
            continue
        width = int(shape_of(node)[-1])
        node.meta["val"] = value
        others = list(node.users)
        with graph.inserting_before(behind_placeholders(node)):
            whole = inline(graph, divider(width), node)
        for user in others:
            if user.target is aten.copy_.default and user.args[0] is node:
                with graph.inserting_before(user):
                    user.args = (node, inline(graph, _merged, user.args[1]))
            else:
                user.replace_input_with(node, whole)
    output = graph.output_node()
    results = list(output.args[0])
    for place, node in divided.outputs.items():
        if results[place] is node:
            with graph.inserting_before(output):
                results[place] = inline(graph, _merged, node)
    output.args = (tuple(results),)


def _merged(x: Tensor) -> Tensor:
    return x.flatten(-2)


def divider(width: int) -> Callable[[Tensor], Tensor]:
    """The function that divides the last dimension of a tensor into ranges of ``width`` channels."""
    return lambda x: x.unflatten(-1, (-1, width))


def outputs_of(graph: Graph) -> set[Node]:
    """The nodes that the graph returns."""
    return {node for node in graph.output_node().args[0] if isinstance(node, Node)}


def states_to_divide(first: Node, width: int | None = None) -> list[Node]:
    """``first`` and its later states that keep its last dimension whole.

    With ``width``, a state may write one range of ``width`` channels.
    """
    states = {first: None}
    for node in first.graph.nodes:
        base = _base(node)
        if base is not None and base in states and _is_divisible(node, states, width):
            states[node] = None
    return list(states)


def other_copy(states: Sequence[Node]) -> Node | None:
    """The node that copies a value that is not in ``states`` into the first of ``states``; None without such a node."""
    first = states[0]
    copies = (user for user in first.users if user.target is aten.copy_.default and user.args[0] is first)
    return next((copy for copy in copies if copy.args[1] not in states), None)


def _base(node: Node) -> Node | None:
    """The value that a write changes, or that a slice or a copy is taken of."""
    if node.op != "call_function":
        return None
    if node.target is aten.where.self:
        return node.args[2] if isinstance(node.args[2], Node) else None
    if node.target is aten.cat.default:
        return node.args[0][0]
    if node.target in (*_ALONG, *SAME_OPS, aten.index_put.default, aten.index.Tensor, aten.copy.default):
        return node.args[0]
    return None


def _is_divisible(node: Node, states: Collection[Node], width: int | None) -> bool:
    """Whether a state is computed from its operands in the same way after their division."""
    base = _base(node)
    assert base is not None, "a state is made of another one"
    last, channels = len(shape_of(base)) - 1, shape_of(base)[-1]
    if _writes_range(node):
        return width is not None and _written_range(node, width) is not None
    if shape_of(node)[-1:] != (channels,) or (node.target in _ALONG and _dim(node) == last):
        return False
    if node.target in (aten.index_put.default, aten.index.Tensor):
        values = [index.meta["val"] for index in node.args[1] if index is not None]
        if len(node.args[1]) > last or any(value.dtype == torch.bool for value in values):
            return False
        if node.target is aten.index.Tensor and (len(values) != 1 or values[0].dim() != 1):
            return False
    return all(_is_spread(operand, channels) for operand in _operands(node) if operand not in states)


def _writes_range(node: Node) -> bool:
    """Whether ``node`` writes some channels of all tokens of a cache."""
    return node.target is aten.slice_scatter.default and _dim(node) == len(shape_of(node)) - 1


def _written_range(node: Node, width: int) -> int | None:
    """The number of the range that ``node`` writes; None if it writes other channels than one range of ``width``."""
    base, _, dim, start, end, step = arguments(node)
    size = shape_of(base)[dim]
    if not all(isinstance(bound, int) for bound in (start or 0, size if end is None else end, step)):
        return None
    written = range(size)[slice(start, end, step)]
    is_range = step == 1 and len(written) == width and written.start % width == 0
    return written.start // width if is_range else None


def _dim(node: Node) -> int:
    """The dimension of an operator in ``_ALONG``, counted from the first."""
    dim: int = arguments(node)[_place_of_dim(node)]
    return dim


def _place_of_dim(node: Node) -> int:
    return 2 if _has_source(node) else 1


def _has_source(node: Node) -> bool:
    return node.target in (aten.slice_scatter.default, aten.select_scatter.default)


def _operands(node: Node) -> Iterator[Node]:
    """The operands with channels, except the value that a write changes."""
    if node.target is aten.where.self:
        yield from (operand for operand in node.args[:2] if isinstance(operand, Node))
    elif node.target is aten.cat.default:
        yield from node.args[0]
    elif node.target is aten.index_put.default:
        yield node.args[2]
    elif _has_source(node) or node.target is aten.copy.default:
        yield node.args[1]


def _is_spread(operand: Node, width: int) -> bool:
    """Whether ``operand`` is a number, or has all channels or one number for all of them."""
    shape = shape_of(operand)
    return len(shape) == 0 or shape[-1] in (1, width)


def divide_last(
    graph: Graph,
    first: Node,
    states: Sequence[Node],
    width: int,
    divided: Divided,
    readers: Collection[Node] = (),
) -> None:
    """Divide the last dimension of ``first`` and its later states into ranges of ``width`` channels.

    Args:
        graph: a functional graph; changed in place.
        first: an input, or new rows.
        states: the result of :func:`states_to_divide`.
        width: the size of the last dimension after the division.
        divided: notes the changes.
        readers: users of states that take them divided.
    """
    _Division(graph, width, divided, readers).run(first, states)


class _Division:
    """Divides one cache."""

    def __init__(self, graph: Graph, width: int, divided: Divided, readers: Collection[Node]) -> None:
        self.graph = graph
        self.width = width
        self.divided = divided
        self.readers = readers

    def run(self, first: Node, states: Sequence[Node]) -> None:
        for node in states[1:]:
            if node.target in _ALONG:
                self._count_from_first(node)
        for node in states[1:]:
            if _writes_range(node):
                self._write_range(node)
                continue
            for operand in [operand for operand in _operands(node) if operand not in states]:
                node.replace_input_with(operand, self._divided_operand(node, operand))
        later = states[1:]
        if first.op != "placeholder":
            states = [self._divided_rows(first), *later]
        else:
            self.divided.inputs[first] = first.meta["val"]
            later = states
        for node in later:
            with fake_mode_of(self.graph):
                node.meta["val"] = divider(self.width)(node.meta["val"])
        for node in states:
            self._merge_for_others(node, states)
        for place, node in enumerate(self.graph.output_node().args[0]):
            if node in states:
                self.divided.outputs[place] = node

    def _divided_rows(self, rows: Node) -> Node:
        """New rows, divided. They take the place of ``rows`` for all users."""
        users = list(rows.users)
        with self.graph.inserting_before(rows.next):
            divided: Node = inline(self.graph, divider(self.width), rows)
        for user in users:
            user.replace_input_with(rows, divided)
        return divided

    def _count_from_first(self, node: Node) -> None:
        """Make the dimension argument of ``node`` non-negative, so that division does not change it."""
        place, dim = _place_of_dim(node), _dim(node)
        node.args = (*node.args[:place], dim, *node.args[place + 1 :])
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dim"}

    def _write_range(self, node: Node) -> None:
        """Let ``node`` write one index of the new dimension."""
        base, source, dim, *_ = arguments(node)
        number = _written_range(node, self.width)
        node.target = aten.select_scatter.default
        node.args, node.kwargs = (base, source, dim, number), {}

    def _divided_operand(self, user: Node, operand: Node) -> Node:
        shape = shape_of(operand)
        if not len(shape):
            return operand
        with self.graph.inserting_before(user):
            divide = (lambda x: x.unsqueeze(-1)) if shape[-1] == 1 else divider(self.width)
            divided: Node = inline(self.graph, divide, operand)
            return divided

    def _merge_for_others(self, node: Node, states: Sequence[Node]) -> None:
        """Give the former shape to all users of a state that do not take it divided."""
        others = [user for user in node.users if not takes_divided(user, states) and user not in self.readers]
        if others:
            anchor = behind_placeholders(node) if node.op == "placeholder" else node.next
            with self.graph.inserting_before(anchor):
                merged = inline(self.graph, _merged, node)
            for user in others:
                user.replace_input_with(node, merged)


def takes_divided(user: Node, states: Sequence[Node]) -> bool:
    """Whether ``user`` takes the divided state, as later states, the caller and the copy back do."""
    is_copied_back = user.target is aten.copy_.default and user.args[0] is states[0]
    return user in states or user.op == "output" or is_copied_back
