"""Stage B, before analysis: what is copied over all of an input is its value afterwards.

Functionalisation leaves ``copy(cache, slice)`` for ``cache.copy_(slice)``, where the source is a view. To the passes
behind this one its value is that of the view.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import SELECTIONS, VIEW_OPS, same_sizes, shape_of

aten = torch.ops.aten


def drop_whole_copies(graph: Graph) -> None:
    """Let users of such a copy use what is copied.

    Not where that is a view of an input: the graph may overwrite this one before the copy is written back, and Inductor
    orders copies between inputs only by the values that it makes for them.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        base, source, *_ = node.args
        alike = base.meta["val"].dtype == source.meta["val"].dtype and same_sizes(shape_of(base), shape_of(source))
        if alike and base.op == "placeholder" and _made_from(source).op == "call_function":
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _made_from(node: Node) -> Node:
    """The value that ``node`` is a view of."""
    while node.op == "call_function" and node.target in VIEW_OPS | SELECTIONS:
        node = node.args[0]
    return node
