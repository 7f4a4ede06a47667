"""Describe ``flex_attention`` by a marker.

Its ``score_mod`` is read like written-out operations on scores (:mod:`kvcompile.passes.mark.read_scores`): a scale, a
softcap, biases and masks. Its block mask becomes a bool mask. In partial blocks, this is ``mask_mod`` of all queries
and keys; full blocks are visible as a whole.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from kvcompile.passes.mark.calls import called, mutated_by, read_call, value_of
from kvcompile.passes.mark.products import Product
from kvcompile.passes.mark.read_attention import read
from kvcompile.passes.mark.read_scalars import AllScores, output_of
from kvcompile.passes.mark.read_scores import Context, check_masks
from kvcompile.passes.mark.values import Fill, Multiply, NotUnderstood, Operand, Scores, Value
from kvcompile.passes.mark.write_mask import write_mask
from kvcompile.passes.mark.writer import GraphWriter
from kvcompile.passes.marker import Marker

FORM = "flex_attention"

_ALL_IN_ONE_BLOCK = 1 << 30
"""The block size that PyTorch gives to attention without a block mask."""


@dataclass(frozen=True)
class _BlockMask:
    """The block mask of a call: for each block of queries, the key blocks that it sees in part and in full.

    Attributes:
        partial: the key blocks that are visible in part: their number, int32 [batch, num_heads, q_blocks], and their
            indices, int32 [batch, num_heads, q_blocks, kv_blocks]; further indices are padding. Batch and num_heads
            may be 1.
        full: the key blocks that are visible in full, in the same form; None if there are no such blocks.
        block_size: number of queries and number of keys of a block.
        mask_mod: the function that says which keys of partial blocks are visible.
        captured: the tensors that ``mask_mod`` captures.
    """

    partial: tuple[Node, Node]
    full: tuple[Node, Node] | None
    block_size: tuple[int, int]
    mask_mod: GraphModule
    captured: tuple[Node, ...]


def write_flex_marker(writer: GraphWriter, node: Node, module: str) -> Node:
    """Insert a marker of the ``flex_attention`` whose output is ``node``; returns the node that stands for it."""
    query, key, value, *_ = node.args[0].args
    try:
        marker = _understood(writer, node)
    except NotUnderstood as reason:
        writer.undo()
        marker = Marker(node, query, key, value, unsupported=f"flex_attention: {reason}")
    return writer.insert(replace(marker, module=module, form=FORM))


def _understood(writer: GraphWriter, node: Node) -> Marker:
    call = node.args[0]
    query, key, value, score_mod, block_mask, scale, _, *captured = call.args
    if any(user is not node and _matters(user) for user in call.users):
        raise NotUnderstood("the log-sum-exp or maximum of its scores is also used")
    if not statically_known_true(value_of(query).shape[0] == value_of(key).shape[0]):
        raise NotUnderstood("its keys are broadcast to more sequences")
    owner = writer.graph.owning_module
    indices = _indices(writer, query, key)
    mask = _BlockMask(
        block_mask[2:4],
        None if block_mask[4] is None else block_mask[4:6],
        block_mask[-3:-1],
        getattr(owner, block_mask[-1].target),
        captured[1],
    )
    scale = _number(scale)
    function = getattr(owner, score_mod.target)
    scores = _read_score_mod(function, Scores(_product_of_one_score(node, query, key), frozenset(), (), 0, scale=scale))
    of_all_scores = AllScores(writer, dict(zip(_placeholders(function)[1:], (*indices, *captured[0]), strict=True)))

    def place(operand: Operand) -> Node:
        if operand.node.graph is writer.graph:
            return operand.node
        placed: Node = of_all_scores.four_dimensional(operand.node)
        return placed

    def multiply(x: Node, factor: Multiply) -> Node:
        by = place(factor.operand)
        value = value_of(by)
        if isinstance(value, Tensor) and not statically_known_true(value.shape[3] == 1):
            raise NotUnderstood("its scores are scaled by a tensor that varies along the keys")
        return writer.call(torch.div if factor.divide else torch.mul, x, by)

    for factor in scores.factors:
        query = multiply(query, factor)
    visible = _visible(writer, mask, key, indices)
    steps = scores.bias if visible is None else (*scores.bias, Fill(Operand(visible, (), 0), False, -torch.inf))
    return Marker(
        node,
        query,
        key,
        value,
        mask=write_mask(writer, steps, place=place, multiply=multiply),
        scale=scores.scale * (scores.cap or 1.0),
        softcap=scores.cap,
        enable_gqa=True,
    )


def _number(scale: float | Node) -> float:
    """The number of a scale. It may be symbolic under ``dynamic=True``, because head_dim is.

    The graph is then guarded on its value: head_dim is a constant of a model.
    """
    value = value_of(scale) if isinstance(scale, Node) else scale
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or free_unbacked_symbols(value):
        raise NotUnderstood("its scale is not a number that is known when it is compiled")
    return float(value)


def _matters(node: Node) -> bool:
    return node.op == "output" or bool(mutated_by(node)) or any(map(_matters, node.users))


def _indices(writer: GraphWriter, query: Node, key: Node) -> list[Node]:
    """The indices of all scores, int32: sequences, heads, queries and keys, each along its own dimension."""
    device = value_of(query).device
    indices = []
    for dim, (tensor, of_tensor) in enumerate(((query, 0), (query, 1), (query, 2), (key, 2))):
        index = writer.call(torch.arange, writer.call("size", tensor, of_tensor), dtype=torch.int32, device=device)
        shape = [1, 1, 1, 1]
        shape[dim] = -1
        indices.append(writer.call("view", index, shape))
    return indices


def _placeholders(function: GraphModule) -> list[Node]:
    return list(function.graph.find_nodes(op="placeholder"))


def _product_of_one_score(node: Node, query: Node, key: Node) -> Product:
    """The product of a query and a key: a number."""
    return Product(node, (query, key), ((), ()), (), (), ((), ()))


def _read_score_mod(function: GraphModule, scores: Scores) -> Scores:
    """The scores after ``score_mod``. Their operands are nodes of the function."""
    values: dict[Node, Value] = {_placeholders(function)[0]: scores}
    context = Context(values, 0, is_changed=lambda node: False)
    for node in function.graph.nodes:
        if node.op == "output" or values.keys().isdisjoint(node.all_input_nodes):
            continue
        call = read_call(node)
        if call is None or mutated_by(node):
            raise NotUnderstood(f"{called(node)} is applied to its scores")
        value = read(call, context)
        if not isinstance(value, Scores):
            raise NotUnderstood(f"{call.name} is applied to its scores")
        values[node] = value
    result = values.get(output_of(function))
    if not isinstance(result, Scores):
        raise NotUnderstood("its scores do not depend on query and key")
    check_masks(result)
    return result


def _visible(writer: GraphWriter, mask: _BlockMask, key: Node, indices: list[Node]) -> Node | None:
    """Which keys are visible, bool, broadcastable to [batch, num_heads, q_len, kv_len]; None if all are."""
    result = output_of(mask.mask_mod)
    call = read_call(result) if isinstance(result, Node) else None
    shows_all = call is not None and call.name == "new_ones"
    has_one_block = all(size >= _ALL_IN_ONE_BLOCK for size in mask.block_size)
    if shows_all and has_one_block:
        return None
    of_all_scores = AllScores(writer, dict(zip(_placeholders(mask.mask_mod), (*indices, *mask.captured), strict=True)))
    visible = of_all_scores.four_dimensional(result)
    if not isinstance(value_of(visible), Tensor) or value_of(visible).dtype is not torch.bool:
        raise NotUnderstood("its mask_mod does not return a bool tensor")
    if has_one_block:
        return visible
    visible = writer.call(torch.logical_and, visible, _in_blocks(writer, mask.partial, mask.block_size, key, indices))
    if mask.full is not None:
        visible = writer.call(torch.logical_or, visible, _in_blocks(writer, mask.full, mask.block_size, key, indices))
    return visible


def _in_blocks(
    writer: GraphWriter, blocks: tuple[Node, Node], block_size: tuple[int, int], key: Node, indices: list[Node]
) -> Node:
    """Which keys are in the blocks that their queries see, bool [batch or 1, num_heads or 1, q_len, kv_len]."""
    count, index = blocks
    past_the_end = writer.call(operator.add, writer.call("size", key, 2), block_size[1] - 1)
    num_blocks = writer.call(operator.floordiv, past_the_end, block_size[1])
    column = writer.call(torch.arange, writer.call("size", index, 3), dtype=torch.int32, device=value_of(index).device)
    is_seen = writer.call(torch.lt, column, writer.call("unsqueeze", count, -1))
    # Padding goes to an extra column behind the last block.
    target = writer.call("to", writer.call(torch.where, is_seen, index, num_blocks), torch.int64)
    shape = [*(writer.call("size", index, dim) for dim in range(3)), writer.call(operator.add, num_blocks, 1)]
    seen = writer.call("scatter", writer.call("new_zeros", index, shape, dtype=torch.bool), -1, target, True)
    for dim, position, size in ((2, indices[2], block_size[0]), (3, indices[3], block_size[1])):
        of_position = writer.call("flatten", writer.call(operator.floordiv, position, size))
        seen = writer.call("index_select", seen, dim, of_position)
    return seen
