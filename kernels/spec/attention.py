"""Attention on packed caches in plain PyTorch: the specification, and the CPU path.

Keys and values are ``scale * level + zero``. Attention therefore needs no dequantized cache; both of its products are
computed on levels:

    scores = scale * (level . q) + zero * sum(q)          output = sum(p * scale * level) + sum(p * zero)

A rotated format costs one rotation of the query (``q . k = (q R) . (k R)``) and one of the output. A calibrated format
costs one product of the query and one of the output with a matrix of its basis, and adds the products with its mean
(:mod:`kvcompile.kernels.formats.bases`). Scales of keys per channel multiply the query, once for each block: ``scores =
level . (scale * q) + zero . q``. A static scale of keys multiplies the query, a static scale of values the output.

The decode path below writes these products as reductions over the packed bytes, which ``torch.compile`` fuses:
Inductor's C++ reads every byte of the cache once and keeps its levels in registers. Queries with many rows use
PyTorch's own attention on dequantized keys and values instead.

Exact blocks (:mod:`kvcompile.kernels.spec.residual`) are attended to in full precision. Their scores replace the scores
of the same packed blocks, and their weights multiply the exact values instead of the packed values. The new tokens of a
prompt (:mod:`kvcompile.kernels.spec.new_tokens`) replace the tokens that were read from the cache.

Everything is traceable; ``kv_len``, the batch and the number of blocks may be symbolic.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.formats.base import computed_once
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.key_factors import KeyFactors, with_factors
from kvcompile.kernels.spec.new_tokens import NewTokens, reads_packed, with_new_tokens
from kvcompile.kernels.spec.packing import read_stored_tokens, read_tokens
from kvcompile.kernels.spec.residual import exact_blocks, holding_entries
from kvcompile.kernels.spec.scores import (
    is_written,
    levels_of,
    per_token,
    scales_of_planes,
    scores_of,
    scores_with_factors,
    times_static_scale,
)

MAX_DECODE_ROWS = 16  # most query rows (query heads of a KV head times q_len) of the decode path
GROUP_BLOCKS = 8  # blocks of V that are summed before a result is written


def attend(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_len: int,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    new_keys: NewTokens | None = None,
    new_values: NewTokens | None = None,
    key_factors: KeyFactors | None = None,
) -> Tensor:
    """Scaled dot product attention on packed caches, computed in float32.

    Args:
        query: [batch, num_heads, q_len, k_layout.head_dim], any float dtype.
        k_data: packed keys, uint8 [num_blocks, batch, num_kv_heads, block_bytes].
        v_data: packed values, uint8 [num_blocks, batch, num_kv_heads, block_bytes], as many blocks of tokens.
        k_layout: layout of ``k_data``.
        v_layout: layout of ``v_data``. One tensor may serve as keys and values: pass it and its layout, which is a
            layout of keys without scales per channel, for both.
        mask: bool (True: attend) or float (added to the scores), broadcastable to [batch, num_heads, q_len, kv_len];
            excludes ``is_causal``.
        sinks: [num_heads], any float dtype: a further score in the softmax of each row of a head, with a value of zero.
        kv_len: the number of tokens to attend to, at most the capacity of the cache. Bytes of later tokens have no
            influence.
        is_causal: query ``i`` sees the keys 0 to ``i``, as in ``F.scaled_dot_product_attention``.
        scale: factor of the scores, ``1 / sqrt(head_dim)`` by default.
        softcap: if not 0, scores become ``softcap * tanh(scores / softcap)`` before the mask.
        new_keys, new_values: tokens that the same call has written, which many queries read in full precision.
        key_factors: the factors of pre-RoPE keys, for the first ``kv_len`` tokens; excludes new keys.

    Returns:
        [batch, num_heads, q_len, v_layout.head_dim] in the dtype of ``query``; zeros for a query that sees no key.

    Raises:
        ValueError: the query heads are not a multiple of the KV heads, ``kv_len`` exceeds the capacity of the cache, or
            both ``mask`` and ``is_causal`` are given, or both ``key_factors`` and ``new_keys``.
    """
    out, _ = _attend(
        query, k_data, v_data, k_layout, v_layout, mask, sinks, kv_len, is_causal, scale, softcap,
        (new_keys, new_values), key_factors, with_lse=False,
    )  # fmt: skip
    return out.to(query.dtype)


def attend_part(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    kv_len: int,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention on a part of the tokens, in the form in which :func:`merge_parts` merges the parts.

    It takes the arguments of :func:`attend` except new tokens and key factors, and raises its errors. Give ``sinks`` to
    one part only.

    Returns:
        The output, float32 [batch, num_heads, q_len, v_layout.head_dim], as if there were no other part; and its
        log-sum-exp in units of log2, float32 [batch, num_heads, q_len, 2]. The log-sum-exp has two numbers: the largest
        score, -inf for a query that sees no key of the part; and log2 of the sum of exponentials relative to the
        largest score. The two are not added, because scores far from zero would leave the sum no digits.
    """
    out, lse = _attend(
        query, k_data, v_data, k_layout, v_layout, mask, sinks, kv_len, is_causal, scale, softcap, (None, None),
        None, with_lse=True,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def attend_to_vectors(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    is_causal: bool = False,
    scale: float,
    softcap: float = 0.0,
    key_factors: KeyFactors | None = None,
) -> Tensor:
    """:func:`attend` on dequantized keys and values, [batch, num_kv_heads, kv_len, channels], any float dtype."""
    q, k, v = query.float() * scale, k.float(), v.float()
    if key_factors is not None:
        q, k = with_factors(q, k, key_factors._replace(paired=key_factors.paired.float() * scale))
    if mask is not None:
        mask = torch.atleast_2d(mask if mask.dtype == torch.bool else mask.float())
    return _attend_scores(q, k, v, mask, sinks, is_causal, softcap)[0].to(query.dtype)


def merge_parts(out: Tensor, lse: Tensor) -> Tensor:
    """Attention on all tokens, from the results of :func:`attend_part` for each part.

    Source: flash decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html.

    Args:
        out: [parts, batch, num_heads, q_len, v_head_dim], float32.
        lse: [parts, batch, num_heads, q_len, 2], float32.

    Returns:
        [batch, num_heads, q_len, v_head_dim], float32; zeros for a query that sees no key of any part.
    """
    largest, total = lse.unbind(-1)
    top = largest.amax(0)
    weight = torch.exp2(largest - torch.where(top == -torch.inf, 0.0, top) + total)
    weight = weight / weight.sum(0).clamp_min(torch.finfo(torch.float32).tiny)
    return (out * weight.unsqueeze(-1)).sum(0)


def _attend(
    query: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    scale: float | None,
    softcap: float,
    new: tuple[NewTokens | None, NewTokens | None],
    factors: KeyFactors | None,
    *,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The float32 output, and the log-sum-exp of :func:`attend_part` if it is asked for."""
    num_heads, q_len, head_dim = query.shape[1:]
    group_size = num_heads // k_data.shape[2]
    if num_heads % k_data.shape[2]:
        raise ValueError(f"attend: {num_heads} query heads are not a multiple of {k_data.shape[2]} KV heads")
    if mask is not None and is_causal:
        raise ValueError("attend: is_causal excludes a mask; make the mask causal and leave out is_causal")
    if factors is not None and new[0] is not None:
        raise ValueError("attend: give key_factors or new_keys, not both")
    capacity = BLOCK_TOKENS * k_layout.token_blocks(k_data)
    if isinstance(kv_len, int) and isinstance(capacity, int) and kv_len > capacity:
        raise ValueError(f"attend: kv_len {kv_len} is more than {capacity}, the capacity of k_data in tokens")
    scale = head_dim**-0.5 if scale is None else scale
    q = query.float() * scale
    if factors is not None:
        factors = factors._replace(paired=factors.paired.float() * scale)
    if any(isinstance(size, int) and size == 0 for size in (*query.shape, kv_len)):
        sees_nothing = torch.stack([q.new_full(q.shape[:3], -torch.inf), q.new_zeros(q.shape[:3])], -1)
        return q.new_zeros((*q.shape[:3], v_layout.head_dim)), sees_nothing
    few_rows = isinstance(q_len, int) and group_size * q_len <= MAX_DECODE_ROWS
    have_levels = k_layout.format.has_levels and v_layout.format.has_levels
    is_exact = any(tokens is not None for tokens in new) and not reads_packed(q_len)
    has_own_basis = factors is None or not (k_layout.format.rotated or k_layout.format.is_calibrated)
    if few_rows and have_levels and not is_exact and has_own_basis:
        out, top, total = _attend_levels(
            q, k_data, v_data, k_layout, v_layout, mask, sinks, kv_len, is_causal, softcap, factors
        )  # fmt: skip
        return out, _log_sum(top, total, q) if with_lse else None
    if sinks is None and not softcap and not with_lse:
        return _attend_dequantized(q, k_data, v_data, k_layout, v_layout, mask, kv_len, is_causal, new, factors), None
    q, k, v, mask = _dequantized_operands(q, k_data, v_data, k_layout, v_layout, mask, kv_len, new, factors)
    out, top, total = _attend_scores(q, k, v, mask, sinks, is_causal, softcap)
    out = _unrotated(out, v_layout)
    return out, _log_sum(top, total, q) if with_lse else None


def _log_sum(top: Tensor, total: Tensor, q: Tensor) -> Tensor:
    """The log-sum-exp of :func:`attend_part` from the largest scores, and the sums of exponentials relative to them."""
    top, total = top.reshape(q.shape[:3]), total.reshape(q.shape[:3])
    seen = total > 0
    largest = torch.where(seen, top * math.log2(math.e), -torch.inf)
    return torch.stack([largest, torch.where(seen, total, 1.0).log2()], -1)


def _attend_dequantized(
    q: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    mask: Tensor | None,
    kv_len: int,
    is_causal: bool,
    new: tuple[NewTokens | None, NewTokens | None],
    factors: KeyFactors | None,
) -> Tensor:
    """PyTorch's attention of scaled queries on dequantized tokens. Tokens of rotated formats stay rotated."""
    q, k, v, mask = _dequantized_operands(q, k_data, v_data, k_layout, v_layout, mask, kv_len, new, factors)
    if mask is not None:
        k = _without_hidden_keys(k, mask if mask.dtype == torch.bool else mask != -torch.inf, q.shape[1])
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=1.0, enable_gqa=True)
    return _unrotated(out, v_layout)


def _without_hidden_keys(k: Tensor, mask: Tensor, num_heads: int) -> Tensor:
    """Keys, with zeros in place of keys that a bool mask hides from all queries of their KV head.

    PyTorch's attention on a CPU adds -inf to the score of a hidden key. The sum is NaN if the score is NaN or inf, as
    for places of an uninitialised cache that were never written. Kernels replace the score, and have no such sum.
    """
    seen = mask.expand(*(1,) * (4 - mask.ndim), *mask.shape).any(2)  # [batch or 1, num_heads or 1, kv_len or 1]
    if mask.ndim > 2 and mask.shape[-3] == num_heads:
        seen = seen.unflatten(1, (k.shape[1], -1)).any(2)
    return torch.where(seen.unsqueeze(-1), k, 0.0)


def _dequantized_operands(
    q: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    mask: Tensor | None,
    kv_len: int,
    new: tuple[NewTokens | None, NewTokens | None],
    factors: KeyFactors | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask of attention on dequantized tokens."""
    k, v = (
        _dequantized(data, layout, kv_len, tokens, q.shape[2])
        for data, layout, tokens in zip((k_data, v_data), (k_layout, v_layout), new, strict=True)
    )
    if mask is not None:
        mask = torch.atleast_2d(mask if mask.dtype == torch.bool else mask.float())
    if factors is not None:
        return *with_factors(q, read_tokens(k_data, k_layout, kv_len), factors), v, mask
    return _rotated(q, k_layout), k, v, mask


def _dequantized(data: Tensor, layout: PackedLayout, kv_len: int, new: NewTokens | None, q_len: int) -> Tensor:
    """The first ``kv_len`` tokens, in the original basis if the format is calibrated, else in the stored basis."""
    if layout.format.is_calibrated:
        return with_new_tokens(read_tokens(data, layout, kv_len), new, q_len)
    if new is not None:
        new = NewTokens(layout.format.to_stored_basis(new.x.float()), new.slots)
    return with_new_tokens(read_stored_tokens(data, layout, kv_len), new, q_len)


def _attend_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, is_causal: bool, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of scaled queries on keys and values in float32, with sinks and softcap.

    Returns:
        The output; the numbers that were subtracted from the scores, and the sums of exponentials, [..., 1].
    """
    batch, num_heads, q_len, _ = q.shape
    num_kv_heads = k.shape[1]
    scores = (q.reshape(batch, num_kv_heads, -1, q.shape[-1]) @ k.transpose(-1, -2)).reshape(
        batch, num_heads, q_len, -1
    )
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        mask = torch.arange(k.shape[2], device=q.device) <= torch.arange(q_len, device=q.device)[:, None]
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else _with_float_mask(scores, mask)
    top = _finite_maximum(scores, -1, sinks[:, None, None] if sinks is not None else None)
    p = torch.exp(scores - top)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None].float() - top)
    out = p.reshape(batch, num_kv_heads, -1, k.shape[2]) @ v
    out = out.reshape(batch, num_heads, q_len, -1) / torch.where(total == 0, 1.0, total)
    return out, top, total


