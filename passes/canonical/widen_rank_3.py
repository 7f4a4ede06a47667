"""Give caches of three dimensions a fourth, of size 1, while they are analysed and rewritten.

Multi-query attention (Shazeer, https://arxiv.org/abs/1911.02150) and latents that all heads share have no dimension of
heads: [batch, tokens, head_dim]. Models that multiply matrices in batches of batch * heads have none either; each of
these is then a sequence. A program for one sequence has no dimension of the batch.

Before analysis, every state of such a cache gets a dimension of size 1 before its channels. The placeholder and the
outputs that hold the cache get it, too. Other users of a state get it squeezed. The passes in between know caches of
four dimensions only. Afterwards, placeholders and outputs that are not packed lose the dimension again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import rank_3_axes
from kvcompile.passes.calling import InputAction, OutputAction, Rewritten
from kvcompile.passes.graph.aten import CASTS, SAME_OPS, WRITE_OPS, view_chain
from kvcompile.passes.graph.computed_from import states_behind
from kvcompile.passes.graph.inline import behind_placeholders, insert_call
from kvcompile.passes.graph.pool_ops import POOL_VIEW
from kvcompile.passes.graph.states import first_state, states_of
from kvcompile.passes.marker import Marker, markers_of

aten = torch.ops.aten

_NEW = -2
"""The dimension that states get."""

_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Rank3Caches:
    """The positions of the inputs and outputs that got a fourth dimension."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    def restore(self, gm: GraphModule, rewritten: Rewritten) -> Rewritten:
        """Remove the dimension from plain inputs and outputs, and from the actions of packed ones."""
        graph = gm.graph
        packed = {action.index for action in rewritten.inputs}
        for index, placeholder in enumerate(graph.find_nodes(op="placeholder")):
            if index in self.inputs - packed:
                _narrow(graph, placeholder)
        packed = {action.index for action in rewritten.outputs}
        output = graph.output_node()
        values = list(output.args[0])
        for index in self.outputs - packed:
            if values[index] is not None:
                with graph.inserting_before(output):
                    values[index] = insert_call(graph, aten.squeeze.dim, values[index], _NEW)
        output.args = (tuple(values),)
        gm.recompile()
        return replace(
            rewritten,
            inputs=tuple(self._input(action) for action in rewritten.inputs),
            outputs=tuple(self._output(action) for action in rewritten.outputs),
        )

    def _input(self, action: InputAction) -> InputAction:
        return replace(action, axes=rank_3_axes(action.axes)) if action.index in self.inputs else action

    def _output(self, action: OutputAction) -> OutputAction:
        if action.index not in self.outputs:
            return action
        return replace(action, axes=rank_3_axes(action.axes), shape=(*action.shape[:_NEW], action.shape[-1]))


def widen_rank_3_caches(graph: Graph) -> Rank3Caches:
    """Give a fourth dimension to caches of three dimensions and to all their states.

    These caches are the inputs that attention reads as keys and values, the inputs that keys and values are computed
    from, and new keys and values that the graph returns.
    """
    calls = [Marker.of(node) for node in markers_of(graph)]
    operands = [operand for call in calls for operand in (call.key, call.value) if _reads_tokens_in_order(operand)]
    placeholders = graph.find_nodes(op="placeholder")
    attended = {first_state(operand) for operand in operands} | _latents(graph, calls)
    bases = [node for node in placeholders if node in attended and _may_be_cache(node)]
    states = _States(graph, bases)
    states.add_returned(operands)
    states.squeeze_other_uses()
    return Rank3Caches(
        frozenset(index for index, node in enumerate(placeholders) if node in bases), frozenset(states.outputs)
    )


def _reads_tokens_in_order(operand: Node) -> bool:
    """Whether attention reads several tokens, and no index gathers them.

    With a single token, any dimension of size 1 may be the dimension of tokens. With an index, a tensor of three
    dimensions is a pool of slots [num_slots, num_kv_heads, head_dim].
    """
    gathers = any(state.target in (POOL_VIEW, aten.index.Tensor) for state in states_of(operand))
    return not gathers and not statically_known_true(operand.meta["val"].shape[-2] == 1)


