"""Decode attention on packed caches in Triton: one kernel for every format.

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
largest weight. Smaller weights have an error of at most 2**-40 of the largest weight. The sums of
``p = weight / v_scale`` and of ``p * v_zero`` are float32.

A tensor core product has at least eight columns, and four query heads of a KV head fill only half of them. Each row
then takes two neighbouring columns. Either the softmax skips every other column, or the two columns are the digits of
an integer query (:mod:`kvcompile.kernels.attention.query`).

The tokens of a KV head are divided among splits, so that all programs of the device have work. If there are more KV
heads than programs run at once, only the last KV heads are divided, see
:func:`kvcompile.kernels.attention.divisions.division_of`.
Splits take turns at the visible tiles: split ``s`` takes the tiles ``s``, ``s + num_splits``, and so on. All splits
have work even if only a part of the cache is visible. :mod:`kvcompile.kernels.attention.splits` merges their outputs.
If the caches have exact blocks, other programs attend to them, or the splits take turns at them after their tiles, see
:mod:`kvcompile.kernels.attention.exact_blocks`.

A separate kernel multiplies pre-RoPE keys by key factors (:mod:`kvcompile.kernels.spec.key_factors`). Both kernels
share all functions, and the kernel without key factors compiles as if the other did not exist.

A device fetches the first 64 KiB of a kernel's code when it launches the kernel. Each later cache line of code costs a
program 30 to 50 ns when it first runs, which a single warp per scheduler cannot hide. One loop therefore serves all
tiles, and code that rarely runs is a separate function at the end.

Reading beyond the visible tokens is safe. A tile loads only blocks that exist. Invisible tokens get a score of -inf, a
scale of 1 and a zero point of 0, and every byte has a finite level.
"""

from __future__ import annotations

from kvcompile.compat.triton_names import gdc_launch_dependents
from kvcompile.kernels.attention.exact_blocks import (
    attend_to_exact_blocks,
    hold_different_blocks,
    is_packed,
    own_turn,
    own_turns,
    prefetch_item,
    tags_of,
    without_exact_blocks,
)
from kvcompile.kernels.attention.key_factors import load_paired_rows, query_with_pairs, scores_with_factors
from kvcompile.kernels.attention.query import load_query_rows, query_of, rows_of_program
from kvcompile.kernels.attention.softmax_tile import (
    attend_packed,
    capped,
    empty_state,
    metadata_of_tokens,
    packed_scores,
    token_metadata,
    visible_scores,
)
from kvcompile.kernels.attention.splits import out_rows, store_nothing, store_output
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.tiles.header import block_ptr
from kvcompile.kernels.tiles.packed import load_packed, prefetch, shifts_of_words


@jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_whole", "num_splits", "exact_programs"])
def attention_kernel(
    query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr,
    query_strides, key_strides, value_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_whole, num_splits, exact_programs, score_scale, softcap, key_scale, value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr, MERGES_EARLY: tl.constexpr,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, EXACT_ITEMS: tl.constexpr, EXACT_PRECISION: tl.constexpr,
    EXACT_STAGES: tl.constexpr, EXACT_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS query rows of one KV head, and all tokens or one split of them.

    Grid (num_divided, rows, num_whole + num_splits), where ``num_divided`` is the number of KV heads of all sequences
    divided by ``1 + num_whole``. The last ``num_divided`` KV heads have ``num_splits`` splits. The tokens of all
    earlier ones are not split, and these programs start first. ``(1 + num_whole) * exact_programs`` programs that
    attend to exact blocks follow in the third dimension.

    Args:
        query_ptr: [batch, num_heads, q_len, head_dim], strides (batch, head, position, channel).
        key_ptr, value_ptr: packed data, uint8, strides (block, batch, head) in bytes.
        mask_ptr: [batch, num_heads, q_len, kv_len], strides of 0 where it broadcasts; uint8 if MASK is "bool", any
            float dtype if MASK is "float", unused if MASK is "none".
        range_ptr: int32 [batch, q_len, 3], the ranges of a bool mask, see :mod:`kvcompile.kernels.tiles.visible_range`.
        out_ptr: [batch, num_heads, q_len, v_head_dim], or with PARTIAL float32 [outputs, v_head_dim] in the
            order of :func:`kvcompile.kernels.attention.splits.out_rows`. Outputs of packed tokens are in the stored
            basis, and outputs of exact blocks in the original basis.
        lse_ptr: with PARTIAL, the log-sum-exp in units of log2 and in two parts, as in
            :func:`kvcompile.kernels.attention.splits.combine_kernel`.
        num_whole: KV heads with one program for each KV head with ``num_splits`` programs.
        score_scale: factor of the scores times log2(e).
        softcap: with HAS_SOFTCAP, the bound of the scores times log2(e).
        key_scale, value_scale: static scales. They are arguments because layers differ in them and share the kernel.
        MASK_PER_ROW: whether the mask differs between the rows of a KV head.
        MERGES_EARLY: whether the kernel that merges the splits may start before this one ends. This kernel itself never
            starts early: its programs fill the device in one wave, and the last programs of the previous kernel
            would leave no room for all of them.
        EXACT_ITEMS: the number of items of exact blocks, 0 if there are no entries. Otherwise PARTIAL must be set.
        EXACT_STAGES: items whose rows are in use or loaded ahead.
        EXACT_PROGRAMS: whether ``exact_programs``, the programs of a KV head that attend to exact blocks alone, is not
            0. These programs take turns at the items. Otherwise the splits of packed tokens do so.
    """
    _attend(
        None, query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr, query_strides, key_strides,
        value_strides, mask_strides, num_kv_heads, q_len, kv_len, num_whole, num_splits, exact_programs, score_scale,
        softcap, key_scale, value_scale, KEY, VALUE, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PARTIAL,
        PRECISION, ROWS, TOKENS, NUM_WARPS, NUM_STAGES, MERGES_EARLY, EXACT_KEY, EXACT_VALUE, EXACT_ITEMS,
        EXACT_PRECISION, EXACT_STAGES, EXACT_PROGRAMS, False,
    )  # fmt: skip


@jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_factors", "num_whole", "num_splits", "exact_programs"])
def attention_with_factors_kernel(
    query_ptr, paired_ptr, factors_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr,
    query_strides, paired_strides, key_strides, value_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_factors, num_whole, num_splits, exact_programs, score_scale, softcap, key_scale,
    value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr, MERGES_EARLY: tl.constexpr,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, EXACT_ITEMS: tl.constexpr, EXACT_PRECISION: tl.constexpr,
    EXACT_STAGES: tl.constexpr, EXACT_PROGRAMS: tl.constexpr,
):  # fmt: skip
    """:func:`attention_kernel` for keys that are multiplied by factors (:mod:`kvcompile.kernels.spec.key_factors`).

    Args:
        paired_ptr: the paired query, [batch, num_heads, q_len, head_dim], strides (batch, head, position, channel).
        factors_ptr: [2, num_factors, head_dim], any float dtype, contiguous.
        num_factors: the number of tokens that have factors, at least ``kv_len``.
    """
    factors = (
        paired_ptr, paired_strides[0], paired_strides[1], paired_strides[2], paired_strides[3], factors_ptr,
        num_factors,
    )  # fmt: skip
    _attend(
        factors, query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr,
        out_ptr, lse_ptr, query_strides, key_strides, value_strides, mask_strides, num_kv_heads, q_len, kv_len,
        num_whole, num_splits, exact_programs, score_scale, softcap, key_scale, value_scale, KEY, VALUE, GROUP_SIZE,
        HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PARTIAL, PRECISION, ROWS, TOKENS, NUM_WARPS, NUM_STAGES,
        MERGES_EARLY, EXACT_KEY, EXACT_VALUE, EXACT_ITEMS, EXACT_PRECISION, EXACT_STAGES, EXACT_PROGRAMS, True,
    )  # fmt: skip


@jit
def _attend(
    factors, query_ptr, key_ptr, value_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr,
    query_strides, key_strides, value_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_whole, num_splits, exact_programs, score_scale, softcap, key_scale, value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr, MERGES_EARLY: tl.constexpr,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, EXACT_ITEMS: tl.constexpr, EXACT_PRECISION: tl.constexpr,
    EXACT_STAGES: tl.constexpr, EXACT_PROGRAMS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """:func:`attention_kernel`. If HAS_FACTORS, ``factors`` is the argument of
    :func:`kvcompile.kernels.attention.key_factors.load_paired_rows`, otherwise None.
    """
    if MERGES_EARLY:
        gdc_launch_dependents()
    arguments = (
        num_kv_heads, q_len, kv_len, query_ptr, query_strides, key_ptr, key_strides, value_ptr, value_strides, mask_ptr,
        mask_strides, range_ptr,
    )  # fmt: skip
    rows_of_heads = tl.num_programs(0).to(tl.int64) * GROUP_SIZE * q_len  # query rows of num_divided KV heads
    outputs = (
        out_ptr, lse_ptr, rows_of_heads, rows_of_heads * (num_whole + num_splits), rows_of_heads * (num_whole + 1),
    )  # fmt: skip
    scales = score_scale, softcap, key_scale, value_scale
    index = tl.program_id(2)
    attends_to_exact = EXACT_PROGRAMS and index >= num_whole + num_splits
    if not attends_to_exact:
        number = tl.program_id(0) + tl.minimum(index, num_whole) * tl.num_programs(0)
        program, caches = _program_of(number, arguments, KEY, VALUE, ROWS)
        _attend_to_packed(
            program, factors, caches, outputs, scales, tl.maximum(index - num_whole, 0),
            tl.where(index < num_whole, 1, num_splits), KEY, VALUE, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW,
            IS_CAUSAL, PARTIAL, PRECISION, ROWS, TOKENS, NUM_WARPS, NUM_STAGES, EXACT_KEY, EXACT_VALUE,
            0 if EXACT_PROGRAMS else EXACT_ITEMS, EXACT_PRECISION, EXACT_STAGES, HAS_FACTORS,
        )  # fmt: skip
    elif EXACT_PROGRAMS:
        index -= num_whole + num_splits
        number = tl.program_id(0) + index // exact_programs * tl.num_programs(0)
        program, caches = _program_of(number, arguments, KEY, VALUE, ROWS)
        apart = hold_different_blocks(tags_of(caches[0], KEY), tags_of(caches[1], VALUE), KEY, VALUE)
        attend_to_exact_blocks(
            program, factors, caches, outputs, scales, apart, index % exact_programs, exact_programs, KEY, VALUE,
            EXACT_KEY, EXACT_VALUE, EXACT_ITEMS, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL,
            EXACT_PRECISION, EXACT_STAGES, ROWS, NUM_WARPS, HAS_FACTORS,
        )  # fmt: skip


@jit
def _program_of(number, arguments, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr):
    """The tuples ``program`` and ``caches`` of the KV head ``number``, see
    :func:`kvcompile.kernels.attention.exact_blocks.attend_to_exact_blocks`.
    """
    (
        num_kv_heads, q_len, kv_len, query_ptr, query_strides, key_ptr, key_strides, value_ptr, value_strides, mask_ptr,
        mask_strides, range_ptr,
    ) = arguments  # fmt: skip
    batch = (number // num_kv_heads).to(tl.int64)
    kv_head = (number % num_kv_heads).to(tl.int64)
    # The last tile of rows comes first, because it takes longest under a causal mask.
    first_row = (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS
    key_ptr = referred(key_ptr, KEY) + batch * key_strides[1] + kv_head * key_strides[2]
    value_ptr = referred(value_ptr, VALUE) + batch * value_strides[1] + kv_head * value_strides[2]
    program = (
        first_row, batch, kv_head, num_kv_heads, q_len, kv_len, query_ptr, query_strides, mask_ptr, mask_strides,
        range_ptr,
    )  # fmt: skip
    return program, (key_ptr, value_ptr, key_strides[0], value_strides[0])


@jit
def _attend_to_packed(
    program, factors, caches, outputs, scales, split, num_splits,
    KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, OWN_ITEMS: tl.constexpr, EXACT_PRECISION: tl.constexpr,
    EXACT_STAGES: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """Attend to the packed tokens of a split, and store the output.

    The splits also take turns at OWN_ITEMS items of exact blocks. The arguments are the same as in
    :func:`kvcompile.kernels.attention.exact_blocks.attend_to_exact_blocks`, where ``scales`` are ``factors``.
    """
    key_ptr, value_ptr, stride_key_block, stride_value_block = caches
    score_scale, softcap, key_scale, value_scale = scales
    kv_len = program[5]
    # The ranges of visible tokens, the query and the tags are needed first, and are loaded first.
    position, head, in_query, query_ptrs, tokens, _ = rows_of_program(program, GROUP_SIZE, MASK, IS_CAUSAL, ROWS)
    q = load_query_rows(query_ptrs, in_query, program[7][3], KEY)
    if HAS_FACTORS:
        paired = load_paired_rows(factors, program, head, position, in_query, KEY)
    if OWN_ITEMS > 0 and split < OWN_ITEMS:
        prefetch_item(key_ptr, value_ptr, stride_key_block, stride_value_block, split, KEY, VALUE, NUM_WARPS)
    if KEY.num_entries + VALUE.num_entries > 0:
        key_tags, value_tags = tags_of(key_ptr, KEY), tags_of(value_ptr, VALUE)
        tokens, apart = without_exact_blocks(tokens, key_tags, value_tags, KEY, VALUE)
    begin, end, all_begin, all_end = tokens

    first_tile, end_tile = begin // TOKENS, tl.cdiv(end, TOKENS)  # the visible tiles
    turns = own_turns(split, num_splits, end_tile - first_tile, OWN_ITEMS)
    own_tiles = turns[0]
    if own_tiles > 0:
        # Prefetch the first tile while the query is rotated and scaled.
        tile = first_tile + own_turn(turns, 0, split, num_splits, OWN_ITEMS)
        first_block = (tile * (TOKENS // KEY.block_tokens)).to(tl.int64)
        tokens_left = kv_len - tile * TOKENS
        prefetch(block_ptr(key_ptr, stride_key_block, first_block, KEY), stride_key_block, tokens_left, KEY, TOKENS)
        prefetch(
            block_ptr(value_ptr, stride_value_block, first_block, VALUE), stride_value_block, tokens_left, VALUE, TOKENS
        )

    out_row = out_rows(program, head, position, split, outputs[2], GROUP_SIZE, PARTIAL)
    # In a long static cache with few tokens most splits have no tile.
    if MASK == "bool" and PARTIAL and own_tiles <= 0:
        store_nothing(outputs[0], outputs[1], out_row, in_query, VALUE)
    else:
        if HAS_FACTORS:
            query = query_with_pairs(q, paired, score_scale * key_scale, KEY)
        else:
            query = query_of(q, score_scale * key_scale, KEY, NUM_WARPS)
        state = empty_state(ROWS, NUM_WARPS, VALUE)
        shifts = shifts_of_words(key_ptr, kv_len < 0, KEY), shifts_of_words(value_ptr, kv_len < 0, VALUE)
        for own_tile in tl.range(0, tl.maximum(own_tiles, 0), num_stages=NUM_STAGES):
            tile = first_tile + own_turn(turns, own_tile, split, num_splits, OWN_ITEMS)
            is_whole = (tile * TOKENS >= all_begin) & ((tile + 1) * TOKENS <= all_end)
            state = _attend_to_tile(
                state, query, tile, is_whole, end, key_ptr, value_ptr, stride_key_block, stride_value_block, shifts,
                softcap, program, factors, KEY, VALUE, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL,
                PRECISION, ROWS, TOKENS, NUM_WARPS, HAS_FACTORS,
            )  # fmt: skip
        store_output(state, outputs[0], outputs[1], out_row, in_query, value_scale, VALUE, MASK == "float", PARTIAL)
    if OWN_ITEMS > 0 and split < OWN_ITEMS:
        attend_to_exact_blocks(
            program, factors, caches, outputs, scales, apart, split, num_splits, KEY, VALUE, EXACT_KEY, EXACT_VALUE,
            OWN_ITEMS, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, EXACT_PRECISION, EXACT_STAGES, ROWS,
            NUM_WARPS, HAS_FACTORS,
        )  # fmt: skip


@jit
def _attend_to_tile(
    state, query, tile, is_whole, end, key_ptr, value_ptr, stride_key_block, stride_value_block, shifts, softcap,
    program, factors, KEY: tl.constexpr, VALUE: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, NUM_WARPS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """The state of attention after one more tile of packed tokens.

    Args:
        is_whole: whether all rows see all tokens of the tile, and none of its blocks is exact. Most tiles of a long
            context are whole, and nothing is hidden in them. The operands that hide tokens are therefore not kept in
            registers, but computed again for each tile that is not whole.
        end: the token after the last one that any row sees.
        program: the argument of :func:`kvcompile.kernels.attention.query.rows_of_program`.
        factors, HAS_FACTORS: arguments of :func:`_attend`.
    """
    first_block = (tile * (TOKENS // KEY.block_tokens)).to(tl.int64)
    key_tile_ptr = block_ptr(key_ptr, stride_key_block, first_block, KEY)
    value_tile_ptr = block_ptr(value_ptr, stride_value_block, first_block, VALUE)
    # The first block of a visible tile exists.
    tokens_left = TOKENS if KEY.block_tokens == TOKENS else program[5] - tile * TOKENS
    keys = load_packed(key_tile_ptr, stride_key_block, tokens_left, shifts[0], KEY, TOKENS)
    values = load_packed(value_tile_ptr, stride_value_block, tokens_left, shifts[1], VALUE, TOKENS)
    if HAS_FACTORS:
        token = tile * TOKENS + tl.arange(0, TOKENS)
        scores = scores_with_factors(keys, query, factors, token, program[5], KEY, PRECISION, TOKENS)
    else:
        scores = packed_scores(keys, query, KEY, PRECISION, TOKENS, NUM_WARPS)
    if HAS_SOFTCAP:
        scores = capped(scores, softcap)
    scales, zero = token_metadata(values, VALUE, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    in_cache = token < end
    if not is_whole:
        if KEY.num_entries + VALUE.num_entries > 0:
            in_cache = in_cache & is_packed(key_ptr, value_ptr, token, tile, KEY, VALUE, TOKENS)
        visibility = rows_of_program(program, GROUP_SIZE, MASK, IS_CAUSAL, ROWS)[5]
        scores = visible_scores(scores, token, in_cache, visibility, MASK, MASK_PER_ROW, IS_CAUSAL)
        scales, zero = metadata_of_tokens(scales, zero, in_cache)
    return attend_packed(
        state, scores, values, scales, zero, in_cache, is_whole, KEY, VALUE, MASK == "float", PRECISION, NUM_WARPS
    )
