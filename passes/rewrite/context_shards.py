"""Split a rewritten cache over the ranks of a group: each rank stores and reads its own blocks of tokens.

A rank computes attention on its tokens alone. One all-gather brings the outputs of all ranks and their log-sum-exp to
every rank, which merges them. Sinks belong to no token; the first rank counts them.

Every rank has the same queries and new tokens, and runs the same graph, apart from the number of the rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.compat.distributed import all_gather
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.attention import merge_parts
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import inline, size_node
from kvcompile.passes.marker import Marker
from kvcompile.passes.rewrite.insert import insert_attention_part


def insert_owned(
    graph: Graph, shard: ContextShard, x: Node, positions: Node, valid: Node | None
) -> tuple[Node, Node, Node]:
    """Insert :meth:`ContextShard.owned` at the graph's insertion point."""
    owned: tuple[Node, Node, Node] = inline(graph, _owned, shard, x, positions, valid)
    return owned


def _owned(shard: ContextShard, x: Tensor, positions: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    return shard.owned(x, positions, valid)


def insert_sharded_attention(
    graph: Graph,
    shard: ContextShard,
    marker: Marker,
    k_data: Node,
    v_data: Node,
    layouts: tuple[PackedLayout, PackedLayout],
    kv_len: Any,
) -> Node:
    """Insert the attention of ``marker`` on a cache that all ranks hold together; returns its output.

    It takes the arguments of :func:`kvcompile.passes.rewrite.insert.insert_attention`; ``kv_len`` counts the tokens of
    all ranks.
    """
    num_tokens = size_node(graph, layouts[0].token_blocks(k_data.meta["val"]) * BLOCK_TOKENS)
    q_len = size_node(graph, shape_of(marker.query)[2]) if marker.is_causal else None
    query = marker.query.meta["val"]
    mask = inline(graph, _own_mask, shard, marker.mask, num_tokens, kv_len, q_len, query.device)
    own = replace(marker, mask=mask, is_causal=False, sinks=marker.sinks if shard.rank == 0 else None)
    out, lse = insert_attention_part(graph, own, k_data, v_data, *layouts, num_tokens)
    merged: Node = inline(graph, _merged, shard, out, lse, query.dtype)
    return merged


def _own_mask(
    shard: ContextShard, mask: Tensor | None, num_tokens: int, kv_len: int, q_len: int | None, device: torch.device
) -> Tensor:
    return shard.mask(mask, num_tokens, kv_len, q_len, device)


def _merged(shard: ContextShard, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The output of all ranks, from the part of this rank."""
    mine = torch.cat([out, lse], -1)
    gathered = all_gather(mine, shard.size, shard.group)
    parts = gathered.unflatten(0, (shard.size, mine.shape[0]))
    return merge_parts(parts[..., :-2], parts[..., -2:]).to(dtype)
