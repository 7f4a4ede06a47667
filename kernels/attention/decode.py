"""Decode attention on packed caches in Triton: one kernel for every format, and a kernel that merges its splits.

The method is flash decoding in transposed form. A program owns a tile of query rows of one KV head and a share of the
tokens. The rows include all query heads of the KV head, so that the cache is read once. For each tile of tokens the
program computes

    S^T = K q^T   [tokens, rows]         O^T += V^T P^T   [channels, rows]

K lies row-major and V column-major in memory. Both packed operands are therefore the *first* operand of their product:
they are unpacked in registers, and never pass through shared memory as 16-bit numbers.

The law of formats, ``x = scale * level + zero``, keeps scales out of the products. In units of log2 a score is

    x[n, r] = k_scale[n] * (level[n] . q[r]) + k_zero[n] * sum(q[r])

with static scales in ``q`` (keys) and in the output (values). The weight of a value is
``p * v_scale = exp2(x + log2(v_scale))``, and the running maximum is taken over ``x + log2(v_scale)``. Weights then lie
in [0, 1] whatever the magnitude of the values. Shifted by 2**15, they have full fp16 precision down to 2**-29 of the
largest weight, and an error of at most 2**-40 of it below. The sums of ``p = weight / v_scale`` and of ``p * v_zero``
are float32.

A tensor core product has at least eight columns, and four query heads of a KV head fill only half of them. Each row
then takes two neighbouring columns. Either the softmax skips every other column, or the two columns are the digits of
an integer query (:mod:`kvcompile.kernels.attention.query`).

Splits take turns at the visible tiles: split ``s`` takes the tiles ``s``, ``s + num_splits``, and so on. All splits
have work even if only a part of the cache is visible. If the caches have exact blocks, the splits take turns at those
first, see :mod:`kvcompile.kernels.attention.exact_blocks`; the merge adds their outputs, which are in the original
basis.

Reading beyond the visible tokens is safe. A tile loads only blocks that exist. Invisible tokens get a score of -inf, a
scale of 1 and a zero point of 0, and every byte has a finite level.
"""

from __future__ import annotations

from kvcompile.kernels.attention.exact_blocks import (
    attend_to_exact_blocks,
    is_packed,
    packed_range,
    prefetch_item,
    recent_tags,
)
from kvcompile.kernels.attention.query import first_columns, load_query
from kvcompile.kernels.attention.softmax_tile import (
    attend_packed,
    capped,
    empty_state,
    packed_scores,
    store_log_sum,
    token_metadata,
    visible_scores,
    weighs_scales,
)
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.tiles.header import block_ptr
from kvcompile.kernels.tiles.packed import load_packed, prefetch
from kvcompile.kernels.tiles.rotation import unrotate
from kvcompile.kernels.tiles.visible_range import num_visible_tiles, visible_tokens


@jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_splits"])
def attention_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr,
    query_strides, key_strides, value_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_splits, score_scale, softcap, key_scale, value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr, MERGES_EARLY: tl.constexpr,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, EXACT_ITEMS: tl.constexpr, EXACT_PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one KV head, one split of the tokens. Grid (batch * num_kv_heads, rows, splits).

    Args:
        query_ptr: [batch, num_heads, q_len, head_dim], strides (batch, head, position, channel).
        key_ptr, value_ptr: packed data, uint8, strides (block, batch, head) in bytes.
        mask_ptr: [batch, num_heads, q_len, kv_len], strides of 0 where it broadcasts; uint8 if MASK is "bool", any
            float dtype if MASK is "float", unused if MASK is "none".
        range_ptr: int32 [batch, q_len, 3], the ranges of a bool mask, see :mod:`kvcompile.kernels.tiles.visible_range`.
        out_ptr: [batch, num_heads, q_len, v_head_dim], or with PARTIAL float32 [num_splits + exact_splits, ...]:
            outputs of packed tokens in the stored basis, then outputs of exact blocks in the original basis.
        lse_ptr: with PARTIAL, the log-sum-exp in units of log2 and in two parts, as in :func:`combine_kernel`.
        score_scale: factor of the scores times log2(e).
        softcap: with HAS_SOFTCAP, the bound of the scores times log2(e).
        key_scale, value_scale: static scales. They are arguments because layers differ in them and share the kernel.
        MASK_PER_ROW: whether the mask differs between the rows of a KV head.
        MERGES_EARLY: whether the kernel that merges the splits may start before this one ends. This kernel itself never
            starts early: its programs fill the device in one wave, and remaining programs of the kernel before it would
            leave no room for the last of them.
        EXACT_ITEMS: the number of items of exact blocks, 0 if there are no entries. Otherwise PARTIAL must be set.
    """
    if MERGES_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    kv_head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    split = tl.program_id(2)
    # Query heads vary fastest within the rows, so that a tile of rows spans few positions. The last tile of rows comes
    # first, because it takes longest under a causal mask.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    position = (row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    in_query = position < q_len

    key_ptr = referred(key_ptr, KEY) + batch * key_strides[1] + kv_head * key_strides[2]
    value_ptr = referred(value_ptr, VALUE) + batch * value_strides[1] + kv_head * value_strides[2]
    mask_ptr += batch * mask_strides[0]
    mask_row_ptrs = mask_ptr + head * mask_strides[1] + position * mask_strides[2]
    mask_ptr += kv_head * GROUP_SIZE * mask_strides[1]  # the same for all rows, without MASK_PER_ROW

    if EXACT_ITEMS > 0 and split < EXACT_ITEMS:
        prefetch_item(key_ptr, value_ptr, key_strides[0], value_strides[0], split, KEY, VALUE, NUM_WARPS)
    tokens, ranges = visible_tokens(
        first_row, in_query, range_ptr + (batch * q_len + position) * 3, q_len, kv_len, GROUP_SIZE, MASK, IS_CAUSAL,
        ROWS,
    )  # fmt: skip
    begin, end, all_begin, all_end = tokens
    first_tile, end_tile = begin // TOKENS, tl.cdiv(end, TOKENS)  # the visible tiles
    visibility = (position, in_query, ranges[0], ranges[1], ranges[2], mask_ptr, mask_row_ptrs, mask_strides[3])
    # Tiles follow the exact items. A split with an item takes its first tile after its last item.
    first_own = split
    if EXACT_ITEMS > 0:
        first_own += tl.cdiv(tl.maximum(EXACT_ITEMS - split, 0), num_splits) * num_splits - EXACT_ITEMS
    own_tiles = (end_tile - first_tile - first_own + num_splits - 1) // num_splits
    first_own += first_tile
    if own_tiles > 0:
        # Prefetch the first tile while the query is rotated and scaled.
        first_block = (first_own * (TOKENS // KEY.block_tokens)).to(tl.int64)
        tile = first_own
        tokens_left = kv_len - tile * TOKENS
        prefetch(block_ptr(key_ptr, key_strides[0], first_block, KEY), key_strides[0], tokens_left, KEY, TOKENS)
        prefetch(
            block_ptr(value_ptr, value_strides[0], first_block, VALUE), value_strides[0], tokens_left, VALUE, TOKENS
        )
    query_ptrs = query_ptr + batch * query_strides[0] + head * query_strides[1] + position * query_strides[2]
    if EXACT_ITEMS > 0:
        if split < EXACT_ITEMS:
            state = attend_to_exact_blocks(
                query_ptrs, in_query, query_strides[3], score_scale, key_ptr, value_ptr, key_strides[0],
                value_strides[0], end, softcap, visibility, split, num_splits, key_scale, value_scale,
                KEY, VALUE, EXACT_KEY, EXACT_VALUE, EXACT_ITEMS, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL,
                EXACT_PRECISION, NUM_WARPS,
            )  # fmt: skip
            out_row = _out_row(batch, head, position, num_splits + split, num_kv_heads, q_len, GROUP_SIZE, PARTIAL)
            _store_output(state, out_ptr, lse_ptr, out_row, in_query, 1.0, EXACT_VALUE, MASK == "float", PARTIAL)
        # A tile with a block that may be exact counts as one that some row does not see entirely.
        packed_begin, packed_end = packed_range(recent_tags(key_ptr, KEY), recent_tags(value_ptr, VALUE), KEY, VALUE)
        all_begin, all_end = tl.maximum(all_begin, packed_begin), tl.minimum(all_end, packed_end)
    # In a long static cache with few tokens most splits have no tile.
    if MASK == "bool" and PARTIAL and own_tiles <= 0:
        out_row = _out_row(batch, head, position, split, num_kv_heads, q_len, GROUP_SIZE, PARTIAL)
        _store_nothing(out_ptr, lse_ptr, out_row, in_query, VALUE)
        return
    query = load_query(query_ptrs, in_query, query_strides[3], score_scale * key_scale, KEY)

    # Most tiles of a long context are whole: every row sees all their tokens. Their loop hides nothing.
    own_tiles = tl.maximum(own_tiles, 0)
    first_whole, end_whole = 0, 0
    state = empty_state(ROWS, NUM_WARPS, VALUE)
    if MASK != "float":
        first_whole = tl.minimum(tl.cdiv(tl.maximum(tl.cdiv(all_begin, TOKENS) - first_own, 0), num_splits), own_tiles)
        end_whole = tl.minimum(tl.cdiv(tl.maximum(all_end // TOKENS - first_own, 0), num_splits), own_tiles)
        end_whole = tl.maximum(end_whole, first_whole)
        for own_tile in tl.range(first_whole, end_whole, num_stages=NUM_STAGES):
            tile = first_own + own_tile * num_splits
            state = _attend_to_tile(
                state, query, tile, TOKENS, end, key_ptr, value_ptr, key_strides[0], value_strides[0], softcap,
                visibility, KEY, VALUE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, TOKENS, NUM_WARPS, True,
            )  # fmt: skip
    for i in tl.range(0, own_tiles - (end_whole - first_whole), num_stages=NUM_STAGES):
        tile = first_own + tl.where(i < first_whole, i, i + end_whole - first_whole) * num_splits
        state = _attend_to_tile(
            state, query, tile, kv_len - tile * TOKENS, end, key_ptr, value_ptr, key_strides[0], value_strides[0],
            softcap, visibility, KEY, VALUE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, TOKENS, NUM_WARPS,
            False,
        )  # fmt: skip

    out_row = _out_row(batch, head, position, split, num_kv_heads, q_len, GROUP_SIZE, PARTIAL)
    _store_output(state, out_ptr, lse_ptr, out_row, in_query, value_scale, VALUE, MASK == "float", PARTIAL)


@jit
def _attend_to_tile(
    state, query, tile, tokens_left, end, key_ptr, value_ptr, stride_key_block, stride_value_block, softcap, visibility,
    KEY: tl.constexpr, VALUE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, TOKENS: tl.constexpr, NUM_WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """The state of attention after one more tile of packed tokens.

    Args:
        tokens_left: tokens of the cache from the first token of the tile on, at least TOKENS if the tile IS_WHOLE.
        end: the token after the last one that any row sees.
        IS_WHOLE: whether all rows see all tokens of the tile, and none of its blocks is exact.
    """
    first_block = (tile * (TOKENS // KEY.block_tokens)).to(tl.int64)
    key_tile_ptr = block_ptr(key_ptr, stride_key_block, first_block, KEY)
    value_tile_ptr = block_ptr(value_ptr, stride_value_block, first_block, VALUE)
    keys = load_packed(key_tile_ptr, stride_key_block, tokens_left, KEY, TOKENS)
    values = load_packed(value_tile_ptr, stride_value_block, tokens_left, VALUE, TOKENS)
    scores = packed_scores(keys, query, KEY, PRECISION, TOKENS)
    if HAS_SOFTCAP:
        scores = capped(scores, softcap)
    scale, zero = token_metadata(values, VALUE, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    in_cache = token < end
    if not IS_WHOLE:
        if KEY.num_entries + VALUE.num_entries > 0:
            in_cache = in_cache & is_packed(key_ptr, value_ptr, token, tile, KEY, VALUE, TOKENS)
        scores = visible_scores(scores, token, in_cache, visibility, MASK, MASK_PER_ROW, IS_CAUSAL)
        scale, zero = tl.where(in_cache, scale, 1.0), tl.where(in_cache, zero, 0.0)
    return attend_packed(
        state, scores, values, scale, zero, in_cache, KEY, VALUE, MASK == "float", not IS_WHOLE, PRECISION, NUM_WARPS
    )


@jit
def _out_row(
    batch, head, position, split, num_kv_heads, q_len, GROUP_SIZE: tl.constexpr, PARTIAL: tl.constexpr
):  # fmt: skip
    """The rows of the output that belong to the query rows, [ROWS]."""
    row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        row += split.to(tl.int64) * tl.num_programs(0) * GROUP_SIZE * q_len
    return row


@jit
def _store_nothing(out_ptr, lse_ptr, out_row, in_query, VALUE: tl.constexpr):
    """Store the output of a split that sees no token."""
    nothing = tl.zeros_like(out_row).to(tl.float32)
    store_log_sum(lse_ptr, out_row, nothing, nothing, nothing > 0, in_query)
    channel = tl.arange(0, VALUE.padded_head_dim)[:, None]
    in_bounds = in_query[None, :] & (channel < VALUE.head_dim)
    tl.store(out_ptr + out_row[None, :] * VALUE.head_dim + channel, 0.0, mask=in_bounds)


@jit
def _store_output(
    state, out_ptr, lse_ptr, out_row, in_query, value_scale,
    VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise the accumulated output and store it; 0 for a row that saw no token."""
    maximum, scale_maximum, p_sum, zero_sum, accs = state
    total = tl.sum(tl.sum(p_sum, 0), 0)
    seen = total > 0
    inverse = tl.where(seen, 1.0 / total, 0.0) * value_scale
    if PARTIAL:
        total_log2 = tl.log2(total) - 15.0
        if WIDE_SCORES and weighs_scales(VALUE):
            total_log2 += scale_maximum
        store_log_sum(lse_ptr, out_row, maximum, total_log2, seen, in_query)
    zero = tl.sum(tl.sum(zero_sum, 0), 0)[None, :]
    column = tl.arange(0, VALUE.padded_width)[:, None]
    in_bounds = in_query[None, :] & (column < VALUE.width)
    out_ptrs = out_ptr + out_row[None, :] * VALUE.head_dim + column
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for plane in tl.static_range(NUM_PLANES):
        out = (first_columns(accs[plane], inverse.shape[0]) * VALUE.gains[plane] + zero) * inverse[None, :]
        tl.store(out_ptrs + plane * VALUE.width, out, mask=in_bounds)


