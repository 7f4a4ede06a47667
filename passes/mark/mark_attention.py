"""Put an opaque marker op in the place of every attention in Dynamo's graph.

Attention is a call of ``F.scaled_dot_product_attention`` or ``flex_attention``
(:mod:`kvcompile.passes.mark.read_flex`), or it is written out in matrix products and a softmax
(:mod:`kvcompile.passes.mark.match`). Attention that cannot be computed on packed caches gets a marker with the reason.
:mod:`kvcompile.passes.marker` defines markers. Attention under ``torch.vmap`` gets no marker, because a marker has no
rule for the dimension that ``vmap`` hides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import flex_attention, scaled_dot_product_attention
from kvcompile.compat.tensors import is_transformed
from kvcompile.passes.graph.modules import module_name
from kvcompile.passes.mark.calls import value_of
from kvcompile.passes.mark.match import match_attention
from kvcompile.passes.mark.products import num_heads_in, repeats_heads
from kvcompile.passes.mark.read_flex import write_flex_marker
from kvcompile.passes.mark.values import WrittenAttention
from kvcompile.passes.mark.write_marker import write_marker
from kvcompile.passes.mark.writer import GraphWriter, insert_in_place_of
from kvcompile.passes.marker import Marker, is_marker

_SDPA = (
    F.scaled_dot_product_attention,
    scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
_PARAMETERS = ("query", "key", "value", "mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def mark_attention(gm: GraphModule) -> int:
    """Mark attention in place; returns the number of markers."""
    graph = gm.graph
    written = {attention.output: attention for attention in match_attention(graph)}
    count = 0
    for node in list(graph.nodes):
        writer = _writer(node, written)
        if writer is not None:
            insert_in_place_of(node, writer)
            count += 1
    if count:
        graph.lint()
        gm.recompile()
    return count


def _writer(node: Node, written: dict[Node, WrittenAttention]) -> Callable[[GraphWriter], Node] | None:
    """The function that inserts the marker of the attention with output ``node``; None if it is not such an output."""
    value = value_of(node)
    if isinstance(value, Tensor) and is_transformed(value):
        return None
    if node in written:
        return lambda writer: write_marker(writer, written[node], module_name(node))
    if is_attention(node):
        return lambda writer: _write_sdpa(writer, _read_sdpa(writer, node))
    if _is_flex(node):
        return lambda writer: write_flex_marker(writer, node, module_name(node.args[0]))
    return None


def is_attention(node: Node) -> bool:
    """Whether ``node`` calls ``F.scaled_dot_product_attention``, under any of its names, and has no marker yet."""
    is_call = node.op == "call_function" and node.target in _SDPA
    return is_call and not any(is_marker(user) for user in node.users)


def _is_flex(node: Node) -> bool:
    """Whether ``node`` is the output of ``flex_attention``: the first result of a higher-order operator."""
    source = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    return isinstance(source, Node) and source.target is flex_attention


def _read_sdpa(writer: GraphWriter, node: Node) -> Marker:
    arguments = dict(zip(_PARAMETERS, node.args, strict=False)) | dict(node.kwargs)
    if "attn_mask" in arguments:
        arguments["mask"] = arguments.pop("attn_mask")
    if value_of(arguments["query"]).dtype != value_of(node).dtype:  # autocast casts the operands of the call
        arguments["query"] = writer.call("to", arguments["query"], value_of(node).dtype)
    return Marker(node, **arguments, module=module_name(node))


def _write_sdpa(writer: GraphWriter, marker: Marker) -> Node:
    """Insert ``marker``; returns its output.

    Attention of three dimensions holds batch * heads in the first, and a view nearby may tell the number of heads. If
    none does, attention has a single head in every batch. It has a single batch with ``enable_gqa``, or if its keys are
    repeated. Attention is the same computation for every batch and head: a division that differs from the model's can
    only fail to fit the views of the cache.
    """
    operands = {"original": marker.original, "query": marker.query, "key": marker.key, "value": marker.value}
    if any(value_of(node).dim() != 3 for node in operands.values()):
        return writer.insert(marker)
    if marker.mask is not None and value_of(marker.mask).dim() == 3:
        operands["mask"] = marker.mask
    size = value_of(marker.query).shape[0]
    num_heads = None if marker.enable_gqa else num_heads_in(size, marker.original, (marker.key, marker.query))
    if num_heads is not None:
        divided = {name: _divide(writer, node, num_heads) for name, node in operands.items()}
        return writer.call("flatten", writer.insert(replace(marker, **divided)), 0, 1)
    one_batch = marker.enable_gqa or (isinstance(size, int) and repeats_heads(marker.key))
    missing = 0 if one_batch else 1
    widened = {name: writer.call("unsqueeze", node, missing) for name, node in operands.items()}
    return writer.call("squeeze", writer.insert(replace(marker, **widened)), missing)


def _divide(writer: GraphWriter, node: Node, num_heads: int) -> Node:
    """``node`` with its first dimension, of size 1 or batch * heads, divided into two."""
    if statically_known_true(value_of(node).shape[0] == 1):
        return writer.call("unsqueeze", node, 0)
    return writer.call("unflatten", node, 0, (-1, num_heads))
