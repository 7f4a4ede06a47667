"""Attention on packed keys and values in eager code: ``kvcompile::attention`` reads the packed bytes.

Under ``inference_mode`` the dispatch gets ``scaled_dot_product_attention`` itself. Elsewhere PyTorch chooses a backend
before the dispatch, which then gets the operator of the backend. Each of these operators has a handler. PyTorch
decomposes the backend ``math`` into matrix products on dequantized values. Calls that ``kvcompile::attention`` cannot
compute also run on dequantized values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.compat.tensors import arguments_of, schema_of
from kvcompile.kernels.calibrated import refusal
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.op_table import handles
from kvcompile.packed.repeated_heads import RepeatedHeads, unrepeated
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.tokens import runs_kernels

aten = torch.ops.aten

PLAIN = (Tensor, torch.nn.Parameter)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

CPU_ROWS = 4
"""Up to this many query rows (query heads of a KV head times q_len), a CPU attends to packed bytes, which is faster."""

FLOAT32_ROWS = 127
"""Up to this many query rows in float32, a GPU attends to packed bytes, otherwise to dequantized values.

Without new tokens, float32 uses the decode kernel, which is for few rows
(:mod:`kvcompile.kernels.attention.launch_prefill`).
"""

Caches = tuple[PackedTensor, PackedTensor]


def packed_caches(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, is_causal: bool = False
) -> Caches | None:
    """The packed caches behind ``key`` and ``value``, without repeated heads, if attention can read their bytes.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key: [batch, heads, kv_len, head_dim]; ``heads`` divides ``num_heads``.
        value: [batch, heads, kv_len, v_head_dim].
        mask: bool or float, broadcastable to [batch, num_heads, q_len, kv_len].
        is_causal: query ``i`` sees the keys 0 to ``i``.

    Returns:
        Packed keys and packed values. None if an argument is of another kind, traced, empty, needs a gradient, or is
        wrong; PyTorch then computes the result on dequantized values, or raises.
    """
    keys, values = unrepeated(key), unrepeated(value)
    if keys is None or values is None or keys.data_is_traced or values.data_is_traced:
        return None
    if type(query) not in PLAIN or type(mask) not in (*PLAIN, NoneType):
        return None
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, mask)):
        return None
    is_alike = query.dtype in QUERY_DTYPES and all(
        x.dtype == query.dtype and x.device == query.device for x in (key, value)
    )
    if not is_alike or not _shapes_match(query, key, value) or not _mask_fits(query, key, mask, is_causal):
        return None
    if runs_kernels(keys.packed) and _why_no_kernel(keys, values, hides_tokens=mask is not None or is_causal):
        return None
    return (keys, values) if _are_one_cache(keys, values) else None


def _why_no_kernel(keys: PackedTensor, values: PackedTensor, *, hides_tokens: bool) -> str | None:
    """The reason why kernels do not compute attention on these caches; None if they do."""
    layouts = keys.packed_layout, values.packed_layout
    return refusal(
        *layouts, has_sinks=False, has_softcap=False, sees_unwritten=not (hides_tokens or keys.cache_meta.growing)
    )


def _shapes_match(query: Tensor, key: Tensor, value: Tensor) -> bool:
    if query.dim() != 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return False
    batch, heads, kv_len, head_dim = key.shape
    return (
        (query.shape[0], query.shape[3]) == (batch, head_dim)
        and value.shape[:3] == (batch, heads, kv_len)
        and query.shape[1] % heads == 0
    )


def _mask_fits(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    if mask is None:
        return True
    sizes = (*query.shape[:3], key.shape[2])
    broadcasts = 2 <= mask.dim() <= 4 and all(
        extent in (1, size) for extent, size in zip(mask.shape[::-1], sizes[::-1], strict=False)
    )
    right_dtype = mask.dtype in (torch.bool, torch.float32, query.dtype)
    return not is_causal and broadcasts and right_dtype and mask.device == query.device


def _are_one_cache(keys: PackedTensor, values: PackedTensor) -> bool:
    """Whether the operator can take both caches: keys and values of the same tokens and heads, both quantized."""
    layouts = keys.packed_layout, values.packed_layout
    return (
        keys.start == values.start
        and keys.shape[1] == values.shape[1]
        and tuple(layout.role for layout in layouts) == ("key", "value")
        and all(layout.format.has_levels for layout in layouts)
    )


def prefers_bytes(query: Tensor, keys: PackedTensor) -> bool:
    """Whether attention on packed bytes is at least as fast as on dequantized values."""
    rows = query.shape[1] // keys.shape[1] * query.shape[2]
    if not runs_kernels(keys.packed):
        return rows <= CPU_ROWS
    return query.dtype != torch.float32 or rows <= FLOAT32_ROWS


def attend_to_bytes(
    query: Tensor,
    caches: Caches,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention on ``caches``, which :func:`packed_caches` has returned for the same arguments.

    Returns:
        [batch, num_heads, q_len, v_head_dim] in the dtype of ``query``, contiguous.
    """
    keys = caches[0]
    mask, is_causal = _hiding_earlier_tokens(query, keys, mask, is_causal)
    arguments = attention_arguments(query, caches, keys.start + keys.num_tokens, mask, is_causal, scale)
    return torch.ops.kvcompile.attention(**arguments)


