"""Find the nodes that lead from the values of caches to attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import Node

from kvcompile.passes.marker import is_marker


def computed_from(operands: Iterable[Node], is_cache: Callable[[Node], bool]) -> dict[Node, bool]:
    """The caches that ``operands`` are computed from, and the nodes in between, in the order of the graph.

    The walk stops at caches and at the attention of earlier layers.

    Returns:
        For each node, whether it is computed from a cache; False for the caches themselves.
    """
    pending, seen = list(operands), set(operands)
    while pending:
        node = pending.pop()
        inputs = (
            [] if is_marker(node) or is_cache(node) else [other for other in node.all_input_nodes if other not in seen]
        )
        seen.update(inputs)
        pending += inputs
    behind: dict[Node, bool] = {}
    for node in next(iter(seen)).graph.nodes if seen else ():
        if node in seen and is_cache(node):
            behind[node] = False
        elif node in seen and not is_marker(node) and not behind.keys().isdisjoint(node.all_input_nodes):
            behind[node] = True
    return behind


def states_behind(operand: Node, is_cache: Callable[[Node], bool]) -> set[Node]:
    """The values of caches that ``operand`` is computed from, up to the attention of earlier layers."""
    return {node for node, is_computed in computed_from([operand], is_cache).items() if not is_computed}
