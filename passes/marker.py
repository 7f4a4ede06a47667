"""The marker op ``kvcompile::sdpa``: one attention call, opaque to AOTAutograd, between stage A and stage B.

AOTAutograd would turn ``F.scaled_dot_product_attention`` into a backend-specific op or decompose it. A marker stays in
one piece; it also carries the qualified name of the module that called attention, which only Dynamo's graph knows. It
has no kernel: stage B replaces every marker.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define(
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? sinks, float dropout_p, bool is_causal, "
    "float? scale, float softcap, bool enable_gqa, str module) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)


@dataclass(frozen=True)
class Marker:
    """The arguments of a marker: those of ``F.scaled_dot_product_attention``, and the module that called it."""

    query: Node
    key: Node
    value: Node
    mask: Node | None = None
    sinks: Node | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    softcap: float = 0.0
    enable_gqa: bool = False
    module: str = ""

    @classmethod
    def of(cls, node: Node) -> Marker:
        """What the marker ``node`` says."""
        return cls(*node.args)

    def insert(self, graph: Graph) -> Node:
        """A marker node at the graph's insertion point."""
        return graph.call_function(TARGET, tuple(getattr(self, field.name) for field in fields(self)))


def is_marker(node: Node) -> bool:
    return node.op == "call_function" and node.target is TARGET


def markers_of(graph: Graph) -> list[Node]:
    """The markers of a graph, in its order."""
    return list(graph.find_nodes(op="call_function", target=TARGET))


def _sdpa_fake(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


torch.library.register_fake("kvcompile::sdpa", _sdpa_fake, lib=_library)

TARGET = torch.ops.kvcompile.sdpa.default
