"""Give heads and channels a dimension each, in caches that keep all heads of a token in one dimension.

Whisper keeps caches [batch, tokens, num_heads * head_dim] and divides them into heads for attention. Later passes see
caches [batch, tokens, num_heads, head_dim] instead, with the same writes. Two kinds of caches are divided: inputs with
all writes to them, and new rows that the graph returns.

The caller's tensor keeps its shape. :func:`merge_heads` restores this shape for caches that stay plain, and
:func:`with_merged_axes` puts it into the caller's duties for packed caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.layout.axes import merged_axes
from kvcompile.passes.calling import Rewritten
from kvcompile.passes.graph.aten import SAME_OPS, arguments, shape_of, view_chain
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.inline import behind_placeholders, fake_mode_of, inline
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import Marker, markers_of

aten = torch.ops.aten

_ALONG = (
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.cat.default,
)
"""Operators along one dimension, which must not be the last."""

_RANK = 3
"""The dimensions of a cache with merged heads."""


@dataclass
class DividedHeads:
    """The changes of :func:`divide_heads`.

    Attributes:
        inputs: the placeholders that have four dimensions now, each with its fake value of three dimensions.
        outputs: the positions of outputs that have four dimensions now, each with the node there.
        indices: the positions of the inputs.
    """

    inputs: dict[Node, Any] = field(default_factory=dict)
    outputs: dict[int, Node] = field(default_factory=dict)
    indices: frozenset[int] = frozenset()


def divide_heads(graph: Graph) -> DividedHeads:
    """Divide the caches of a functional graph with markers, in place."""
    divided = DividedHeads()
    for first, head_dim in _caches(graph).items():
        if len(shape_of(first)) != _RANK:
            continue  # a state of a cache that has been divided, or not a cache with merged heads
        states = _states(first)
        if states is not None and (first.op == "placeholder" or not _outputs(graph).isdisjoint(states)):
            _Division(graph, head_dim, divided).run(first, states)
    divided.indices = frozenset(
        place for place, node in enumerate(graph.find_nodes(op="placeholder")) if node in divided.inputs
    )
    return divided


def merge_heads(graph: Graph, divided: DividedHeads) -> None:
    """Restore the caller's shapes of the inputs and outputs that stay plain."""
    present = set(graph.nodes)
    for node, value in divided.inputs.items():
        if node not in present:
            continue
        head_dim = int(shape_of(node)[-1])
        node.meta["val"] = value
        others = list(node.users)
        with graph.inserting_before(behind_placeholders(node)):
            whole = inline(graph, _divider(head_dim), node)
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


def with_merged_axes(rewritten: Rewritten, divided: DividedHeads) -> Rewritten:
    """The caller's duties, with the order of dimensions that the caller knows."""
    inputs = tuple(
        dataclasses.replace(action, axes=merged_axes(action.axes)) if action.index in divided.indices else action
        for action in rewritten.inputs
    )
    outputs = tuple(
        dataclasses.replace(action, axes=merged_axes(action.axes), shape=_merged_shape(action.shape))
        if action.index in divided.outputs
        else action
        for action in rewritten.outputs
    )
    return dataclasses.replace(rewritten, inputs=inputs, outputs=outputs)


def _merged_shape(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*shape[:-2], shape[-2] * shape[-1])


def _merged(x: Tensor) -> Tensor:
    return x.flatten(-2)


