"""Use PyTorch's own operators again to index the pools that stay plain."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS, POOL_VIEW

aten = torch.ops.aten


def expand_pools(graph: Graph) -> None:
    """Replace the remaining ``kvcompile::pool_view`` and ``kvcompile::gather_slots`` by indexing of the pools."""
    pools: dict[Node, Node] = {}  # state of a cache -> the state of the pool that it is a view of
    axes: dict[Node, str] = {}
    for node in list(graph.nodes):
        cache = node.args[0] if node.op == "call_function" and node.args else None
        if node.target is POOL_VIEW and cache not in pools:
            pools[node], axes[node] = cache, node.args[2]
        elif isinstance(cache, Node) and cache in pools:
            with graph.inserting_before(node):
                if node.target is aten.index_put.default:
                    _, (_, slots), vectors = node.args
                    pools[node] = inline(graph, _put(axes[cache]), pools[cache], slots, vectors)
                    axes[node] = axes[cache]
                elif node.target is GATHER_SLOTS:
                    gathered = inline(graph, _gather(axes[cache]), pools[cache], node.args[1])
                    node.replace_all_uses_with(gathered)
                else:
                    assert node.target is POOL_VIEW, f"{node.format_node()} is not a use of a pool"
                    node.replace_all_uses_with(pools[cache])
    for node in reversed(list(graph.nodes)):
        if node.target in (POOL_VIEW, GATHER_SLOTS) or node in pools:
            graph.erase_node(node)


def _put(axes: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def put(pool: Tensor, slots: Tensor, vectors: Tensor) -> Tensor:
        return aten.index_put.default(pool, _indices(pool, slots, axes), vectors[0])

    return put


def _gather(axes: str) -> Callable[[Tensor, Tensor], Tensor]:
    def gather(pool: Tensor, slots: Tensor) -> Tensor:
        return aten.index.Tensor(pool, _indices(pool, slots, axes))

    return gather


def _indices(pool: Tensor, slots: Tensor, axes: str) -> list[Tensor | None]:
    """The indices by which the dimensions of a pool in the order ``axes`` name ``slots``."""
    if axes == SLOT_AXES:
        return [slots]
    block_size = pool.shape[axes.index("t")]
    block, offset = slots // block_size, slots % block_size
    return [block, None, offset] if axes == BLOCK_AXES[1] else [block, offset]