def _latents(graph: Graph, calls: list[Marker]) -> set[Node]:
    """The inputs that are written and kept, and that keys or values are computed from, but no query.

    A query is computed from new tokens alone, so an input behind both a query and a key is no cache. An example is a
    sequence of tokens that gets one more in front. An input that is neither copied back nor returned is no cache
    either. An example is an encoder's states whose padding becomes zero.
    """
    kept = {first_state(node) for node in graph.output_node().args[0] if isinstance(node, Node)}
    kept.update(copy.args[0] for copy in graph.find_nodes(op="call_function", target=aten.copy_.default))
    states = {node for node in graph.nodes if _is_written(node) and first_state(node) in kept}
    behind: set[Node] = set()
    for call in calls if states else ():
        key, value, query = (states_behind(x, states.__contains__) for x in (call.key, call.value, call.query))
        behind |= (key | value) - query
    return {first_state(node) for node in behind}


def _is_written(node: Node) -> bool:
    """Whether ``node`` is a written state of an input that may be a cache. A state that an index reads is a pool."""
    if node.target not in WRITE_OPS or not _may_be_cache(node) or first_state(node).op != "placeholder":
        return False
    return not any(user.target is aten.index.Tensor for user in node.users)


def _may_be_cache(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.is_floating_point()


class _States:
    """The states of caches, each with its state of four dimensions. A placeholder is its own."""

    def __init__(self, graph: Graph, bases: list[Node]) -> None:
        self.graph = graph
        self.output = graph.output_node()
        self.widened = {node: node for node in bases}
        self.outputs: set[int] = set()
        for node in bases:
            node.meta["val"] = node.meta["val"].unsqueeze(_NEW)
        for node in list(graph.nodes) if bases else ():
            if not self.widened.keys().isdisjoint(node.all_input_nodes):
                self._visit(node)

    def add_returned(self, operands: Iterable[Node]) -> None:
        """Add new keys and values that the graph returns, the first rows of a growing cache."""
        returned = frozenset(node for node in self.output.args[0] if isinstance(node, Node))
        for operand in operands:
            root, _ = view_chain(operand, returned)
            if root in returned and root not in self.widened.values() and _may_be_cache(root):
                with self.graph.inserting_before(root.next):
                    state = insert_call(self.graph, aten.unsqueeze.default, root, _NEW)
                squeezed = self._squeezed(state)
                root.replace_all_uses_with(squeezed, lambda user, state=state: user is not state)
                self._return(squeezed, state)

    def squeeze_other_uses(self) -> None:
        """Let all other users read states without the dimension, and erase the states of three dimensions."""
        for node, state in self.widened.items():
            known = {*self.widened, *self.widened.values()}
            others = [user for user in node.users if user not in known and not _writes_back(user, node)]
            if others:
                squeezed = self._squeezed(state)
                for user in others:
                    user.replace_input_with(node, squeezed)
        for node, state in reversed(self.widened.items()):
            if node is not state:
                self.graph.erase_node(node)

    def _squeezed(self, state: Node) -> Node:
        with self.graph.inserting_before(behind_placeholders(state)):
            return insert_call(self.graph, aten.squeeze.dim, state, _NEW)

    def _visit(self, node: Node) -> None:
        if node is self.output:
            for state, widened in self.widened.items():
                if state is not widened:
                    self._return(state, widened)
        elif node.target is aten.copy_.default and node.args[0] in self.widened:
            with self.graph.inserting_before(node):
                node.args = (node.args[0], self.operand(node.args[1]))
        elif node.target is aten.sym_size.int:
            node.args = (self.widened[node.args[0]], self.dim(node.args[0], node.args[1]))
        elif node.target in _CONVERTED:
            with self.graph.inserting_before(node):
                args = _CONVERTED[node.target](self, *node.args)
                if args is not None:
                    state = insert_call(self.graph, node.target, *args, **node.kwargs)
                    state.meta = {**node.meta, "val": state.meta["val"]}
                    self.widened[node] = state

    def _return(self, node: Node, state: Node) -> None:
        values = self.output.args[0]
        self.outputs.update(place for place, value in enumerate(values) if value is node)
        self.output.args = (tuple(state if value is node else value for value in values),)

    def operand(self, value: Any) -> Any:
        """A value that is broadcast to a state, with the dimension."""
        if not isinstance(value, Node) or value.meta["val"].dim() == 0:
            return value
        return self.widened.get(value) or insert_call(self.graph, aten.unsqueeze.default, value, _NEW)

    def dim(self, node: Node, dim: int) -> int:
        """The dimension of the widened state that is dimension ``dim`` of ``node``."""
        rank = self.widened[node].meta["val"].dim() - 1
        return dim if dim < rank - 1 else rank

    def is_channels(self, node: Node, dim: int) -> bool:
        return self.dim(node, dim) == self.widened[node].meta["val"].dim() - 1


_Args = tuple[Any, ...] | None
"""The arguments of an operator that makes a state of four dimensions; None if its result is no state."""


def _same(states: _States, x: Node, *rest: Any) -> _Args:
    return states.widened[x], *rest


def _slice(states: _States, x: Node, dim: int = 0, *rest: Any) -> _Args:
    return states.widened[x], states.dim(x, dim), *rest


def _select(states: _States, x: Node, dim: int, index: Any) -> _Args:
    return None if states.is_channels(x, dim) else (states.widened[x], states.dim(x, dim), index)


def _permute(states: _States, x: Node, order: list[int]) -> _Args:
    if not states.is_channels(x, order[-1]):
        return None
    return states.widened[x], [*(states.dim(x, dim) for dim in order[:-1]), len(order) - 1, len(order)]


def _transpose(states: _States, x: Node, one: int, other: int) -> _Args:
    if states.is_channels(x, one) or states.is_channels(x, other):
        return None
    return states.widened[x], states.dim(x, one), states.dim(x, other)


def _slice_scatter(states: _States, base: Node, source: Node, dim: int = 0, *rest: Any) -> _Args:
    if base not in states.widened:
        return None
    return states.widened[base], states.operand(source), states.dim(base, dim), *rest


def _select_scatter(states: _States, base: Node, source: Node, dim: int, index: Any) -> _Args:
    if base not in states.widened or states.is_channels(base, dim):
        return None
    return states.widened[base], states.operand(source), states.dim(base, dim), index


def _copy(states: _States, base: Node, source: Node, *rest: Any) -> _Args:
    return (states.widened[base], states.operand(source), *rest) if base in states.widened else None


def _index_put(states: _States, base: Node, indices: list[Node | None], value: Node, *rest: Any) -> _Args:
    if base not in states.widened:
        return None
    values = [None if index is None else index.meta["val"] for index in indices]
    num_dims = sum(value.dim() if value is not None and value.dtype in _MASKS else 1 for value in values)
    names_channels = num_dims == states.widened[base].meta["val"].dim() - 1
    if names_channels and indices[-1] is not None:
        return None
    return states.widened[base], indices[:-1] if names_channels else indices, states.operand(value), *rest


def _scatter(states: _States, base: Node, dim: int, index: Node, source: Node) -> _Args:
    if base not in states.widened or states.is_channels(base, dim):
        return None
    return states.widened[base], states.dim(base, dim), _widened_index(states, index), states.operand(source)


def _widened_index(states: _States, index: Node) -> Node:
    """An index with the dimension. An index that was expanded or repeated is expanded or repeated again."""
    if index.target not in (aten.expand.default, aten.repeat.default) or index.args[0].meta["val"].dim() != 3:
        return states.operand(index)
    sizes = [*index.args[1][:-1], 1, index.args[1][-1]]
    return insert_call(states.graph, index.target, states.operand(index.args[0]), sizes)


def _where(states: _States, mask: Node, value: Node, other: Node) -> _Args:
    # A mask or value of one dimension is along the channels, and stays unchanged.
    return tuple(x if x.meta["val"].dim() == 1 else states.operand(x) for x in (mask, value, other))


def _cat(states: _States, tensors: list[Node], dim: int = 0) -> _Args:
    if tensors[0] not in states.widened or any(tensor.meta["val"].dim() < 3 for tensor in tensors[1:]):
        return None  # PyTorch takes an empty tensor of one dimension for one of any rank
    return [states.operand(tensor) for tensor in tensors], states.dim(tensors[0], dim)


_CONVERTED: dict[Any, Callable[..., _Args]] = {
    **dict.fromkeys((*SAME_OPS, *CASTS), _same),
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.copy.default: _copy,
    aten.index_put.default: _index_put,
    aten.scatter.src: _scatter,
    aten.where.self: _where,
    aten.cat.default: _cat,
}


def _narrow(graph: Graph, placeholder: Node) -> None:
    placeholder.meta["val"] = placeholder.meta["val"].squeeze(_NEW)
    users = list(placeholder.users)
    with graph.inserting_before(behind_placeholders(placeholder)):
        state = insert_call(graph, aten.unsqueeze.default, placeholder, _NEW)
    for user in users:
        if _writes_back(user, placeholder):
            with graph.inserting_before(user):
                user.args = (placeholder, insert_call(graph, aten.squeeze.dim, user.args[1], _NEW))
        else:
            user.replace_input_with(placeholder, state)


def _writes_back(node: Node, placeholder: Node) -> bool:
    return node.target is aten.copy_.default and node.args[0] is placeholder
