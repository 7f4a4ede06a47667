"""Stage B: give markers that stayed the attention that plain Inductor would have compiled."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.inline import inline
from kvcompile.passes.marker import Marker, markers_of


def expand_marker(graph: Graph, marker: Node) -> None:
    """Replace one marker by ``F.scaled_dot_product_attention``, decomposed as Inductor does."""
    call = Marker.of(marker)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Any:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            dropout_p=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )

    with graph.inserting_before(marker):
        result = inline(graph, attention, call.query, call.key, call.value, call.mask)
    marker.replace_all_uses_with(result)
    graph.erase_node(marker)


def expand_markers(graph: Graph) -> None:
    """Expand every marker that is left."""
    for marker in markers_of(graph):
        expand_marker(graph, marker)
