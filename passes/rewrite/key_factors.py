"""Insert the key factors: packed attention multiplies pre-RoPE keys by them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.spec.key_factors import paired_query
from kvcompile.passes.graph.inline import inline, size_node
from kvcompile.passes.prove.key_factors import KeyRope


def insert_factors(graph: Graph, rope: KeyRope, num_tokens: Any, query: Node) -> Node:
    """The factors of all tokens, [2, num_tokens, head_dim] in the dtype of ``query``, at the insertion point.

    Layers with the same RoPE compute them once, because equal nodes are shared afterwards. The model's keys after RoPE
    have the dtype of ``query``, too, so that no range is lost: a factor may be large, as in xPos.
    """
    value = query.meta["val"]
    dtype, device = value.dtype, value.device

    def factors(*arguments: Any) -> Tensor:
        *coefficients, count = arguments
        return rope.factors(coefficients, count, device).to(dtype)

    result: Node = inline(graph, factors, *rope.keys.coefficients, size_node(graph, num_tokens))
    return result


def insert_paired_query(graph: Graph, rope: KeyRope, query: Node) -> Node:
    """The query with its channels in the order of their partners, at the insertion point."""
    result: Node = inline(graph, paired_query, query, rope.partners)
    return result


def erase_unused(graph: Graph, nodes: frozenset[Node] | set[Node]) -> None:
    """Erase all ``nodes`` without users. They computed keys after RoPE, which attention no longer reads."""
    for node in reversed(list(graph.nodes)):
        if node in nodes and not node.users and node.op == "call_function":
            graph.erase_node(node)
