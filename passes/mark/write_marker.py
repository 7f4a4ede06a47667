"""Describe written-out attention by a marker, with operands in the shapes that a marker takes."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.mark.axes import Dims, Layout, Rearrangement, Step, names_of, rearrange
from kvcompile.passes.mark.calls import value_of
from kvcompile.passes.mark.hidden_rows import may_hide_rows
from kvcompile.passes.mark.products import CONTRACTED
from kvcompile.passes.mark.read_attention import CHANNELS
from kvcompile.passes.mark.read_scores import NEVER_SEEN
from kvcompile.passes.mark.values import Add, Multiply, NotUnderstood, Operand, Scores, WrittenAttention
from kvcompile.passes.mark.write_mask import write_mask
from kvcompile.passes.mark.writer import GraphWriter
from kvcompile.passes.marker import Marker

FORM = "written out"


def write_marker(writer: GraphWriter, attention: WrittenAttention, module: str) -> Node:
    """Insert a marker of ``attention``; returns the node that stands for its output."""
    try:
        return _understood(writer, attention, module)
    except NotUnderstood as reason:
        writer.undo()
        return _not_understood(writer, attention, module, attention.unsupported or str(reason))


def _rearrangement(layout: Layout, dims: Dims) -> Rearrangement:
    result = rearrange(layout, dims)
    if result is None:
        raise NotUnderstood("the dimensions of its tensors do not form batch, heads, tokens and channels")
    return result


def _view(writer: GraphWriter, node: Node, steps: tuple[Step, ...]) -> Node:
    for step in steps:
        node = writer.call(step.method, node, *step.args)
    return node


def _arrange(writer: GraphWriter, node: Node, layout: Layout, dims: Dims) -> Node:
    """A view of ``node`` with the dimensions ``dims``; raises NotUnderstood if no view has them."""
    return _view(writer, node, _rearrangement(layout, dims).steps)


def _understood(writer: GraphWriter, attention: WrittenAttention, module: str) -> Node:
    weights = attention.weights
    if weights is None:
        raise NotUnderstood("its scores or weights are not understood")
    scores, (batch, heads, rows, _) = weights.scores, attention.dims
    sink_counts = scores.sink is not None and not scores.nan_if_hidden and not weights.is_scaled
    may_be_nan = not sink_counts and not weights.hidden_rows_are_zero
    hidden_rows_are_nan = may_be_nan and may_hide_rows(scores.bias)
    scores, sinks = _sinks(writer, scores, attention)
    output = _rearrangement(attention.output_layout, (batch, heads, rows, (CHANNELS,)))
    marker = Marker(
        original=_view(writer, attention.output, output.steps),
        query=_query(writer, attention, scores),
        key=_key(writer, attention),
        value=_keys_or_values(writer, attention.value.node, attention.value.layout, attention, CHANNELS),
        mask=write_mask(
            writer,
            scores.bias,
            place=lambda operand: _beside_scores(writer, operand, attention),
            multiply=lambda x, factor: _apply(writer, x, factor, attention),
        ),
        sinks=sinks,
        dropout_p=weights.dropout_p,
        scale=scores.scale * attention.key.factor * (scores.cap or 1.0),
        softcap=scores.cap,
        enable_gqa=True,
        module=module,
        form=FORM,
        unsupported=attention.unsupported,
        hidden_rows_are_nan=hidden_rows_are_nan,
    )
    return _view(writer, writer.insert(marker), output.back)


def _not_understood(writer: GraphWriter, attention: WrittenAttention, module: str, reason: str) -> Node:
    """Insert a marker with ``reason``, and with the known operands."""
    key = attention.key.node
    try:
        key = _key(writer, attention)
    except NotUnderstood:
        writer.undo()
    marker = Marker(
        original=attention.output,
        query=attention.query.node,
        key=key,
        value=attention.value.node,
        module=module,
        form=FORM,
        unsupported=reason,
    )
    return writer.insert(marker)


def _query(writer: GraphWriter, attention: WrittenAttention, scores: Scores) -> Node:
    batch, heads, rows, _ = attention.dims
    node, layout = attention.query.node, attention.product.layouts[1 - attention.key_side]
    own = set(names_of(attention.product.out)) - set(attention.dims[3])
    if not own <= set(names_of(layout)):
        raise NotUnderstood("its query is broadcast to more batches or heads")
    products, output = value_of(attention.product.node).dtype, value_of(attention.output).dtype
    if value_of(node).dtype not in (products, output):  # autocast narrows the operands of products
        node = writer.call("to", node, products)
    query = _arrange(writer, node, layout, (batch, heads, rows, (CONTRACTED,)))
    for factor in scores.factors:
        query = _apply(writer, query, factor, attention)
    return query


def _apply(writer: GraphWriter, x: Node, factor: Multiply, attention: WrittenAttention) -> Node:
    operand = factor.operand
    if set(names_of(operand.layout)) & set(attention.dims[3]):
        raise NotUnderstood(
            "its scores are scaled by a tensor that varies along the keys; a mask of numbers must be made of bools, as "
            "in scores * b - 1e10 * (1 - b) with b = mask.to(scores.dtype)"
        )
    node = operand.node
    if operand.layout:
        node = _arrange(writer, node, operand.layout, attention.dims)
    return writer.call(torch.div if factor.divide else torch.mul, x, node)


def _key(writer: GraphWriter, attention: WrittenAttention) -> Node:
    node = attention.key.node
    for view in attention.key.views:
        replaced = {view.args[0]: node}
        node = writer.adopt(writer.graph.node_copy(view, lambda arg, replaced=replaced: replaced.get(arg, arg)))
    return _keys_or_values(writer, node, attention.product.layouts[attention.key_side], attention, CONTRACTED)


def _keys_or_values(
    writer: GraphWriter, node: Node, layout: Layout, attention: WrittenAttention, channels: str
) -> Node:
    """Keys or values as [batch, num_kv_heads, kv_len, channels].

    The query heads of a KV head have to be neighbours: the head axes that the tensor lacks come last.
    """
    batch, heads, _, keys = attention.dims
    lacks = [name not in names_of(layout) for name in heads if name in names_of(attention.product.out)]
    if lacks != sorted(lacks):
        raise NotUnderstood("the query heads that share a KV head are not neighbours")
    return _arrange(writer, node, layout, (batch, heads, keys, (channels,)))


def _beside_scores(writer: GraphWriter, operand: Operand, attention: WrittenAttention) -> Node:
    """A tensor that broadcasts against the scores, viewed so that it broadcasts to [batch, heads, q_len, kv_len]."""
    heads = [name for name in attention.dims[1] if name in names_of(attention.product.out)]
    has = [name in names_of(operand.layout) for name in heads]
    if any(has) and not all(has):
        raise NotUnderstood("its mask or bias is broadcast over some of several head dimensions")
    return _arrange(writer, operand.node, operand.layout, attention.dims)


def _sinks(writer: GraphWriter, scores: Scores, attention: WrittenAttention) -> tuple[Scores, Node | None]:
    """The scores and the sinks that a marker takes. The sinks are [num_heads] logits.

    A softmax does not change if one number is subtracted from a row of scores and from its sink. Sinks that differ
    between rows or sequences are subtracted in this way, and become zeros. Sinks without elements are dropped: the
    scores then have no rows, and the output is empty.
    """
    sink = scores.sink
    is_tensor = sink is not None and isinstance(sink.node, Node)
    if sink is None or (is_tensor and statically_known_true(value_of(sink.node).numel() == 0)):
        return scores, None
    batch, heads, rows, _ = attention.dims
    num_heads = math.prod(axis.size for dim in attention.product.out for axis in dim if axis.name in heads)
    if not isinstance(num_heads, int):
        raise NotUnderstood("its sinks are for an unknown number of heads")
    if not is_tensor:
        return scores, _logits(writer, num_heads, sink.node)
    for axes, stride in zip(sink.layout, value_of(sink.node).stride(), strict=True):
        if any(axis.name in (*batch, *rows) for axis in axes) and not statically_known_true(stride == 0):
            return _without_sinks_of_rows(writer, scores, sink), _logits(writer, num_heads, 0.0)
    node = _beside_scores(writer, sink, attention)
    for dim in (3, 2, 0):
        node = writer.call("select", node, dim, 0)
    if statically_known_true(value_of(node).shape[0] == num_heads):
        return scores, node
    return scores, writer.call("expand", node, num_heads)


def _without_sinks_of_rows(writer: GraphWriter, scores: Scores, sink: Operand) -> Scores:
    """The scores minus their sinks. A sink below every score has no weight; it is not subtracted in full."""
    lowest = writer.call("clamp", sink.node, min=NEVER_SEEN)
    return replace(scores, bias=(*scores.bias, Add(replace(sink, node=lowest), -1.0)))


def _logits(writer: GraphWriter, num_heads: int, logit: float) -> Node:
    return writer.call(torch.full, (num_heads,), logit, dtype=torch.float32, device=value_of(writer.like).device)
