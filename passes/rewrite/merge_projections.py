"""Merge projections that read the same activations: queries, keys and values, or the gate and up of an MLP.

A decode step multiplies a few rows by each weight. A weight with few columns gives the device few tiles, so most
multiprocessors are idle, and the launch takes longer than the product. One product with all columns fills the device.
vLLM merges the same projections in its models (``QKVParallelLinear`` and ``MergedColumnParallelLinear`` in
vllm/model_executor/layers/linear.py).

The first weight of a merged product becomes an input that holds all its weights, one after another. The caller keeps
the weights in such a tensor (:mod:`kvcompile.call.adjacent_parameters`). The same holds for their biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kvcompile.compat.symbols import hint_of
from kvcompile.passes.calling import GraphInput
from kvcompile.passes.graph.aten import RESHAPES, VIEW_OPS, aten, shape_of
from kvcompile.passes.graph.regions import is_region_call
from kvcompile.passes.rewrite.caches import is_mutated

MayBeAdjacent = Callable[[Sequence[int]], bool]
"""Whether the caller can keep the inputs at some positions adjacent."""

TILE = 128
"""Rows and columns of a tile of a product: the usual size of cuBLAS on Hopper."""

_ALIGNMENT = 16
"""Bytes. A vector load takes so many, so each weight, bias and result must begin at a multiple of it."""

_TRANSPOSES = ((aten.permute.default, ([1, 0],)), (aten.transpose.int, (0, 1)), (aten.t.default, ()))


@dataclass(frozen=True)
class _Projection:
    """A product ``x @ weight.T``, plus the bias if there is one.

    Attributes:
        product: the node.
        x: its activations [rows, in_features].
        weight: the parameter [out_features, in_features].
        bias: the parameter [out_features]; None if there is none.
        out_features: its columns.
    """

    product: Node
    x: Node
    weight: Node
    bias: Node | None
    out_features: int

    @property
    def reads(self) -> Any:
        """A key that is equal for projections of the same activations that can be one product."""
        origin = self.x
        while origin.target in RESHAPES:
            origin = origin.args[0]
        value = self.weight.meta["val"]
        return origin, tuple(map(str, shape_of(self.x))), value.dtype, value.device, self.bias is None


def merge_projections(
    gm: GraphModule, inputs: Sequence[GraphInput], may_be_adjacent: MayBeAdjacent
) -> dict[int, tuple[int, ...]]:
    """Merge the projections of ``gm`` that are too small to fill the device alone, in place.

    All projections of the same activations are merged, or none, so that graphs for other numbers of tokens ask for the
    same order in memory.

    Args:
        gm: the rewritten graph.
        inputs: the caller's record of each input.
        may_be_adjacent: whether the caller can keep some inputs adjacent.

    Returns:
        The inputs whose place a tensor with several parameters takes, each with the positions of these parameters in
        the order of memory.
    """
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    names = {
        node: known.source
        for node, known in zip(placeholders, inputs, strict=True)
        if known.is_parameter and not is_mutated(node)
    }
    of: dict[Node, list[Node]] = {}
    groups = []
    for group in _groups(gm.graph, names):
        operands = [[one.weight for one in group], [one.bias for one in group if one.bias is not None]]
        operands = [nodes for nodes in operands if nodes]
        agrees = all(of.get(node, nodes) == nodes for nodes in operands for node in nodes)
        places = [[placeholders.index(node) for node in nodes] for nodes in operands]
        if agrees and _leave_the_device_idle(group) and all(map(may_be_adjacent, places)):
            of |= {node: nodes for nodes in operands for node in nodes}
            groups.append(group)
    firsts = [node for node, nodes in of.items() if node is nodes[0]]
    for node in firsts:
        _widen(gm.graph, node, of[node])
    slices = [own for group in groups for own in _merge(gm.graph, group)]
    if groups:
        _update_views(gm.graph, slices)
        gm.graph.lint()
        gm.recompile()
    return {placeholders.index(node): tuple(map(placeholders.index, of[node])) for node in firsts}


def _groups(graph: Graph, names: Mapping[Node, str]) -> Iterator[list[_Projection]]:
    """The projections of the same activations, two or more, by the names of their weights.

    The order of inputs may differ between graphs of one model, and the order of names does not.
    """
    groups: dict[Any, dict[Node, _Projection]] = {}
    for node in graph.nodes:
        found = _projection(node, names)
        if found is not None:
            groups.setdefault(found.reads, {}).setdefault(found.weight, found)
    for group in groups.values():
        if len(group) > 1:
            yield sorted(group.values(), key=lambda one: names[one.weight])


def _projection(node: Node, parameters: Mapping[Node, str]) -> _Projection | None:
    if node.target is aten.mm.default:
        bias, (x, transposed) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:  # no factors
        bias, x, transposed = node.args
    else:
        return None
    if not any(transposed.target is op and transposed.args[1:] == dims for op, dims in _TRANSPOSES):
        return None
    weight: Node = transposed.args[0]
    operands = [weight] if bias is None else [weight, bias]
    if not all(operand in parameters and _is_aligned(operand.meta["val"]) for operand in operands):
        return None
    if bias is not None and bias.meta["val"].shape != weight.meta["val"].shape[:1]:
        return None  # one number for all columns
    return _Projection(node, x, weight, bias, weight.meta["val"].shape[0])


def _is_aligned(value: torch.Tensor) -> bool:
    """Whether a parameter fills its memory and has rows and columns of whole vector loads."""
    are_numbers = all(isinstance(size, int) for size in value.shape)
    return are_numbers and value.is_contiguous() and value.shape[0] * value.element_size() % _ALIGNMENT == 0


def _leave_the_device_idle(group: Sequence[_Projection]) -> bool:
    """Whether two or more of the products have fewer tiles than the device has multiprocessors."""
    rows = hint_of(group[0].x.meta["val"].shape[0])
    limit = _num_multiprocessors(group[0].weight.meta["val"].device)
    small = [one for one in group if ceil(rows / TILE) * ceil(one.out_features / TILE) < limit]
    return len(small) > 1


def _num_multiprocessors(device: torch.device) -> float:
    """The multiprocessors of a GPU. Other devices gain from fewer products, too, and have no such limit."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else float("inf")