def _with_float_mask(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores plus a mask. -inf hides a token whatever its score is: that of a token never written may be NaN."""
    return torch.where(mask == -torch.inf, -torch.inf, scores + mask)


def _rotated(q: Tensor, layout: PackedLayout) -> Tensor:
    """Queries in the basis of :func:`read_stored_tokens`; calibrated formats are dequantized to the original basis."""
    return q if layout.format.is_calibrated else layout.format.query_in_stored_basis(q)


def _unrotated(out: Tensor, layout: PackedLayout) -> Tensor:
    """Inverse of :func:`_rotated` for outputs."""
    return out if layout.format.is_calibrated else layout.format.from_stored_basis(out)


def _finite_maximum(scores: Tensor, dims: int | tuple[int, ...], sinks: Tensor | None) -> Tensor:
    """The numbers to subtract from scores before the exponential: maxima over sinks and ``dims``, whose sizes become 1.

    A row without a visible key has the maximum -inf. It is replaced by 0, so that the exponentials are 0 and not NaN.
    """
    top = scores.amax(dims, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.float())
    return torch.where(top == -torch.inf, 0.0, top)


def _attend_levels(
    q: Tensor,
    k_data: Tensor,
    v_data: Tensor,
    k_layout: PackedLayout,
    v_layout: PackedLayout,
    mask: Tensor | None,
    sinks: Tensor | None,
    kv_len: int,
    is_causal: bool,
    softcap: float,
    factors: KeyFactors | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of scaled queries, computed on levels; it returns the results of :func:`_attend_scores`.

    Scores have block form, [num_blocks, batch, num_kv_heads, rows, BLOCK_TOKENS]. A row is a query head of the KV head
    at one query position; positions vary fastest.
    """
    batch, num_heads, q_len, _ = q.shape
    blocks, num_kv_heads = k_layout.token_blocks(k_data), k_data.shape[2]
    q = q.reshape(batch, num_kv_heads, -1, q.shape[-1])
    if factors is not None:
        tokens = factors.factors.new_zeros(2, blocks * BLOCK_TOKENS, q.shape[-1])
        tokens = tokens.slice_scatter(factors.factors, 1, 0, kv_len)
        factors = KeyFactors(factors.paired.reshape(q.shape), tokens)
    token = torch.arange(blocks * BLOCK_TOKENS, device=q.device).reshape(blocks, 1, 1, 1, BLOCK_TOKENS)
    in_cache = token < kv_len

    scores = scores_of(q, k_data, k_layout) if factors is None else scores_with_factors(q, factors, k_data, k_layout)
    visible = in_cache
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        position = torch.arange(q_len, device=q.device).repeat(num_heads // num_kv_heads)
        visible = visible & (token <= position[:, None])
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], kv_len)
        mask = mask.new_zeros(*mask.shape[:-1], token.numel()).slice_scatter(mask, -1, 0, kv_len)
        mask = mask.expand(batch, num_heads, q_len, -1)
        mask = mask.reshape(batch, num_kv_heads, -1, blocks, BLOCK_TOKENS).permute(3, 0, 1, 2, 4)
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            scores = _with_float_mask(scores, mask)
    scores = torch.where(visible, scores, -torch.inf)

    if sinks is not None:
        sinks = sinks.reshape(num_kv_heads, -1, 1).expand(-1, -1, q_len).reshape(num_kv_heads, -1, 1)
    top = _finite_maximum(scores, (0, -1), sinks)
    p = torch.exp(scores - top)
    total = p.sum((0, -1)).unsqueeze(-1)
    if sinks is not None:
        total = total + torch.exp(sinks.float() - top[0])
    out = _weighted_values(p, in_cache, v_data, v_layout) / torch.where(total == 0, 1.0, total)
    return out.reshape(batch, num_heads, q_len, v_layout.head_dim), top[0], total


