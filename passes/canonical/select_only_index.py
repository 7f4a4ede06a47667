"""Let views that lack a dimension of size 1 select the only index of that dimension, if they are written.

A model for one sequence may write its cache without the batch: ``cache.squeeze(0).index_copy_(1, pos, k)``, or
``cache.view(heads, tokens, channels)[:, pos] = k``. Functionalisation leaves a view, a write, and a view back. Both
views become ``select`` and ``select_scatter``, as for ``cache[0][:, pos] = k``, which later passes read as a write of
the cache. The only piece of ``unbind`` becomes ``select``, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import RESHAPES, SQUEEZES, arguments, same_sizes, shape_of

aten = torch.ops.aten

_WRITES = (aten.index_put.default, aten.slice_scatter.default, aten.select_scatter.default, aten.scatter.src)
"""Operators whose result has the sizes and the dtype of their first operand."""


def select_only_index(graph: Graph) -> None:
    """Replace the views around each such write, and the only piece of each ``unbind``."""
    for node in graph.find_nodes(op="call_function", target=aten.unbind.int):
        (whole, dim), pieces = arguments(node), list(node.users)
        if statically_known_true(shape_of(whole)[dim] == 1):
            for piece in pieces:
                _replace(piece, aten.select.int, (whole, dim, 0))
            graph.erase_node(node)
    for node in graph.nodes:
        if node.target not in (aten.unsqueeze.default, *RESHAPES):
            continue
        written = node.args[0]
        taken = written.args[0] if written.target in _WRITES else None
        if not isinstance(taken, Node) or taken.target not in (*SQUEEZES, *RESHAPES):
            continue
        whole = taken.args[0]
        dim = _dropped(shape_of(whole), shape_of(taken))
        if dim is None or not same_sizes(shape_of(node), shape_of(whole)):
            continue
        _replace(taken, aten.select.int, (whole, dim, 0))
        _replace(node, aten.select_scatter.default, (whole, written, dim, 0))


def _dropped(whole: Sequence[Any], part: Sequence[Any]) -> int | None:
    """The dimension of size 1 without which ``whole`` has the sizes ``part``; None if there is none."""
    if len(whole) != len(part) + 1:
        return None
    dims = (
        dim
        for dim, size in enumerate(whole)
        if statically_known_true(size == 1) and same_sizes([*whole[:dim], *whole[dim + 1 :]], part)
    )
    return next(dims, None)


def _replace(node: Node, target: Any, args: tuple[Any, ...]) -> None:
    """Let ``node`` call ``target``, which gives the same value."""
    node.target, node.args, node.kwargs = target, args, {}
