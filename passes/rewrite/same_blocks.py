"""Let attention read equal numbers of blocks of keys and of values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.graph.inline import insert_call, size_node

aten = torch.ops.aten


def with_same_blocks(
    graph: Graph, data: tuple[Node, Node], layouts: tuple[PackedLayout, PackedLayout], num_tokens: Any
) -> tuple[Node, Node]:
    """Packed keys and values with equal numbers of blocks: ``data``, or the first blocks of both if they differ.

    Caches differ if they have room for different numbers of tokens, or if one of them is in a growing buffer. The first
    blocks of a packed cache are the packed cache of the first tokens.

    Args:
        graph: the graph; nodes go to its insertion point.
        data: packed keys and values.
        layouts: their layouts.
        num_tokens: the number of tokens that attention needs.
    """
    keys, values = (layout.token_blocks(node.meta["val"]) for node, layout in zip(data, layouts, strict=True))
    if data[0] is data[1] or statically_known_true(keys == values):
        return data
    counts = (size_node(graph, layout.blocks(num_tokens)) for layout in layouts)
    first, second = (
        insert_call(graph, aten.slice.Tensor, node, 0, 0, count) for node, count in zip(data, counts, strict=True)
    )
    return first, second
