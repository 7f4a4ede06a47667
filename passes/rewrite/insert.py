"""Insert store, gather and attention on packed caches into a graph, in the form that suits the device.

On CUDA they are the ops ``kvcompile::store``, ``gather`` and ``attention``, which run Triton kernels. Elsewhere their
plain-PyTorch specification is traced into the graph, and Inductor generates the code. Layers share the parts that take
long to compile, attention and the encoding of tokens, as regions (:mod:`kvcompile.passes.graph.regions`). A store of
many tokens to a cache with a residual is the op on every device. It changes whole blocks that are known only at run
time, and traced code would have to go through the whole cache.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.compat.operators import auto_functionalized_v2
from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.layout.axes import in_order
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import attend, attend_part
from kvcompile.kernels.spec.gather import gather_tokens
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.spec.packing import (
    encoded_tokens,
    few_tokens,
    move_tokens,
    put_tokens,
    read_tokens,
    to_cache_dtype,
    write_tokens,
)
from kvcompile.kernels.spec.residual import is_few
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import inline, insert_call, size_node
from kvcompile.passes.graph.regions import insert_region
from kvcompile.passes.marker import Marker


def insert_store(
    graph: Graph,
    data: Node,
    layout: PackedLayout,
    x: Node,
    positions: Node,
    valid: Node | None,
    first_sequence: Node | int | None = None,
) -> Node:
    """Insert a store at the graph's insertion point; returns the packed data after it.

    The store is functional: it does not change ``data``. If the result is copied back into a graph input, Inductor's
    reinplacing pass (or its scatter lowering, on a CPU) stores in place.

    Args:
        graph: the graph.
        data: packed data.
        layout: layout of ``data``.
        x: new tokens [batch of x, num_kv_heads, n, head_dim], of all or of neighbouring sequences.
        positions: positions of the tokens, int64 [n] or [batch of x, n].
        valid: which tokens are written, bool of the shape of ``positions``; None for all.
        first_sequence: the first of the neighbouring sequences; None if ``x`` is of all sequences.
    """
    if not _uses_kernels(data) and (layout.residual is None or is_few(x.meta["val"])):
        return _insert_traced_store(graph, data, layout, x, positions, valid, first_sequence)
    # auto_functionalized_v2 returns (op result, new value of every base): one base here, the packed data.
    call = graph.call_function(
        auto_functionalized_v2,
        (torch.ops.kvcompile.store.default,),
        {
            "x": x,
            "positions": positions,
            "valid": valid,
            "format": layout.spec,
            "role": layout.role,
            "_data_base_index": 0,
            **_view_of(graph, x, first_sequence),
            "_all_bases": [data],
        },
    )
    call.meta["val"] = (None, data.meta["val"])
    result = graph.call_function(operator.getitem, (call, 1))
    result.meta["val"] = data.meta["val"]
    return result


def _insert_traced_store(
    graph: Graph,
    data: Node,
    layout: PackedLayout,
    x: Node,
    positions: Node,
    valid: Node | None,
    first_sequence: Node | int | None,
) -> Node:
    """The operations of ``write_tokens``. A region computes the bytes, so that layers share its code.

    The scatter stays outside of the region: Inductor then stores in place.
    """
    if layout.residual is None:
        encoded = insert_region(graph, "encoded", encoded_tokens, layout, x)
        return inline(graph, put_tokens, data, layout, encoded, positions, valid, first_sequence)
    if not shape_of(x)[2]:
        return inline(graph, write_tokens, data, layout, x, positions, valid, first_sequence)
    *index, values = insert_region(graph, "changes", few_tokens, data, layout, x, positions, valid, first_sequence)
    return insert_call(graph, torch.ops.aten.index_put.default, data, index, values)


def _view_of(graph: Graph, x: Node, first_sequence: Node | int | None) -> dict[str, Any]:
    """The arguments that tell ``auto_functionalized_v2`` to pass a slice of its base: the sequences of ``x``."""
    if first_sequence is None:
        return {}
    first = first_sequence.meta["val"] if isinstance(first_sequence, Node) else first_sequence
    end = size_node(graph, first + shape_of(x)[0])
    return {"_data_slice_dim": 1, "_data_slice_start": first_sequence, "_data_slice_end": end}


def insert_gather(graph: Graph, data: Node, layout: PackedLayout, slots: Node) -> Node:
    """Insert the packed data of a pool's tokens at ``slots``, int64 [batch, n]; nodes go to the insertion point."""
    if _uses_kernels(data):
        op = torch.ops.kvcompile.gather.default
        return insert_call(graph, op, data, slots, layout.spec, layout.role, layout.head_dim)
    gathered: Node = inline(graph, lambda data, slots: gather_tokens(data, layout, slots), data, slots)
    return gathered


