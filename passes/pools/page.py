"""Turn a pool of slots into a cache of one sequence, whose tokens are the slots.

Every write of a pool writes tokens of that sequence, and attention reads tokens of it in another order. Two ops exist
only between passes and express the difference. ``kvcompile::pool_view`` views the pool as a cache [1, num_slots,
num_kv_heads, head_dim] and back, and ``kvcompile::gather_slots`` takes tokens from such a cache. Later passes treat a
pool like any other cache. ``expand_pools`` turns the remaining ops of both kinds into indexing of the pool again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.passes.calling import PackedInput
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import behind_placeholders, fake_mode_of, inline, insert_call, size_node
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS, POOL_VIEW
from kvcompile.passes.graph.refused_inputs import note_refusal
from kvcompile.passes.graph.states import first_state, states_of
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.pools.analyse import NotAPool, Pool, analyse_pool

aten = torch.ops.aten


def page_pools(gm: GraphModule, packed_inputs: Mapping[Node, PackedInput]) -> None:
    """Turn the pools among the inputs of ``gm`` that hold keys or values of attention into caches, in place.

    ``packed_inputs``: the placeholders that arrive packed.
    """
    calls = [Marker.of(node) for node in markers_of(gm.graph)]
    attended = {first_state(operand) for call in calls for operand in (call.key, call.value)}
    attended -= _reordered(gm.graph)
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        packed = packed_inputs.get(placeholder)
        try:
            pool = analyse_pool(placeholder, packed.axes if packed else None) if placeholder in attended else None
        except NotAPool as refusal:
            note_refusal(placeholder, refusal)  # for the sites that read it
            continue
        if pool is not None:
            _PoolRewriter(gm.graph, pool).rewrite()


def _reordered(graph: Graph) -> set[Node]:
    """The inputs whose sequences a vector of indices reorders: the graph returns the result or copies it back."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    results = [node for node in graph.output_node().args[0] if isinstance(node, Node)]
    paths = [states_of(node) for node in (*results, *(copy.args[1] for copy in copies))]
    return {first for first, *later in paths if any(map(_takes_vector, later))}


def _takes_vector(node: Node) -> bool:
    """Whether ``node`` is an index by one vector."""
    if node.target is not aten.index.Tensor:
        return node.target in (aten.index_select.default, aten.gather.default)
    given = [index for index in node.args[1] if index is not None]
    return len(given) == 1 and len(shape_of(given[0])) == 1


class _PoolRewriter:
    """Rewrites one pool."""

    def __init__(self, graph: Graph, pool: Pool) -> None:
        self.graph = graph
        self.pool = pool
        self.caches: dict[Node, Node] = {}

    def rewrite(self) -> None:
        pool = self.pool
        gathers = set(pool.gathers)
        for node in [*pool.states, *pool.gathers]:
            with self.graph.inserting_before(behind_placeholders(node) if node is pool.node else node):
                if node is pool.node:
                    self.caches[node] = self._view(node, (1, pool.num_slots, *pool.vector_shape))
                elif node in gathers:
                    self._gather(node)
                else:
                    self.caches[node] = self._write(node) if node in pool.writes else self.caches[node.args[0]]
        if pool.write_back is not None:
            with self.graph.inserting_before(pool.write_back):
                last = self._view(self.caches[pool.write_back.args[1]], tuple(shape_of(pool.node)))
            pool.write_back.args = (pool.node, last)
        for node in pool.sizes:
            with self.graph.inserting_before(node):
                node.replace_all_uses_with(size_node(self.graph, node.meta["val"]))
        for node in (*pool.sizes, *pool.gathers, *reversed([*pool.states][1:])):
            self.graph.erase_node(node)

    def _view(self, node: Node, shape: tuple[Any, ...]) -> Node:
        sizes = [size_node(self.graph, size) for size in shape]
        view = self.graph.call_function(POOL_VIEW, (node, sizes, self.pool.axes))
        with fake_mode_of(self.graph):
            view.meta["val"] = node.meta["val"].new_empty(shape)
        return view

    def _write(self, node: Node) -> Node:
        state, indices, value, *_ = node.args
        slots = self._slots(state, indices)
        vector_shape = self.pool.vector_shape
        has_heads_first = self._is_of_blocks_with_heads_first(state, indices)

        def one_sequence(x: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
            if has_heads_first:
                x = x.reshape(*[1] * (3 - x.dim()), *x.shape).transpose(-3, -2)
            return x.expand(*slots.shape, *vector_shape).reshape(1, -1, *vector_shape), slots.reshape(-1)

        x, positions = inline(self.graph, one_sequence, value, slots)
        cache = self.caches[state]
        write = self.graph.call_function(aten.index_put.default, (cache, [None, positions], x))
        write.meta["val"] = cache.meta["val"]
        return write

    def _gather(self, node: Node) -> None:
        state, indices = node.args
        gather = self.graph.call_function(GATHER_SLOTS, (self.caches[state], self._slots(state, indices)))
        gather.meta = dict(node.meta)
        if self._is_of_blocks_with_heads_first(state, indices):
            order = list(range(node.meta["val"].dim()))
            order[-3:-1] = order[-2], order[-3]
            gather.meta["val"] = node.meta["val"].permute(order)
            gather = insert_call(self.graph, aten.permute.default, gather, order)
        node.replace_all_uses_with(gather)

    def _is_of_blocks_with_heads_first(self, state: Node, indices: list[Node | None]) -> bool:
        """Whether indices name whole blocks [num_kv_heads, block_size, head_dim]."""
        return self.pool.states[state] == BLOCK_AXES[1] and sum(index is not None for index in indices) == 1

    def _slots(self, state: Node, indices: list[Node | None]) -> Node:
        """The slots that indices of a state name. Indices out of range become a slot behind the last."""
        shape, axes = shape_of(state), self.pool.states[state]
        given = [index for index in indices if index is not None]
        if axes == SLOT_AXES:
            return given[0]
        num_blocks, block_size = (size_node(self.graph, shape[axes.index(axis)]) for axis in "nt")

        def slots(num_blocks: Any, block_size: Any, block: Tensor, *token: Tensor) -> Tensor:
            block, inside = _counted_from_first(block, num_blocks)
            if token:
                offset, inside_block = _counted_from_first(token[0], block_size)
                inside = inside & inside_block
            else:
                offset = torch.arange(block_size, device=block.device)
                block, inside = block[..., None], inside[..., None]
            return torch.where(inside, block * block_size + offset, num_blocks * block_size)

        return inline(self.graph, slots, num_blocks, block_size, *given)


def _counted_from_first(index: Tensor, size: Any) -> tuple[Tensor, Tensor]:
    """``index`` with negative values counted from the end, and whether each value is within ``size``."""
    index = index.long()
    index = torch.where(index < 0, index + size, index)
    return index, (index >= 0) & (index < size)