@jit(do_not_specialize=["num_rows", "num_splits", "exact_splits", "exact_items", "num_heads", "q_len", "tile_tokens"])
def combine_kernel(
    partial_ptr, lse_ptr, sinks_ptr, range_ptr, out_ptr, out_lse_ptr,
    num_rows, num_splits, exact_splits, exact_items, num_heads, q_len, tile_tokens,
    VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    POSITIONS: tl.constexpr, STARTS_EARLY: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS query rows by their log-sum-exp, and undo the rotation. Grid (num_rows / ROWS,).

    Args:
        partial_ptr: float32 [num_splits + exact_splits, num_rows, head_dim]; rows are [batch, num_heads, q_len]. The
            outputs of the last ``exact_splits`` splits are in the original basis.
        lse_ptr: float32 [num_splits + exact_splits, num_rows, 2], in units of log2: the largest score, -inf for a split
            that saw no token; and the log of the sum of exponentials relative to the largest score.
        sinks_ptr: with HAS_SINKS [num_heads], any float dtype: a further score of each row of a head, with a value of
            zero.
        range_ptr: if POSITIONS is not 0, the ranges of :func:`attention_kernel`. In a long cache with few visible
            tokens only the first splits have a tile, and only they are merged.
        exact_items: EXACT_ITEMS of :func:`attention_kernel`, which come before the tiles.
        out_ptr: [num_rows, head_dim], any float dtype; zeros for a row that saw no token.
        out_lse_ptr: with WITH_LSE float32 [num_rows, 2], the log-sum-exp of all splits, in the form of ``lse_ptr``.
        tile_tokens: tokens of a tile of :func:`attention_kernel`.
        SPLITS: splits that are read at once.
        POSITIONS: 0 without ranges; otherwise at least ``q_len``, and ROWS is 1.
        STARTS_EARLY: whether the kernel may start before the kernel that computes the splits has ended.
    """
    if POSITIONS > 0:
        # Ranges may be read before the wait: they existed before the kernel that computes the splits started.
        sequence = (tl.program_id(0) // (num_heads * q_len)).to(tl.int64)
        tiles = num_visible_tiles(range_ptr + sequence * q_len * 3, q_len, tile_tokens, POSITIONS)
        merged_splits = tl.minimum(num_splits, tiles + exact_items)
    else:
        merged_splits = num_splits
    if STARTS_EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row // q_len % num_heads, mask=row < num_rows, other=0.0)
        maximum = sink.to(tl.float32) * 1.4426950408889634
        total = tl.where(maximum > float("-inf"), 1.0, 0.0)
    else:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
    acc = tl.full([ROWS, VALUE.padded_head_dim], 0.0, tl.float32)
    state = (maximum, total, acc)
    state = _add_splits(state, partial_ptr, lse_ptr, row, num_rows, 0, merged_splits, VALUE, SPLITS)
    maximum, total, acc = state
    if VALUE.rotated:
        acc = unrotate(acc, VALUE)
    state = (maximum, total, acc)
    state = _add_splits(
        state, partial_ptr, lse_ptr, row, num_rows, num_splits, num_splits + exact_splits, VALUE, SPLITS
    )
    maximum, total, acc = state
    if WITH_LSE:
        store_log_sum(out_lse_ptr, row, maximum, tl.log2(total), total > 0, row < num_rows)
    out = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    channel = tl.arange(0, VALUE.padded_head_dim)[None, :]
    out_ptrs = out_ptr + row[:, None] * VALUE.head_dim + channel
    tl.store(out_ptrs, out, mask=(row < num_rows)[:, None] & (channel < VALUE.head_dim))


@jit
def _add_splits(
    state, partial_ptr, lse_ptr, row, num_rows, first_split, end_split, VALUE: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """The state (maximum, total, acc) of :func:`combine_kernel` after the splits from first_split to end_split."""
    maximum, total, acc = state
    channel = tl.arange(0, VALUE.padded_head_dim)
    in_head = (channel < VALUE.head_dim)[None, :]
    for first in range(first_split, end_split, SPLITS):
        split = first + tl.arange(0, SPLITS)[None, :]
        in_bounds = (split < end_split) & (row < num_rows)[:, None]
        index = split.to(tl.int64) * num_rows + row[:, None]
        largest = tl.load(lse_ptr + 2 * index, mask=in_bounds, other=float("-inf"))
        total_log2 = tl.load(lse_ptr + 2 * index + 1, mask=in_bounds, other=0.0)
        partial_ptrs = partial_ptr + index[:, :, None] * VALUE.head_dim + channel[None, None, :]
        partial = tl.load(partial_ptrs, mask=in_bounds[:, :, None] & in_head[None, :, :], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(largest, 1))
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2((largest - finite_maximum[:, None]) + total_log2)
        decay = tl.exp2(maximum - finite_maximum)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None] + tl.sum(partial * weight[:, :, None], 1)
        maximum = new_maximum
    return maximum, total, acc
