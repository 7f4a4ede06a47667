"""Put NaN into the rows of attention from which a mask hides every key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.inline import inline


def insert_nan_in_hidden_rows(graph: Graph, out: Node, mask: Node, kv_len: Any) -> Node:
    """Insert ``out`` with NaN in the rows from which ``mask`` hides every key; returns its node.

    Args:
        graph: the graph; nodes go to its insertion point.
        out: output of attention, [batch, num_heads, q_len, channels].
        mask: bool or float, of four dimensions that broadcast to [batch, num_heads, q_len, kv_len].
        kv_len: number of keys. If it is 0, the output is zero whatever the mask is.
    """
    if statically_known_true(kv_len == 0):
        return out

    def with_nan(out: Tensor, mask: Tensor) -> Tensor:
        is_shown = mask if mask.dtype == torch.bool else mask != -torch.inf
        return torch.where(is_shown.any(-1, keepdim=True), out, torch.nan)

    result: Node = inline(graph, with_nan, out, mask)
    return result
