"""Find the first position that a graph writes in a cache.

If the caller fills caches from the beginning, all tokens before this position are written. A few nodes compute the
positions of a write, mostly from one input. They become a separate graph, which can run on the inputs of a call before
the call does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.calling import FirstPosition

_MAX_NODES = 200
"""The most nodes that may compute positions. No model needs as many, unless positions depend on its outputs."""


def first_position(
    gm: GraphModule, inputs: Sequence[Node], positions: Node, valid: Node | None
) -> FirstPosition | None:
    """A graph for the first of ``positions`` that is ``valid``; None unless a few nodes compute them from integers.

    Args:
        gm: a functional graph.
        inputs: its placeholders, in the order in which the caller passes values.
        positions: int64 [n] or [batch, n].
        valid: bool, of a shape that broadcasts with ``positions``; None for all.
    """
    wanted = {positions} if valid is None else {positions, valid}
    pending = list(wanted)
    while pending:
        new = set(pending.pop().all_input_nodes) - wanted
        wanted |= new
        pending.extend(new)
        if len(wanted) > _MAX_NODES:
            return None
    if any(node.op == "placeholder" and (node not in inputs or _is_floating(node)) for node in wanted):
        return None
    graph, copies = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        if node in wanted:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    graph.output((copies[positions], None if valid is None else copies[valid]))
    return FirstPosition(GraphModule(gm, graph), tuple(place for place, node in enumerate(inputs) if node in wanted))


def _is_floating(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.is_floating_point()