def _weighted_values(p: Tensor, in_cache: Tensor, data: Tensor, layout: PackedLayout) -> Tensor:
    """``sum(p * v)`` over all tokens for weights in block form; [batch, num_kv_heads, rows, head_dim]."""
    if layout.residual is None:
        return _weighted_decoded_values(p, in_cache, data, layout)
    _, exact = holding_entries(data, layout)
    packed_p = torch.where(exact[..., None, None], 0.0, p)
    out = _weighted_decoded_values(packed_p, in_cache, data, layout)

    block, holds = exact_blocks(data, layout)
    sequence, head = (torch.arange(size, device=data.device) for size in block.shape[:2])
    weights = torch.where(holds[..., None, None], p[block, sequence[:, None, None], head[:, None]], 0.0)
    visible = holds[..., None] & in_cache[:, 0, 0, 0][block]
    values = torch.where(visible[..., None], layout.rows(data).float(), 0.0)  # 0 * NaN would be NaN
    rows = [(values * row[..., None]).sum((2, 3)) for row in computed_once(weights).unbind(3)]
    return out + torch.stack(rows, 2)


def _weighted_decoded_values(p: Tensor, in_cache: Tensor, data: Tensor, layout: PackedLayout) -> Tensor:
    """``sum(p * v)`` over the packed blocks, in the original basis."""
    fmt = layout.format
    out = fmt.from_stored_basis(_weighted_packed_values(p, in_cache, data, layout))
    if fmt.is_calibrated:
        weight = torch.where(in_cache & is_written(data, layout), p, 0.0).sum((0, -1)).unsqueeze(-1)
        out = out + weight * fmt.mean(out)
    return out