def _widen(graph: Graph, first: Node, parameters: Sequence[Node]) -> None:
    """Let the input ``first`` hold all ``parameters``; it is the first one, and its users get a slice."""
    values = [node.meta["val"] for node in parameters]
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        own = graph.call_function(aten.slice.Tensor, (first, 0, 0, values[0].shape[0]))
    own.meta = dict(first.meta)
    first.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    first.meta = {**first.meta, "val": torch.cat(values)}
    first.meta.pop("tensor_meta", None)


def _merge(graph: Graph, group: Sequence[_Projection]) -> list[Node]:
    """Compute the first product of ``group`` with all columns; each product becomes a slice of the result.

    Returns:
        The slices that take the place of products, with other strides. A region gets a copy in place of a slice.
    """
    first = min(group, key=lambda one: one.product)  # nodes are ordered as in the graph
    ends = list(accumulate(one.out_features for one in group))

    def call(op: Any, *args: Any, **kwargs: Any) -> Node:
        node: Node = graph.call_function(op, args, kwargs)
        node.meta = {**first.product.meta, "val": op(*map_arg(args, lambda arg: arg.meta["val"]), **kwargs)}
        return node

    with graph.inserting_before(first.product):
        transposed = call(aten.permute.default, group[0].weight, [1, 0])
        if group[0].bias is None:
            whole = call(aten.mm.default, first.x, transposed)
        else:
            whole = call(aten.addmm.default, group[0].bias, first.x, transposed)
        slices = [
            call(aten.slice.Tensor, whole, 1, end - one.out_features, end) for one, end in zip(group, ends, strict=True)
        ]
        results = [
            call(aten.clone.default, own, memory_format=torch.contiguous_format)
            if _is_read_by_region(one.product)
            else own
            for one, own in zip(group, slices, strict=True)
        ]
    for one, own in zip(group, results, strict=True):
        own.meta = {**one.product.meta, "val": own.meta["val"]}
        one.product.replace_all_uses_with(own)
        graph.erase_node(one.product)
    return [own for own in results if own in slices]


def _is_read_by_region(node: Node) -> bool:
    """Whether a region reads ``node`` or a view of it. All calls of a region take tensors of the same strides."""
    views = [node]
    for view in views:  # grows
        if any(map(is_region_call, view.users)):
            return True
        views += (user for user in view.users if user.target in VIEW_OPS)
    return False


def _update_views(graph: Graph, changed: Sequence[Node]) -> None:
    """Give views of ``changed`` nodes their new strides.

    Operators take tensors with the strides of the graph, so Inductor would copy slices to the old strides.
    """
    stale = set(changed)
    for node in graph.nodes:
        if node.target in VIEW_OPS and not stale.isdisjoint(node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
            if node.target is aten.view.default:  # strides may allow no view of a slice
                node.target = aten.reshape.default
            node.meta["val"] = node.target(*args, **kwargs)
            stale.add(node)
