"""Stage B: give markers that stayed the attention that plain Inductor would have compiled."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.inline import inline


def expand_marker(graph: Graph, marker: Node) -> None:
    """Replace one marker by ``F.scaled_dot_product_attention``, decomposed as Inductor does."""
    query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, _ = marker.args

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )

    with graph.inserting_before(marker):
        result = inline(graph, attention, query, key, value, mask)
    marker.replace_all_uses_with(result)
    graph.erase_node(marker)


def expand_markers(graph: Graph) -> None:
    """Expand every marker that is left."""
    for marker in graph.find_nodes(op="call_function", target=torch.ops.kvcompile.sdpa.default):
        expand_marker(graph, marker)
