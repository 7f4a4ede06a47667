"""Where in a cache a graph writes first: a caller who fills caches from their beginning wrote all tokens before that.

The positions of a write are computed by a few nodes, mostly from one input. Those nodes become a graph of their own,
which can run on the inputs of a call before the call does.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.passes.calling import FirstPosition

_MAX_NODES = 200
"""More nodes than compute positions anywhere; a model that chooses them by its outputs has thousands."""


def first_position(
    gm: GraphModule, inputs: Sequence[Node], positions: Node, valid: Node | None
) -> FirstPosition | None:
    """The first of ``positions`` that are ``valid``; None if they are not computed from integer inputs in a few nodes.

    Args:
        gm: a functional graph.
        inputs: the placeholders of what its caller passes, in order.
        positions: int64 [n] or [batch, n].
        valid: bool of a shape that broadcasts with them; None for all.
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
