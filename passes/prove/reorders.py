"""Recognise reorders of the sequences of a cache: ``cache[beams]``, as beam search and changing batches do.

====================================  =====================================
in the model                          in the functional graph
====================================  =====================================
``cache[beams]``                      ``index(cache, [beams])``
``cache.index_select(0, beams)``      ``index_select(cache, 0, beams)``
``cache.gather(0, index)``            ``gather(cache, 0, expand(beams))``
====================================  =====================================

The bytes of a sequence depend on no other sequence, so a reorder copies bytes. The result may have more or fewer
sequences than the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import arguments, same_sizes, shape_of
from kvcompile.passes.graph.constant_dims import first_along_constant, varying_shape
from kvcompile.passes.graph.inline import inline, size_node
from kvcompile.passes.prove.cache_write import CacheWrite, Normalised

aten = torch.ops.aten

REORDER = "reorder of sequences"
"""The form of these writes, for the report."""


def match_reorder(node: Node, axes: str) -> CacheWrite | None:
    """Read ``node`` as a reorder of the sequences of a cache in the order ``axes``; None for another node."""
    matcher = _MATCHERS.get(node.target) if node.op == "call_function" else None
    sequences = matcher(node, axes) if matcher is not None and "b" in axes else None
    if sequences is None or len(shape_of(node)) != len(axes):
        return None
    num_sequences, varying = shape_of(node.args[0])[axes.index("b")], varying_shape(sequences)

    def counted_from_first(sequences: Tensor, num_sequences: Any) -> Tensor:
        if sequences.dim() > 1:
            sequences = first_along_constant(sequences, varying).reshape(-1)
        sequences = sequences.long()
        return torch.where(sequences < 0, sequences + num_sequences, sequences)

    def normalise(graph: Graph) -> Normalised:
        count = size_node(graph, num_sequences)
        return None, inline(graph, counted_from_first, sequences, count), None

    return CacheWrite(node, node.args[0], REORDER, axes, (), normalise, reorders=True)


def _of_index(node: Node, axes: str) -> Node | None:
    indices = node.args[1]
    given = {axis: index for axis, index in zip(axes, indices, strict=False) if index is not None}
    index = given.get("b")
    is_vector = index is not None and len(shape_of(index)) == 1 and not _is_mask(index)
    return index if is_vector and len(given) == 1 else None


def _of_index_select(node: Node, axes: str) -> Node | None:
    _, axis, index = arguments(node)
    return index if axes[axis] == "b" and len(shape_of(index)) == 1 else None


def _of_gather(node: Node, axes: str) -> Node | None:
    """The sequences that a ``gather`` takes as a whole: its index is the same for all vectors of a sequence."""
    base, axis, index, *_ = arguments(node)
    if axes[axis] != "b":
        return None
    whole = [size if dim != axis else shape_of(index)[dim] for dim, size in enumerate(shape_of(base))]
    others = [size for dim, size in enumerate(varying_shape(index)) if dim != axis]
    return index if same_sizes(shape_of(index), whole) and same_sizes(others, [1] * len(others)) else None


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


_MATCHERS: dict[Any, Callable[[Node, str], Node | None]] = {
    aten.index.Tensor: _of_index,
    aten.index_select.default: _of_index_select,
    aten.gather.default: _of_gather,
}

REORDERING = (*_MATCHERS,)
"""The operators that may reorder sequences."""
