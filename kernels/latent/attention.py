"""Attention on a packed cache of latents in Triton: one tensor serves as keys and values (the absorbed form).

The method is flash decoding. A program owns ROWS query rows of one sequence and a share of the tokens. A
tile of latents ``x`` is dequantized once, slice after slice of its channels, and goes to shared memory. Both products
read it there:

    S = sum over slices of q x^T   [rows, tokens]         O += P x   [rows, channels], one slice after the other

Queries are the first operand, because a hundred query heads make the tensor cores the limit. Masks, ranges of visible
tokens and the softmax are the same as in :mod:`kvcompile.kernels.attention.prefill`. On Hopper the kernel of
:mod:`kvcompile.kernels.latent.hopper` replaces this one, except for products in float32.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1 (the absorbed form); FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

from kvcompile.kernels.attention.prefill import softmax_step, visible_scores, visible_tiles
from kvcompile.kernels.attention.softmax_tile import store_log_sum, tanh
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.latent.tiles import channels_of, load_latents
from kvcompile.kernels.layout.references import referred


@jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_splits", "num_rows"])
def latent_attention_kernel(
    query_ptr, data_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr, query_strides, data_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_splits, num_rows, score_scale, softcap,
    LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one KV head, one split of the tokens. Grid (rows, batch * num_kv_heads, splits).

    Args:
        query_ptr: [batch, num_heads, q_len, LATENT.head_dim], strides (batch, head, position, channel).
        data_ptr: packed latents, uint8, strides (block, batch, head) in bytes.
        num_rows: ``batch * num_heads * q_len``.
        out_ptr: [num_rows, LATENT.head_dim], or with PARTIAL float32 [num_splits, num_rows, LATENT.head_dim].
        mask_ptr, range_ptr, lse_ptr, score_scale, softcap: as in
            :func:`kvcompile.kernels.attention.decode.attention_kernel`.
        TOKENS: tokens of a tile, a divisor of the tokens of a block.
    """
    batch = (tl.program_id(1) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % num_kv_heads).to(tl.int64)
    # The last tile of rows comes first, because it takes longest under a causal mask.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    position = (row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    in_query = position < q_len

    query_ptrs = query_ptr + batch * query_strides[0] + head * query_strides[1] + position * query_strides[2]
    query = _load_query(query_ptrs, in_query, query_strides[3], LATENT)
    data_ptr = referred(data_ptr, LATENT) + batch * data_strides[1] + kv_head * data_strides[2]
    tiles, ranges = visible_tiles(
        first_row, in_query, range_ptr + (batch * q_len + position) * 3, q_len, kv_len, tl.program_id(2), num_splits,
        GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS,
    )  # fmt: skip
    mask_row_ptrs = mask_ptr + batch * mask_strides[0] + head * mask_strides[1] + position * mask_strides[2]
    visibility = (position, in_query, ranges[0], ranges[1], ranges[2], mask_row_ptrs, mask_strides[3])

    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    outputs = _zeros(query, LATENT)
    for own_tile in tl.range(0, tiles[3] - tiles[0], num_stages=NUM_STAGES):
        tile = tiles[0] + own_tile
        token = tile * TOKENS + tl.arange(0, TOKENS)
        row_in_block = tile % (LATENT.block_tokens // TOKENS) * TOKENS + tl.arange(0, TOKENS)
        block_ptr = data_ptr + (tile // (LATENT.block_tokens // TOKENS)).to(tl.int64) * data_strides[0]
        latents = load_latents(block_ptr, row_in_block, token < kv_len, LATENT)
        scores = _products(query, latents, LATENT, PRECISION) * score_scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        if MASK == "float":  # known at compile time  # noqa: SIM114
            scores = visible_scores(scores, token, kv_len, visibility, MASK, IS_CAUSAL)
        elif (tile < tiles[1]) | (tile >= tiles[2]):  # most tiles of a long context hide nothing
            scores = visible_scores(scores, token, kv_len, visibility, MASK, IS_CAUSAL)
        weight, decay, maximum, total = softmax_step(scores, maximum, total, True)
        outputs = _accumulate(outputs, decay, weight.to(LATENT.dtype), latents, LATENT, PRECISION)

    seen = total > 0
    out_row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        out_row += tl.program_id(2).to(tl.int64) * num_rows
        store_log_sum(lse_ptr, out_row, maximum, tl.log2(total), seen, in_query)
    inverse = tl.where(seen, 1.0 / total, 0.0)[:, None]
    NUM_SLICES: tl.constexpr = LATENT.num_slices
    for i in tl.static_range(NUM_SLICES):
        out_ptrs = out_ptr + out_row[:, None] * LATENT.head_dim + channels_of(i, LATENT)[None, :]
        tl.store(out_ptrs, outputs[i] * inverse, mask=in_query[:, None])


@jit
def _load_query(row_ptrs, in_query, stride_channel, LATENT: tl.constexpr):
    """Load the slices of the query, [rows, width] of LATENT.dtype."""
    slices = ()
    NUM_SLICES: tl.constexpr = LATENT.num_slices
    for i in tl.static_range(NUM_SLICES):
        ptrs = row_ptrs[:, None] + channels_of(i, LATENT)[None, :] * stride_channel
        slices = slices + (tl.load(ptrs, mask=in_query[:, None], other=0.0).to(LATENT.dtype),)  # noqa: RUF005
    return slices


@jit
def _zeros(query, LATENT: tl.constexpr):
    """An output of zeros for every slice, float32 [rows, width]."""
    slices = ()
    NUM_SLICES: tl.constexpr = LATENT.num_slices
    for i in tl.static_range(NUM_SLICES):
        slices = slices + (tl.full(query[i].shape, 0.0, tl.float32),)  # noqa: RUF005
    return slices


@jit
def _products(query, latents, LATENT: tl.constexpr, PRECISION: tl.constexpr):
    """``q . x``, summed over the slices: float32 [rows, tokens]."""
    scores = tl.dot(query[0], tl.trans(latents[0]), input_precision=PRECISION)
    OTHER_SLICES: tl.constexpr = LATENT.num_slices - 1
    for i in tl.static_range(OTHER_SLICES):
        scores = tl.dot(query[i + 1], tl.trans(latents[i + 1]), scores, input_precision=PRECISION)
    return scores


@jit
def _accumulate(outputs, decay, weight, latents, LATENT: tl.constexpr, PRECISION: tl.constexpr):
    """The accumulated outputs of all slices after one more tile."""
    slices = ()
    NUM_SLICES: tl.constexpr = LATENT.num_slices
    for i in tl.static_range(NUM_SLICES):
        output = tl.dot(weight, latents[i], outputs[i] * decay[:, None], input_precision=PRECISION)
        slices = slices + (output,)  # noqa: RUF005
    return slices
