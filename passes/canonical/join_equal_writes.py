"""Join equal writes of a cache, so that one node serves attention and the output.

Models write a cache where attention reads it, and make the returned cache by a second, equal write::

    out = attention(q, torch.cat([keys, k], 2))
    return out, torch.cat([keys, k], 2)

Later passes would see two caches that grow from one. The graph is functional: equal writes of equal operands have equal
values, whatever the nodes between them do.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aliases import may_leave
from kvcompile.passes.graph.aten import arguments, computed_alike
from kvcompile.passes.graph.states import first_state

aten = torch.ops.aten

_WRITES = (
    aten.cat.default,
    aten.index_put.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.scatter.src,
)


def join_equal_writes(graph: Graph) -> None:
    """Replace each write of an input by an earlier equal write, unless both leave the graph.

    Two equal caches that leave the graph are two tensors of the caller, who may change one of them. They stay apart.
    """
    writes: dict[tuple[object, Node], list[Node]] = defaultdict(list)
    joined = False
    for node in list(graph.nodes):
        if node.target not in _WRITES or (first := first_state(node)).op != "placeholder":
            continue
        alike = writes[node.target, first]
        equal = [write for write in alike if computed_alike(arguments(write), arguments(node))]
        earlier = next((write for write in equal if not (may_leave(write) and may_leave(node))), None)
        if earlier is None:
            alike.append(node)
        else:
            node.replace_all_uses_with(earlier)
            joined = True
    if joined:
        graph.eliminate_dead_code()  # the writes, and what only they used
