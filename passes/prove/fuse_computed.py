"""Choose how attention on computed keys reads its caches.

There are three ways. The pass takes the first one that the formats, the device and the query allow:

1. Attention reads packed pre-RoPE keys and applies RoPE itself, if RoPE is proven
   (:mod:`kvcompile.passes.prove.key_factors`). The values are packed.
2. The graph dequantizes the key cache and computes the keys. Attention reads them and packed values.
3. The graph dequantizes both caches. Attention is the operator that the model called.

For many queries, dequantizing a cache once costs less than reading packed tokens for every tile of queries.
"""

from __future__ import annotations

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.calibrated import refusal
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import MAX_DECODE_ROWS
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.marker import Marker
from kvcompile.passes.prove.cache import Attention, ComputedAttention
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.prove.key_factors import can_apply_rope

ROPE_NOTE = "pre-RoPE keys"
"""The words of the report for attention that applies RoPE to packed keys."""


def fuse_computed_keys(candidate: Candidate) -> None:
    """Let attention on computed keys read packed data, if its formats, its device and its query allow it."""
    computed = candidate.attention
    if not isinstance(computed, ComputedAttention):
        return
    fused = next((attention for attention in computed.fused if _can_fuse(attention, candidate.layouts)), None)
    if fused is not None:
        candidate.attention = fused
        if fused.rope is not None:
            candidate.site.attention = candidate.site.attention.replace(computed.note, ROPE_NOTE)


def layouts_of_operands(attention: Attention, layouts: dict[str, PackedLayout]) -> tuple[PackedLayout, PackedLayout]:
    """The layouts of the keys and of the values that attention reads, given the layouts of its caches by role."""
    key, value = (layouts[cache.role] for cache in (attention.key, attention.value))
    if attention.computes_keys:
        computed = Marker.of(attention.marker).key.meta["val"]
        key = PackedLayout(dtype_name(computed.dtype), "key", int(computed.shape[3]))
    return key, value


def why_no_kernel(attention: Attention, layouts: dict[str, PackedLayout]) -> str | None:
    """The reason why no kernel computes an attention on a GPU; None if a kernel does, and on other devices."""
    marker = Marker.of(attention.marker)
    if marker.query.meta["val"].device.type != "cuda":
        return None
    return refusal(
        *layouts_of_operands(attention, layouts),
        has_sinks=marker.sinks is not None,
        has_softcap=marker.softcap != 0.0,
        sees_unwritten=marker.mask is None
        and not marker.is_causal
        and any(cache.kind != "growing" for cache in attention.caches),
    )


def _can_fuse(attention: Attention, layouts: dict[str, PackedLayout]) -> bool:
    query = Marker.of(attention.marker).query
    if not layouts["value"].format.has_levels or not _has_few_rows(query, attention.key.num_kv_heads):
        return False
    if attention.rope is not None:
        return can_apply_rope(query, layouts["key"])
    return why_no_kernel(attention, layouts) is None


def _has_few_rows(query: Node, num_kv_heads: int) -> bool:
    """Whether attention is surely a decode step: a KV head has at most MAX_DECODE_ROWS query rows."""
    _, num_heads, q_len, _ = shape_of(query)
    return statically_known_true(num_heads * q_len <= MAX_DECODE_ROWS * num_kv_heads)
