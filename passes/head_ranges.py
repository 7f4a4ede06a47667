"""Attention whose keys or values are some of the heads of a cache.

Differential attention, for one, gives the keys of all heads the values of one half of them, twice in turn. The heads
of the operands are cut into ranges in which keys and values are neighbours in their caches. Each is grouped-query
attention of its own, on a part of the packed data: heads lie apart there.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace

import torch
from torch.fx import Graph, Node

from kvcompile.passes.inline import inline, size_node
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.match_write import shape_of
from kvcompile.passes.trace_read import VIEW_OPS, Read

aten = torch.ops.aten

_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@dataclass(frozen=True)
class HeadRange:
    """One of ``count`` equal ranges of the operands' heads, and where its keys and values lie in their caches.

    Attributes:
        index: of the range.
        count: ranges.
        key: the first KV head of its keys.
        value: the first KV head of its values.
        num_heads: of its KV heads.
        tiles: how often it has all of them in turn.
    """

    index: int
    count: int
    key: int
    value: int
    num_heads: int
    tiles: int


def head_ranges(key: Read, value: Read) -> list[HeadRange] | None:
    """The ranges of an attention that reads keys and values so; None if heads do not lie side by side in any."""
    num_heads = key.num_heads * key.head_tiles
    if num_heads != value.num_heads * value.head_tiles:
        return None
    if key.num_heads == value.num_heads:
        return [HeadRange(0, 1, key.first_head, value.first_head, key.num_heads, key.head_tiles)]
    size = math.gcd(key.num_heads, value.num_heads)
    return [
        HeadRange(
            index=begin // size,
            count=num_heads // size,
            key=key.first_head + begin % key.num_heads,
            value=value.first_head + begin % value.num_heads,
            num_heads=size,
            tiles=1,
        )
        for begin in range(0, num_heads, size)
    ]


def narrowed(graph: Graph, marker: Marker, heads: HeadRange) -> Marker:
    """``marker`` for the query heads of a range; nodes are inserted at the graph's insertion point."""
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
    """Packed data of some KV heads, a view, inserted at the graph's insertion point unless it is that of all."""
    if shape_of(data)[2] == num_heads:
        return data
    result: Node = inline(graph, lambda data: data.narrow(2, first, num_heads), data)
    return result


def joined(graph: Graph, outputs: list[Node]) -> Node:
    """The output of attention from those of its ranges."""
    if len(outputs) == 1:
        return outputs[0]
    result: Node = inline(graph, lambda *outputs: torch.cat(outputs, 1), *outputs)
    return result


def slice_splits(graph: Graph) -> None:
    """Put slices in the place of splits of the middle axes, of heads or tokens, that attention reads."""
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
    """The slice that ``part`` of a split is, in its place."""
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
