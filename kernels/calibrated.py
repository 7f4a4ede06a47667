"""Calibrated formats on a GPU: the basis is applied around the kernels, which see a plain format.

A calibrated format stores the bytes of its plain format, for vectors in the basis
(:attr:`~kvcompile.kernels.formats.base.Format.plain_name`). A store changes new vectors into the basis, attention
changes the query before its kernels and the output after them, and a read changes dequantized vectors back. These are
products with the small matrices of a layer. Kernels read nothing but the stored channels, in decode and in prefill.

Scores lack the product of the query with the mean of the keys, a constant of each row. The softmax is invariant to it.
Attention sinks, a softcap and tokens in full precision would break this, and :func:`refusal` names them. A token that
was never written counts as the mean vector, and not as the zero vector of the specification. Attention that hides no
token of a cache of fixed size is therefore refused, too. A mask is expected to hide such tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kvcompile.kernels import launch
from kvcompile.kernels.change_of_basis import MOST_VECTORS, changed
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.kernels.spec.attention import attend_to_vectors
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.spec.packing import to_cache_dtype


def refusal(
    key: PackedLayout, value: PackedLayout, *, has_sinks: bool, has_softcap: bool, sees_unwritten: bool = False
) -> str | None:
    """The reason why no kernel computes attention on caches in these layouts; None if a kernel can.

    ``sees_unwritten``: whether attention hides no token of a cache of fixed size.
    """
    if sees_unwritten and (key.format.is_calibrated or value.format.is_calibrated):
        return "on a GPU a calibrated format needs a mask that hides the tokens that were never written"
    for layout in (key, value):
        if layout.format.is_calibrated and layout.residual is not None:
            return "on a GPU a calibrated format cannot keep recent or first tokens in full precision yet"
    if key.format.is_calibrated and has_softcap:
        return "on a GPU keys in a calibrated format cannot have a softcap yet"
    if has_sinks and (key.format.is_calibrated or value.format.is_calibrated):
        return "on a GPU a calibrated format cannot have attention sinks yet"
    return None


def attention(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float,
    softcap: float,
    k_format: str,
    v_format: str,
    v_head_dim: int,
    ranges: Tensor | None = None,
    new_keys: NewTokens | None = None,
    new_values: NewTokens | None = None,
    key_factors: KeyFactors | None = None,
) -> Tensor:
    """:func:`kvcompile.kernels.launch.attention` for all formats. Calibrated formats take no new tokens.

    Pre-RoPE keys are dequantized first if no kernel multiplies them by key factors.

    Raises:
        ValueError: there is a :func:`refusal`.
    """
    key = PackedLayout.parse(k_format, "key", query.shape[3])
    value = key if v_data is None else PackedLayout.parse(v_format, "value", v_head_dim)
    reason = refusal(key, value, has_sinks=sinks is not None, has_softcap=softcap != 0.0)
    if reason is not None:
        raise ValueError(f"kvcompile::attention: {key.description} and {value.description}: {reason}")
    num_kv_heads = k_data.shape[2]
    if key_factors is not None and not _multiplies_by_factors(query, k_data, v_data, key, value):
        k = dequantize(k_data, kv_len, query.dtype, key.spec, "key", key.head_dim)
        v = k if v_data is None else dequantize(v_data, kv_len, query.dtype, value.spec, "value", value.head_dim)
        return attend_to_vectors(
            query, k, v, mask=mask, sinks=sinks, is_causal=is_causal, scale=scale, softcap=softcap,
            key_factors=key_factors,
        ).contiguous()  # fmt: skip
    k_plain, v_plain = _plain(key), _plain(value)
    if key.format.is_calibrated:
        query = _query_in_plain(key.format, query, num_kv_heads)
    out = launch.attention(
        query, k_data, v_data, mask, sinks, kv_len, is_causal, scale, softcap, k_plain.spec, v_plain.spec,
        v_plain.head_dim, ranges, new_keys=new_keys, new_values=new_values, key_factors=key_factors,
    )  # fmt: skip
    if value.format.is_calibrated:
        out = _output_from_plain(value.format, out, num_kv_heads)
    return out


def _multiplies_by_factors(
    query: Tensor, k_data: Tensor, v_data: Tensor | None, key: PackedLayout, value: PackedLayout
) -> bool:
    """Whether a kernel multiplies keys in this layout by key factors. No kernel can if the format is calibrated."""
    if key.format.is_calibrated:
        return False
    plain = _plain(value)
    config = launch.config_of_factors(query, k_data, v_data, key.spec, plain.spec, plain.head_dim)
    return config is not None


def store(data: Tensor, x: Tensor, positions: Tensor, valid: Tensor | None, spec: str, role: str) -> None:
    """:func:`kvcompile.kernels.launch.store` for all formats."""
    x, layout = _stored(x, spec, role)
    launch.store(data, x, positions, valid, layout.spec, role)


def store_pair(
    k_data: Tensor,
    v_data: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    valid: Tensor | None,
    k_spec: str,
    v_spec: str,
) -> None:
    """:func:`kvcompile.kernels.launch.store_pair` for all formats."""
    key, k_layout = _stored(key, k_spec, "key")
    value, v_layout = _stored(value, v_spec, "value")
    launch.store_pair(k_data, v_data, key, value, positions, valid, k_layout.spec, v_layout.spec)


def dequantize(data: Tensor, num_tokens: int, dtype: torch.dtype, spec: str, role: Role, head_dim: int) -> Tensor:
    """:func:`kvcompile.kernels.launch.dequantize` for all formats."""
    layout = PackedLayout.parse(spec, role, head_dim)
    if not layout.format.is_calibrated:
        return launch.dequantize(data, num_tokens, dtype, spec, role, head_dim)
    plain = _plain(layout)
    x = launch.dequantize(data, num_tokens, torch.float32, plain.spec, role, plain.head_dim)
    if x.numel() == 0:
        return x.new_empty((*x.shape[:3], head_dim), dtype=dtype)
    return to_cache_dtype(_with_mean(layout.format, x), dtype).contiguous()


def _plain(layout: PackedLayout) -> PackedLayout:
    """The plain layout with the same bytes. Its vectors are the vectors of ``layout`` in their basis."""
    fmt = layout.format
    if not fmt.is_calibrated:
        return layout
    return replace(layout, format_name=fmt.plain_name, head_dim=fmt.stored_dim(layout.head_dim))


def _stored(x: Tensor, spec: str, role: str) -> tuple[Tensor, PackedLayout]:
    """Vectors in the basis, and the layout in which kernels store them.

    Raises:
        ValueError: the layout is of a calibrated format and has a residual.
    """
    layout = PackedLayout.parse(spec, cast(Role, role), x.shape[3])
    if not layout.format.is_calibrated:
        return x, layout
    reason = refusal(layout, layout, has_sinks=False, has_softcap=False)
    if reason is not None:
        raise ValueError(f"kvcompile::store: {layout.description}: {reason}")
    if _are_few(x, x.shape[1]):
        layout.format.basis_for(x.shape)
        return changed(x, layout.format, x.shape[1], "to_stored", "before", torch.float32), _plain(layout)
    is_zero = (x == 0).all(-1, keepdim=True)
    return torch.where(is_zero, 0.0, layout.format.to_plain(x.float())), _plain(layout)


def _with_mean(fmt: Format, x: Tensor) -> Tensor:
    """Vectors, or sums of vectors whose weights sum to 1, in the original basis: float32.

    Zeros stay zeros. They are vectors that were never written, and outputs of rows that see no token.
    """
    x = x.float()
    original = fmt.from_plain(x)
    return original + torch.where((x != 0).any(-1, keepdim=True), fmt.mean(original), 0.0)


def _are_few(x: Tensor, num_kv_heads: int) -> bool:
    """Whether one kernel changes the basis of vectors [batch, num_heads, q_len, channels]."""
    return x.shape[0] * x.shape[1] * x.shape[2] <= MOST_VECTORS * num_kv_heads


def _query_in_plain(fmt: Format, query: Tensor, num_kv_heads: int) -> Tensor:
    """Queries [batch, num_heads, q_len, head_dim] as attention on the plain format takes them, in their dtype."""
    if not fmt.has_matrices:
        return query
    if _are_few(query, num_kv_heads):
        return changed(query, fmt, num_kv_heads, "query", "none", query.dtype)
    return _of_query_heads(fmt.query_in_plain(_of_kv_heads(query, num_kv_heads)), query)


def _output_from_plain(fmt: Format, out: Tensor, num_kv_heads: int) -> Tensor:
    """The output [batch, num_heads, q_len, channels] of attention on the plain format, in the original basis."""
    if _are_few(out, num_kv_heads):
        return changed(out, fmt, num_kv_heads, "from_stored", "after", out.dtype)
    return _of_query_heads(_with_mean(fmt, _of_kv_heads(out, num_kv_heads)), out)


def _of_kv_heads(x: Tensor, num_kv_heads: int) -> Tensor:
    """Query heads grouped by KV head: float32 [batch, num_kv_heads, group_size, q_len, channels]."""
    return x.float().unflatten(1, (num_kv_heads, -1))


def _of_query_heads(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of :func:`_of_kv_heads`, in the dtype of ``like``."""
    return x.flatten(1, 2).to(like.dtype)