def insert_dequantize(
    graph: Graph, data: Node, layout: PackedLayout, num_tokens: Any, dtype: torch.dtype, axes: str
) -> Node:
    """Insert the first ``num_tokens`` tokens of packed data as vectors in ``dtype``, at the graph's insertion point.

    The result is contiguous, with its dimensions in the order of ``axes``.
    """
    if _uses_kernels(data):
        op = torch.ops.kvcompile.dequantize.default
        x = insert_call(graph, op, data, num_tokens, dtype, layout.spec, layout.role, layout.head_dim)
        ordered: Node = inline(graph, lambda x: in_order(x, axes).contiguous(), x)
        return ordered

    def tokens(data: Tensor, num_tokens: int) -> Tensor:
        return in_order(to_cache_dtype(read_tokens(data, layout, num_tokens), dtype), axes).contiguous()

    read: Node = inline(graph, tokens, data, num_tokens)
    return read


def insert_reorder(graph: Graph, data: Node, sequences: Node) -> Node:
    """Insert the packed data whose sequence ``i`` is ``sequences[i]``, at the graph's insertion point.

    It is an operator on every device. If a graph stores into an input and then copies an index of the result back into
    that input, Inductor stores in place, and computes the index and the copy in one loop. The loop would read bytes
    that it has overwritten.
    """
    return insert_call(graph, torch.ops.kvcompile.reorder.default, data, sequences)


def insert_move(graph: Graph, data: Node, layout: PackedLayout, source: Node) -> Node:
    """Insert the packed data whose token ``i`` is ``source[i]``, at the graph's insertion point.

    After a store it is an operator, for the reason in :func:`insert_reorder`. Inductor completes reads of an input
    before its first change.
    """
    if data.op == "placeholder":
        moved: Node = inline(graph, move_tokens, data, layout, source)
        return moved
    return insert_call(graph, torch.ops.kvcompile.move.default, data, source, layout.spec, layout.role, layout.head_dim)


NewNodes = tuple[Node, Node] | None
"""The nodes of :class:`~kvcompile.kernels.spec.new_tokens.NewTokens`."""

FactorNodes = tuple[Node, Node] | None
"""The nodes of :class:`~kvcompile.kernels.spec.key_factors.KeyFactors`."""


def insert_attention(
    graph: Graph,
    marker: Marker,
    k_data: Node,
    v_data: Node,
    key: PackedLayout,
    value: PackedLayout,
    kv_len: Any,
    new_keys: NewNodes = None,
    new_values: NewNodes = None,
    key_factors: FactorNodes = None,
) -> Node:
    """Insert the attention of ``marker`` on packed data at the graph's insertion point; returns its output.

    ``new_keys`` and ``new_values`` are tokens that the graph has written, which attention reads in full precision. They
    are the same if one cache serves as keys and values. ``key_factors`` are the factors of pre-RoPE keys.
    """
    op, new = torch.ops.kvcompile.attention.default, (new_keys, new_values)
    out: Node = _insert_attention(graph, marker, k_data, v_data, key, value, kv_len, op, attend, new, key_factors)
    return out


