"""Insert what packed attention multiplies cached keys by, if the model rotates its keys after their cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.spec.key_factors import paired_query
from kvcompile.passes.graph.inline import inline, size_node
from kvcompile.passes.prove.key_factors import KeyRotation


def insert_factors(graph: Graph, rotation: KeyRotation, num_tokens: Any, query: Node) -> Node:
    """The factors of all tokens, [2, num_tokens, head_dim] in the dtype of ``query``, at the insertion point.

    Layers with the same rotation compute them once: equal nodes are shared afterwards. Their dtype is the one in which
    the model multiplies its keys by a rotary embedding, and loses no range to it: a factor may be large, as in xPos.
    """
    value = query.meta["val"]
    dtype, device = value.dtype, value.device

    def factors(*arguments: Any) -> Tensor:
        *coefficients, count = arguments
        return rotation.factors(coefficients, count, device).to(dtype)

    result: Node = inline(graph, factors, *rotation.keys.coefficients, size_node(graph, num_tokens))
    return result


def insert_paired_query(graph: Graph, rotation: KeyRotation, query: Node) -> Node:
    """The query with its channels in the order of their partners, at the insertion point."""
    result: Node = inline(graph, paired_query, query, rotation.partners)
    return result


def erase_unused(graph: Graph, nodes: frozenset[Node] | set[Node]) -> None:
    """Erase the nodes that only led to a rotated key, and have no user left."""
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users and node.op == "call_function":
            graph.erase_node(node)