def _weighted_packed_values(p: Tensor, in_cache: Tensor, data: Tensor, layout: PackedLayout) -> Tensor:
    """``sum(p * v)`` over the packed blocks, in the stored basis."""
    sections, fmt = layout.split(data), layout.format
    levels = levels_of(sections, fmt, transposed=True)
    weights: tuple[Tensor, ...] = (p,)  # of all planes, or of each
    if fmt.granularity == "plane":
        scales = [scale.squeeze(-1).unsqueeze(3) for scale in scales_of_planes(sections, fmt)]
        weights = tuple(computed_once(p * torch.where(in_cache, scale, 0.0)) for scale in scales)
    elif fmt.scale_dtype is None or fmt.granularity != "token":
        # Tokens beyond the cache must not count, and 0 * NaN would be NaN.
        levels = [torch.where(in_cache[..., 0, :].unsqueeze(-2), level, 0.0) for level in levels]
    else:
        weights = (computed_once(p * torch.where(in_cache, per_token(sections["scale"]), 0.0)),)
    # Two stages of sums, so that the loops read the cache nearly in the order of its memory.
    blocks = p.shape[0]
    group = math.gcd(blocks, GROUP_BLOCKS) if isinstance(blocks, int) else 1
    sums = []
    for row in zip(*(weight.unsqueeze(-2).unbind(3) for weight in weights), strict=True):
        of_planes = row if len(row) == len(levels) else row * len(levels)
        products = [level * weight for level, weight in zip(levels, of_planes, strict=True)]
        sums += [product.unflatten(0, (blocks // group, group)).sum((1, -1)) for product in products]
    # One concatenation of all rows and planes: each is a separate buffer in generated code.
    out = torch.stack(sums, 3).sum(0).unflatten(2, (-1, len(levels))).flatten(-2)
    if "zero" in sections and fmt.granularity == "token":
        zero = torch.where(in_cache, per_token(sections["zero"]), 0.0)
        out = out + (p * zero).sum((0, -1)).unsqueeze(-1)
    return times_static_scale(out, fmt)