def insert_attention_part(
    graph: Graph, marker: Marker, k_data: Node, v_data: Node, key: PackedLayout, value: PackedLayout, kv_len: Any
) -> tuple[Node, Node]:
    """Insert attention to a part of the tokens, as :func:`insert_attention` does; returns output and log-sum-exp."""
    op = torch.ops.kvcompile.attention_part.default
    result = _insert_attention(graph, marker, k_data, v_data, key, value, kv_len, op, attend_part)
    if isinstance(result, tuple):
        return result
    out, lse = (insert_call(graph, operator.getitem, result, index) for index in range(2))
    return out, lse


def _insert_attention(
    graph: Graph,
    marker: Marker,
    k_data: Node,
    v_data: Node,
    key: PackedLayout,
    value: PackedLayout,
    kv_len: Any,
    op: Any,
    spec: Callable[..., Any],
    new: tuple[NewNodes, NewNodes] = (None, None),
    key_factors: FactorNodes = None,
) -> Any:
    """Insert the operator ``op`` on a GPU, and the operations of ``spec`` elsewhere."""
    scale = marker.scale if marker.scale is not None else key.head_dim**-0.5
    if not _uses_kernels(k_data):
        return insert_region(
            graph, "attention", _computed,
            spec, marker.query, k_data, v_data, key, value, marker.mask, marker.sinks, kv_len, marker.is_causal, scale,
            marker.softcap, *_arguments_of(*new, key_factors),
        )  # fmt: skip
    ranges = None
    if marker.mask is not None and marker.mask.meta["val"].dtype == torch.bool:
        ranges = _visible_range(graph, marker.mask, size_node(graph, shape_of(marker.query)[2]), kv_len)
    own_v_data, own_new = (None, (new[0], None)) if v_data is k_data else (v_data, new)
    return insert_call(
        graph, op,
        marker.query, k_data, own_v_data, marker.mask, marker.sinks, kv_len, marker.is_causal, scale, marker.softcap,
        key.spec, value.spec, value.head_dim, ranges, *_arguments_of(*own_new, key_factors),
    )  # fmt: skip


def _arguments_of(new_keys: NewNodes, new_values: NewNodes, key_factors: FactorNodes) -> tuple[Node | None, ...]:
    """The last arguments of ``kvcompile::attention``: new keys and values with their slots, the key factors."""
    given: tuple[tuple[Node, Node] | None, ...] = (new_keys, new_values, key_factors)
    while given and given[-1] is None:
        given = given[:-1]
    return tuple(node for pair in given for node in pair or (None, None))


def _computed(
    spec: Callable[..., Any],
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    key: PackedLayout,
    value: PackedLayout,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: Any,
    is_causal: bool,
    scale: float,
    softcap: float,
    new_keys: Tensor | None = None,
    new_key_slots: Tensor | None = None,
    new_values: Tensor | None = None,
    new_value_slots: Tensor | None = None,
    paired_query: Tensor | None = None,
    key_factors: Tensor | None = None,
) -> Any:
    """Call ``spec`` with positional arguments only, because :func:`inline` takes no others."""
    new: dict[str, Any] = {}
    if paired_query is not None and key_factors is not None:
        new["key_factors"] = KeyFactors(paired_query, key_factors)
    if new_keys is not None and new_key_slots is not None:
        new["new_keys"] = NewTokens(new_keys, new_key_slots)
    if new_values is not None and new_value_slots is not None:
        new["new_values"] = NewTokens(new_values, new_value_slots)
    return spec(
        query, k_data, v_data, key, value,
        mask=mask, sinks=sinks, kv_len=kv_len, is_causal=is_causal, scale=scale, softcap=softcap, **new,
    )  # fmt: skip


def _visible_range(graph: Graph, mask: Node, q_len: Any, kv_len: Any) -> Node:
    """The range of keys that ``mask`` shows. All layers with the same mask share one node."""
    op, args = torch.ops.kvcompile.visible_range.default, (mask, q_len, kv_len)
    known = next((user for user in mask.users if user.target is op and user.args == args), None)
    return known if known is not None else insert_call(graph, op, *args)


def _uses_kernels(data: Node) -> bool:
    return data.meta["val"].device.type == "cuda"
