"""Count dimensions from the first.

``cache.narrow(-2, start, n)`` reaches the graph with the dimension -2. Later passes compare dimensions with places in
the order of a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.compat.tensors import schema_of
from kvcompile.passes.graph.aten import LIST_OPS, VIEW_OPS, WRITE_OPS

_OPS = VIEW_OPS | WRITE_OPS | LIST_OPS | {torch.ops.aten.select.int, torch.ops.aten.sym_size.int}
_NAMES = ("dim", "dim0", "dim1", "dims")


def normalise_dims(graph: Graph) -> None:
    """Add the rank to negative dimensions of views, writes and selections."""
    for node in graph.nodes:
        if node.target in _OPS:
            names = [argument.name for argument in schema_of(node.target).arguments]
            node.args = tuple(_counted(node, name, value) for name, value in zip(names, node.args, strict=False))
            node.kwargs = {name: _counted(node, name, value) for name, value in node.kwargs.items()}


def _counted(node: Node, name: str, value: Any) -> Any:
    """An argument of ``node``, with dimensions counted from the first."""
    if name not in _NAMES:
        return value
    rank = _rank(node)
    return [dim % rank for dim in value] if isinstance(value, (list, tuple)) else value % rank


def _rank(node: Node) -> int:
    """The larger rank of input and result: ``unsqueeze`` counts dimensions of its result, ``select`` of its input."""
    values = [operand.meta["val"] for operand in (node, *node.all_input_nodes[:1])]
    return max(1, *(value.dim() for value in values if isinstance(value, torch.Tensor)))
