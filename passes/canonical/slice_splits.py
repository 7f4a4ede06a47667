"""Replace the pieces of splits that attention reads by slices."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import VIEW_OPS, shape_of
from kvcompile.passes.graph.inline import size_node
from kvcompile.passes.marker import Marker, markers_of

aten = torch.ops.aten

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def slice_splits(graph: Graph) -> None:
    """Put slices in the place of pieces of a split of heads or tokens, the middle axes, that attention reads."""
    for marker in markers_of(graph):
        call = Marker.of(marker)
        for node in (call.key, call.value):
            while node.op == "call_function" and (node.target in VIEW_OPS or _is_split(node)):
                node = (_sliced(graph, node) if _is_split(node) else node).args[0]


def _is_split(node: Node) -> bool:
    if node.target is not operator.getitem or node.args[0].target not in _SPLITS:
        return False
    whole, _, *dim = node.args[0].args
    return len(shape_of(whole)) == 4 and bool(dim) and dim[0] in (1, 2)


def _sliced(graph: Graph, part: Node) -> Node:
    """The slice that equals ``part``, a piece of a split; it takes the place of the piece."""
    split, index = part.args
    whole, _, dim = split.args
    sizes = [value.shape[dim] for value in split.meta["val"]]
    begin = sum(sizes[:index])
    with graph.inserting_before(part):
        bounds = (size_node(graph, begin), size_node(graph, begin + sizes[index]))
        node: Node = graph.call_function(aten.slice.Tensor, (whole, dim, *bounds))
    node.meta = dict(part.meta)
    part.replace_all_uses_with(node)
    graph.erase_node(part)
    if not split.users:
        graph.erase_node(split)
    return node
