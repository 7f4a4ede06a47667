"""Compute attention of some heads, or of query heads that take the KV heads in turn, as grouped-query attention.

In grouped-query attention, neighbouring query heads share a KV head: with four query heads and ``num_kv_heads`` 2,
their KV heads are 0 0 1 1. ``keys.repeat(1, 2, 1, 1)`` gives them 0 1 0 1. The result is the same if the query heads
are reordered before attention and the output's heads are reordered back after it. The packed cache does not change.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.marker import Marker
from kvcompile.passes.prove.head_ranges import HeadRange


def group_heads(graph: Graph, marker: Marker, num_kv_heads: int, tiles: int) -> Marker:
    """``marker`` with its query heads reordered, so that the query heads of each KV head are neighbours.

    In ``marker`` they take all KV heads ``tiles`` times in turn. Query, mask and sinks are reordered by nodes at the
    graph's insertion point.
    """
    num_heads = shape_of(marker.query)[1]

    def reorder(x: Tensor, dim: int) -> Tensor:
        return _swap(x, dim, tiles, num_kv_heads)

    mask, sinks = marker.mask, marker.sinks
    if mask is not None and len(shape_of(mask)) > 2 and shape_of(mask)[-3] == num_heads:
        mask = inline(graph, lambda x: reorder(x, x.dim() - 3), mask)
    if sinks is not None:
        sinks = inline(graph, lambda x: reorder(x, 0), sinks)
    return replace(marker, query=inline(graph, lambda x: reorder(x, 1), marker.query), mask=mask, sinks=sinks)


def tile_heads(graph: Graph, output: Node, num_kv_heads: int, tiles: int) -> Node:
    """The output of attention, [batch, num_heads, q_len, v_head_dim], with its heads in the order of the model."""
    result: Node = inline(graph, lambda x: _swap(x, 1, num_kv_heads, tiles), output)
    return result


def _swap(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """``x`` with ``outer`` and ``inner`` exchanged in dimension ``dim``, of size outer * inner * remaining."""
    return x.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def narrowed(graph: Graph, marker: Marker, heads: HeadRange) -> Marker:
    """``marker`` for the query heads of one range; nodes go to the graph's insertion point."""
    if heads.count == 1:
        return marker
    num_heads = int(shape_of(marker.query)[1])
    size = num_heads // heads.count

    def narrow(x: Node, dim: int) -> Node:
        result: Node = inline(graph, lambda x: x.narrow(dim, heads.index * size, size), x)
        return result

    mask, sinks = marker.mask, marker.sinks
    if mask is not None and len(shape_of(mask)) > 2 and shape_of(mask)[-3] == num_heads:
        mask = narrow(mask, len(shape_of(mask)) - 3)
    if sinks is not None:
        sinks = narrow(sinks, 0)
    return replace(marker, query=narrow(marker.query, 1), mask=mask, sinks=sinks)


def data_of_heads(graph: Graph, data: Node, first: int, num_heads: int) -> Node:
    """Packed data of ``num_heads`` KV heads: ``data`` itself if it has no more, else a view at the insertion point."""
    if shape_of(data)[2] == num_heads:
        return data
    result: Node = inline(graph, lambda data: data.narrow(2, first, num_heads), data)
    return result


def joined(graph: Graph, outputs: list[Node]) -> Node:
    """The output of attention, from the outputs of its ranges of heads."""
    if len(outputs) == 1:
        return outputs[0]
    result: Node = inline(graph, lambda *outputs: torch.cat(outputs, 1), *outputs)
    return result
