"""Find out whether an operand of a product reads a cache that the graph writes or returns."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.mark.calls import read_call, value_of
from kvcompile.passes.mark.products import read_contraction

PROJECTIONS = {"linear": -1, "conv1d": 1, "conv2d": 1}
"""Operations that project one dimension of their input, and this dimension."""


class CacheReads:
    """The tensors of a graph that are made from caches without a product."""

    def __init__(self, graph: Graph, is_changed: Callable[[Node], bool]) -> None:
        """``is_changed``: whether anything in the graph changes the tensor of a node in place."""
        self._returned = frozenset(graph.output_node().all_input_nodes)
        self._is_changed = is_changed

    def __contains__(self, node: Node) -> bool:
        pending, seen = [node], {node}
        while pending:
            node = pending.pop()
            if not isinstance(value_of(node), Tensor):
                continue
            if node in self._returned or (node.op in ("placeholder", "get_attr") and self._is_changed(node)):
                return True
            call = read_call(node)
            if call is None or call.name in PROJECTIONS or read_contraction(call) is not None:
                continue
            inputs = [other for other in node.all_input_nodes if other not in seen]
            seen.update(inputs)
            pending += inputs
        return False