def _divider(head_dim: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.unflatten(-1, (-1, head_dim))


def _outputs(graph: Graph) -> set[Node]:
    return {node for node in graph.output_node().args[0] if isinstance(node, Node)}


def _caches(graph: Graph) -> dict[Node, int]:
    """The inputs and returned rows that attention divides into heads, each with its ``head_dim``."""
    found: dict[Node, set[int]] = {}
    stop = frozenset(_outputs(graph))
    for call in map(Marker.of, markers_of(graph)):
        for operand in (call.key, call.value):
            root, chain = view_chain(operand, stop)
            head_dim = _head_dim(root, chain, operand)
            if head_dim is not None:
                first = first_state(root)
                found.setdefault(first if first.op == "placeholder" else root, set()).add(head_dim)
    return {first: sizes.pop() for first, sizes in found.items() if len(sizes) == 1}


def _head_dim(root: Node, chain: tuple[Node, ...], operand: Node) -> int | None:
    """The channels of a head, if ``operand`` [batch, heads, tokens, channels] divides the last dimension of ``root``.

    None otherwise.
    """
    if root.op == "output" or len(shape_of(root)) != _RANK or len(shape_of(operand)) != 4:
        return None
    index_map = follow(IndexMap.identity(shape_of(root)), *chain)
    if index_map is None or not isinstance(shape_of(root)[-1], int):
        return None
    last = 2
    heads, channels = ([factor for factor in index_map.dims[dim] if factor.axis == last] for dim in (1, 3))
    if len(heads) != 1 or len(channels) != 1 or len(index_map.factors(last)) != 2:
        return None
    size, head_dim = heads[0].size, heads[0].step  # only the first channels of each head may be read
    whole = isinstance(size, int) and isinstance(head_dim, int) and size * head_dim == shape_of(root)[last]
    in_order = channels[0].step == 1 and channels[0].size <= head_dim and index_map.starts[last] == 0
    return int(head_dim) if whole and in_order and size > 1 else None


def _states(first: Node) -> list[Node] | None:
    """``first`` and its later states that keep its last dimension whole; None if something else is copied into it."""
    states = {first: None}
    for node in first.graph.nodes:
        base = _base(node)
        if base is not None and base in states and _is_divisible(node, states):
            states[node] = None
    copied = (user.args[1] for user in first.users if user.target is aten.copy_.default and user.args[0] is first)
    return list(states) if all(node in states for node in copied) else None


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


def _is_divisible(node: Node, states: Collection[Node]) -> bool:
    """Whether a state is computed from its operands in the same way after their division."""
    base = _base(node)
    assert base is not None, "a state is made of another one"
    last, width = len(shape_of(base)) - 1, shape_of(base)[-1]
    if shape_of(node)[-1:] != (width,) or (node.target in _ALONG and _dim(node) == last):
        return False
    if node.target in (aten.index_put.default, aten.index.Tensor):
        values = [index.meta["val"] for index in node.args[1] if index is not None]
        if len(node.args[1]) > last or any(value.dtype == torch.bool for value in values):
            return False
        if node.target is aten.index.Tensor and (len(values) != 1 or values[0].dim() != 1):
            return False
    return all(_is_spread(operand, width) for operand in _operands(node) if operand not in states)


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


class _Division:
    """Divides one cache."""

    def __init__(self, graph: Graph, head_dim: int, divided: DividedHeads) -> None:
        self.graph = graph
        self.head_dim = head_dim
        self.divided = divided

    def run(self, first: Node, states: Sequence[Node]) -> None:
        """Divide ``first`` and its later states."""
        for node in states[1:]:
            if node.target in _ALONG:
                self._count_from_first(node)
        for node in states[1:]:
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
                node.meta["val"] = _divider(self.head_dim)(node.meta["val"])
        for node in states:
            self._merge_for_others(node, states)
        for place, node in enumerate(self.graph.output_node().args[0]):
            if node in states:
                self.divided.outputs[place] = node

    def _divided_rows(self, rows: Node) -> Node:
        """New rows, divided. They take the place of ``rows`` for all users."""
        users = list(rows.users)
        with self.graph.inserting_before(rows.next):
            divided: Node = inline(self.graph, _divider(self.head_dim), rows)
        for user in users:
            user.replace_input_with(rows, divided)
        return divided

    def _count_from_first(self, node: Node) -> None:
        """Make the dimension argument of ``node`` non-negative, so that division does not change it."""
        place, dim = _place_of_dim(node), _dim(node)
        node.args = (*node.args[:place], dim, *node.args[place + 1 :])
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dim"}

    def _divided_operand(self, user: Node, operand: Node) -> Node:
        shape = shape_of(operand)
        if not len(shape):
            return operand
        with self.graph.inserting_before(user):
            divide = (lambda x: x.unsqueeze(-1)) if shape[-1] == 1 else _divider(self.head_dim)
            divided: Node = inline(self.graph, divide, operand)
            return divided

    def _merge_for_others(self, node: Node, states: Sequence[Node]) -> None:
        """Give three dimensions to all users of a state except its later states, the caller and the copy back."""
        others = [user for user in node.users if not _takes_divided(user, states)]
        if others:
            anchor = behind_placeholders(node) if node.op == "placeholder" else node.next
            with self.graph.inserting_before(anchor):
                merged = inline(self.graph, _merged, node)
            for user in others:
                user.replace_input_with(node, merged)


def _takes_divided(user: Node, states: Sequence[Node]) -> bool:
    is_copied_back = user.target is aten.copy_.default and user.args[0] is states[0]
    return user in states or user.op == "output" or is_copied_back
