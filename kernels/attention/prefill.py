"""Prefill attention in Triton, on dequantized K and V: flash attention with the masks of packed attention.

Queries are the first operand of the products, unlike in :mod:`kvcompile.kernels.attention.decode`:

    S = q K^T   [rows, tokens]         O += P V   [rows, channels]

K and V pass through shared memory, where all rows of a program share them. With many rows the limit is the tensor cores
and not memory. Source: FlashAttention-2, arXiv:2307.08691.

A row is a query head at a query position; query heads that share a KV head are rows of the same program. The tiles of
tokens that a program visits are cut into three runs. All rows see every token of the middle run, which needs no mask.
"""

from __future__ import annotations

from kvcompile.kernels.attention.softmax_tile import store_log_sum, tanh, with_float_mask
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.tiles.visible_range import visible_tokens


@jit(do_not_specialize=["first_pair", "num_kv_heads", "q_len", "kv_len", "padded_len", "num_splits", "num_rows"])
def prefill_attention_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr, query_strides, mask_strides,
    first_pair, num_kv_heads, q_len, kv_len, padded_len, num_splits, num_rows, score_scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PADDED_V_HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PARTIAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one KV head, one split of the tokens. Grid (rows, pairs, splits).

    Args:
        query_ptr: [batch, num_heads, q_len, head_dim], strides (batch, head, position, channel).
        key_ptr, value_ptr: [pairs, padded_len, padded head_dim] in the dtype of the products, finite and 0 in padding;
            a pair is a KV head of a sequence, and ``padded_len`` is a multiple of TOKENS.
        first_pair: the pair of the first program, ``batch * num_kv_heads + kv_head``.
        num_rows: ``batch * num_heads * q_len``.
        mask_ptr, range_ptr, out_ptr, lse_ptr, score_scale, softcap: as in
            :func:`kvcompile.kernels.attention.decode.attention_kernel`.
    """
    pair = tl.program_id(1) + first_pair
    batch = (pair // num_kv_heads).to(tl.int64)
    kv_head = (pair % num_kv_heads).to(tl.int64)
    # The last tile of rows comes first, because it takes longest under a causal mask.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    position = (row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    in_query = position < q_len

    key_ptr += tl.program_id(1).to(tl.int64) * padded_len * PADDED_HEAD_DIM
    value_ptr += tl.program_id(1).to(tl.int64) * padded_len * PADDED_V_HEAD_DIM
    channel = tl.arange(0, PADDED_HEAD_DIM)
    query_ptrs = query_ptr + batch * query_strides[0] + head * query_strides[1] + position * query_strides[2]
    query = tl.load(
        query_ptrs[:, None] + channel[None, :] * query_strides[3],
        mask=in_query[:, None] & (channel < HEAD_DIM)[None, :],
        other=0.0,
    ).to(key_ptr.dtype.element_ty)
    mask_row_ptrs = mask_ptr + batch * mask_strides[0] + head * mask_strides[1] + position * mask_strides[2]

    range_ptrs = range_ptr + (batch * q_len + position) * 3
    tiles, ranges = visible_tiles(
        first_row, in_query, range_ptrs, q_len, kv_len, tl.program_id(2), num_splits, GROUP_SIZE, MASK, IS_CAUSAL, ROWS,
        TOKENS,
    )  # fmt: skip
    first_tile, first_full, end_full, end_tile = tiles
    row_begin, row_end, holes = ranges
    visibility = (position, in_query, row_begin, row_end, holes, mask_row_ptrs, mask_strides[3])
    state = (
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.full([ROWS], 0.0, tl.float32),
        tl.full([ROWS, PADDED_V_HEAD_DIM], 0.0, tl.float32),
    )
    state = _attend(
        state, query, key_ptr, value_ptr, first_tile, first_full, kv_len, score_scale, softcap, visibility,
        True, HAS_SOFTCAP, MASK, IS_CAUSAL, PRECISION, TOKENS, NUM_STAGES,
    )  # fmt: skip
    state = _attend(
        state, query, key_ptr, value_ptr, first_full, end_full, kv_len, score_scale, softcap, visibility,
        False, HAS_SOFTCAP, MASK, IS_CAUSAL, PRECISION, TOKENS, NUM_STAGES,
    )  # fmt: skip
    state = _attend(
        state, query, key_ptr, value_ptr, end_full, end_tile, kv_len, score_scale, softcap, visibility,
        True, HAS_SOFTCAP, MASK, IS_CAUSAL, PRECISION, TOKENS, NUM_STAGES,
    )  # fmt: skip

    maximum, total, acc = state
    seen = total > 0
    out_row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        out_row += tl.program_id(2).to(tl.int64) * num_rows
        store_log_sum(lse_ptr, out_row, maximum, tl.log2(total), seen, in_query)
    out_channel = tl.arange(0, PADDED_V_HEAD_DIM)[None, :]
    out = acc * tl.where(seen, 1.0 / total, 0.0)[:, None]
    in_bounds = in_query[:, None] & (out_channel < V_HEAD_DIM)
    tl.store(out_ptr + out_row[:, None] * V_HEAD_DIM + out_channel, out, mask=in_bounds)


@jit
def visible_tiles(
    first_row, in_query, range_ptrs, q_len, kv_len, split, num_splits,
    GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The tiles of TOKENS tokens that one split visits, and the ranges of a bool mask.

    Arguments are the same as in :func:`kvcompile.kernels.tiles.visible_range.visible_tokens`, and the number of the
    split.

    Returns:
        (first_tile, first_full, end_full, end_tile): the split visits the tiles [first_tile, end_tile), and all rows
        see all tokens of the tiles [first_full, end_full).
        (row_begin, row_end, holes): as returned by ``visible_tokens``.
    """
    tokens, ranges = visible_tokens(first_row, in_query, range_ptrs, q_len, kv_len, GROUP_SIZE, MASK, IS_CAUSAL, ROWS)
    begin, end, all_begin, all_end = tokens
    first_tile, end_tile = begin // TOKENS, tl.cdiv(end, TOKENS)
    tiles_per_split = tl.cdiv(tl.maximum(end_tile - first_tile, 0), num_splits)
    first_tile += split * tiles_per_split
    end_tile = tl.minimum(end_tile, first_tile + tiles_per_split)
    first_full = tl.minimum(tl.maximum(tl.cdiv(all_begin, TOKENS), first_tile), tl.maximum(end_tile, first_tile))
    end_full = tl.maximum(tl.minimum(all_end // TOKENS, end_tile), first_full)
    return (first_tile, first_full, end_full, end_tile), ranges


@jit
def _attend(
    state, query, key_ptr, value_ptr, first_tile, end_tile, kv_len, score_scale, softcap, visibility,
    MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The state (maximum, total, acc) after the tiles [first_tile, end_tile). Without MASKED all tokens are visible."""
    maximum, total, acc = state
    key_column = tl.arange(0, query.shape[1])[None, :]
    value_column = tl.arange(0, acc.shape[1])[None, :]
    for tile in tl.range(first_tile, end_tile, num_stages=NUM_STAGES):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        row = token.to(tl.int64)[:, None]
        key = tl.load(key_ptr + row * query.shape[1] + key_column)
        value = tl.load(value_ptr + row * acc.shape[1] + value_column)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * score_scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        if MASKED:
            scores = visible_scores(scores, token, kv_len, visibility, MASK, IS_CAUSAL)
        weight, decay, maximum, total = softmax_step(scores, maximum, total, MASKED)
        acc = tl.dot(weight.to(value.dtype), value, acc * decay[:, None], input_precision=PRECISION)
    return maximum, total, acc


@jit
def softmax_step(scores, maximum, total, MASKED: tl.constexpr):
    """One step of the online softmax, for scores [rows, tokens].

    Returns:
        Weights [rows, tokens]; the factor [rows] of all earlier sums; the new maxima and the new sums of weights
        [rows].
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    finite_maximum = new_maximum
    if MASKED:
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weight = tl.exp2(scores - finite_maximum[:, None])
    decay = tl.exp2(maximum - finite_maximum)
    return weight, decay, new_maximum, total * decay + tl.sum(weight, 1)


@jit
def visible_scores(scores, token, kv_len, visibility, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr):
    """Apply the mask to scores [rows, tokens]: -inf where a row does not see a token."""
    position, in_query, row_begin, row_end, holes, mask_row_ptrs, stride_token = visibility
    in_cache = token < kv_len
    seen = in_query[:, None] & in_cache[None, :]
    mask_ptrs = mask_row_ptrs[:, None] + token.to(tl.int64)[None, :] * stride_token
    if MASK == "float":
        scores = with_float_mask(scores, tl.load(mask_ptrs, mask=seen, other=0.0))
    elif MASK == "bool":
        if holes != 0:
            seen = seen & (tl.load(mask_ptrs, mask=seen, other=0) != 0)
        else:
            seen = seen & (token[None, :] >= row_begin[:, None]) & (token[None, :] < row_end[:, None])
    if IS_CAUSAL:
        seen = seen & (token[None, :] <= position[:, None])
    return tl.where(seen, scores, float("-inf"))
