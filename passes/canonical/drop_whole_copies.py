"""Replace a copy over a whole input by the copied value.

Functionalisation leaves ``copy(cache, slice)`` for ``cache.copy_(slice)`` if the source is a view or ``cache`` is a
transposed view. The copy has the value of its source, and later passes see the source in its place.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import SELECTIONS, VIEW_OPS, WRITE_OPS, same_sizes, shape_of
from kvcompile.passes.graph.permutations import permutes_dims

aten = torch.ops.aten


def drop_whole_copies(graph: Graph) -> None:
    """Replace each copy over a whole input, or over a later state of one, by its source.

    A copy of a view of an input stays. The graph may overwrite that input before the copy is written back, and Inductor
    orders copies between inputs only by the values that it makes for them.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        base, source, *_ = node.args
        alike = base.meta["val"].dtype == source.meta["val"].dtype and same_sizes(shape_of(base), shape_of(source))
        if alike and _is_whole(base) and _made_from(source).op == "call_function":
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_whole(node: Node) -> bool:
    """Whether ``node`` is an input or a later state of one, with its dimensions in any order."""
    while permutes_dims(node):
        node = node.args[0]
    return node.op == "placeholder" or node.target in WRITE_OPS


def _made_from(node: Node) -> Node:
    """The value that ``node`` is a view or a part of."""
    while node.op == "call_function" and node.target in VIEW_OPS | SELECTIONS:
        node = node.args[0]
    return node