def attention_arguments(
    query: Tensor, caches: Caches, kv_len: int, mask: Tensor | None, is_causal: bool, scale: float | None
) -> dict[str, Any]:
    """The arguments of ``kvcompile::attention`` on the first ``kv_len`` tokens of ``caches``."""
    (k_data, k_layout), (v_data, v_layout) = (
        (x.packed[: x.packed_layout.blocks(kv_len)], x.packed_layout) for x in caches
    )
    (new_keys, new_key_slots), (new_values, new_value_slots) = (x.new_tokens or (None, None) for x in caches)
    return {
        "query": query,
        "k_data": k_data,
        "v_data": v_data,
        "mask": mask,
        "sinks": None,
        "kv_len": kv_len,
        "is_causal": is_causal,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "softcap": 0.0,
        "k_format": k_layout.spec,
        "v_format": v_layout.spec,
        "v_head_dim": v_layout.head_dim,
        "new_keys": new_keys,
        "new_key_slots": new_key_slots,
        "new_values": new_values,
        "new_value_slots": new_value_slots,
    }


def _hiding_earlier_tokens(
    query: Tensor, keys: PackedTensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, bool]:
    """The mask and ``is_causal`` for the bytes of ``keys``, which begin ``keys.start`` tokens earlier."""
    start, kv_len = keys.start, keys.num_tokens
    if start == 0:
        return mask, is_causal
    if mask is None:
        mask = torch.ones(query.shape[2] if is_causal else 1, kv_len, dtype=torch.bool, device=query.device)
        mask = mask.tril() if is_causal else mask
    hidden = False if mask.dtype == torch.bool else -torch.inf
    return F.pad(mask.expand(*mask.shape[:-1], kv_len), (start, 0), value=hidden), False


def attend(
    query: Tensor,
    caches: Caches,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """:func:`attend_to_bytes`, or attention on dequantized values if it is faster; without repeated heads."""
    if prefers_bytes(query, caches[0]):
        return attend_to_bytes(query, caches, mask, is_causal=is_causal, scale=scale)
    keys, values = (cache.dequantize() for cache in caches)
    return F.scaled_dot_product_attention(query, keys, values, mask, is_causal=is_causal, scale=scale, enable_gqa=True)


def handles_attention(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda handler: handles(PackedTensor, op)(handles(LiveView, op)(handles(RepeatedHeads, op)(handler)))


def _without_auxiliaries(func: Any, out: Tensor) -> tuple[Any, ...]:
    """The results of a backend's operator: ``out``, and placeholders for results that only a backward pass reads."""
    others = schema_of(func).returns[1:]
    return out, *(0 if isinstance(result.type, torch.IntType) else None for result in others)


@handles_attention(aten.scaled_dot_product_attention.default)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    caches = packed_caches(query, key, value, attn_mask, is_causal=is_causal)
    if caches is None or dropout_p > 0.0 or not (enable_gqa or query.shape[1] == key.shape[1]):
        return NotImplemented
    return attend(query, caches, attn_mask, is_causal=is_causal, scale=scale)


_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_EFFICIENT = aten._scaled_dot_product_efficient_attention.default

_SQUARE_IF_CAUSAL = (
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
)
"""PyTorch calls these operators with a causal mask for as many queries as keys; their mask for other sizes differs."""


def _attention_of_backend(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The results of the operator of a backend, computed on packed bytes, or on dequantized values on a CPU."""
    given = arguments_of(func, args, kwargs)
    query, key, value, is_causal = given["query"], given["key"], given["value"], given["is_causal"]
    mask = given.get("attn_bias", given.get("attn_mask"))
    if given["dropout_p"] > 0.0 or given.get("compute_log_sumexp") or given.get("return_debug_mask"):
        return NotImplemented
    if is_causal and func in _SQUARE_IF_CAUSAL and query.shape[2] != key.shape[2]:
        return NotImplemented
    caches = packed_caches(query, key, value, mask, is_causal=is_causal)
    if caches is None:
        return NotImplemented
    if prefers_bytes(query, caches[0]):
        out = attend_to_bytes(query, caches, mask, is_causal=is_causal, scale=given["scale"])
        return _without_auxiliaries(func, out)
    if func is not _CPU:
        return NotImplemented
    keys, values = (cache.dequantize() for cache in caches)  # without repeated heads, which this operator allows
    return func(query, keys, values, 0.0, is_causal, attn_mask=mask, scale=given["scale"])


for _operator in (_CPU, _EFFICIENT, *_SQUARE_IF_CAUSAL):
    handles_attention(_operator)(functools.partial(_attention_of_backend, _operator))
