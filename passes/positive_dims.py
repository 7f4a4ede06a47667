"""Stage B, before analysis: dimensions are counted from the first.

``cache.narrow(-2, start, n)`` reaches the graph with the dimension -2. The passes behind this one compare dimensions
with places in the order of a cache.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvcompile.passes.first_state import LIST_OPS
from kvcompile.passes.match_write import WRITE_OPS
from kvcompile.passes.trace_read import VIEW_OPS

_OPS = VIEW_OPS | WRITE_OPS | LIST_OPS | {torch.ops.aten.select.int}
_NAMES = ("dim", "dim0", "dim1", "dims")


def make_dims_positive(graph: Graph) -> None:
    """Add the rank to negative dimensions of the operators that caches go through."""
    for node in graph.nodes:
        if node.target in _OPS:
            names = [argument.name for argument in node.target._schema.arguments]
            node.args = tuple(
                _positive(value, _rank(node)) if name in _NAMES else value
                for name, value in zip(names, node.args, strict=False)
            )


def _positive(dims: int | list[int], rank: int) -> int | list[int]:
    return [dim % rank for dim in dims] if isinstance(dims, (list, tuple)) else dims % rank


def _rank(node: Node) -> int:
    """Of the operator's input or result: ``unsqueeze`` counts in the latter, ``select`` in the former."""
    values = [operand.meta["val"] for operand in (node, *node.all_input_nodes[:1])]
    return max(1, *(value.dim() for value in values if isinstance(value, torch.Tensor)))
