"""Attention to the exact blocks in the header of a packed cache.

The loop over tiles of packed tokens skips or hides exact blocks. They have a separate softmax, whose result the kernel
that merges the splits adds. Exact rows are in the original basis, and so are the query and the output here. They need
no rotation.

Work is divided into *items*, which are runs of rows of one entry. If a multiprocessor has room for more programs, the
last programs of the grid take turns at the items and do nothing else
(:func:`kvcompile.kernels.attention.divisions.exact_programs_of`). Otherwise the splits of packed tokens take turns at
the items after their tiles. A split with one item fewer than the others then takes more tiles (:func:`own_turns`), so
all splits have equal work. It prefetches the rows of its first item when it starts, before it knows which block the
entry holds.

A block may be exact for keys only, or for values only. The rows of the other operand are then decoded. If keys and
values have the same number of entries, this is rare: their blocks differ only if keys and values were written to
different tokens. Decoding takes many instructions, and is therefore a separate function.
"""

from __future__ import annotations

from kvcompile.kernels.attention.key_factors import load_paired_rows, products_with_factors, query_with_pairs
from kvcompile.kernels.attention.query import first_columns, load_query_columns, load_query_rows, rows_of_program
from kvcompile.kernels.attention.softmax_tile import (
    accumulate,
    capped,
    empty_state,
    levels_of_tokens,
    products_of,
    visible_scores,
    weigh,
)
from kvcompile.kernels.attention.splits import exact_rows, store_output
from kvcompile.kernels.lang.triton import constant, constexpr_function, jit, tl
from kvcompile.kernels.tiles.header import block_ptr, entry_of, is_exact, load_rows, prefetch_rows, tag_ptrs
from kvcompile.kernels.tiles.rows import decode_rows

NO_BLOCK = constant(1 << 24)
"""A block beyond every cache: its tokens have positions that int32 can hold."""

TILES_OF_ITEM = constant(3)
"""An item takes a program as long as this number of tiles, because the program waits for memory and for code."""


def num_items(num_entries: int, block_tokens: int, num_warps: int) -> int:
    """The number of items of a cache pair with ``num_entries`` entries: each warp takes 16 rows of a block.

    Args:
        num_entries: entries of keys or of values, whichever are more.
        block_tokens: tokens of a block.
        num_warps: warps of a program.
    """
    return num_entries * (block_tokens // (16 * num_warps))


@jit
def own_turns(split, num_splits, num_tiles, ITEMS: tl.constexpr):
    """The number of tiles, out of ``num_tiles``, that a split takes, and the numbers that :func:`own_turn` needs.

    If some splits have one more item than the others, the others take TILES_OF_ITEM tiles more, before all take turns.
    """
    early, width, offset = 0, num_splits, 0
    if ITEMS > 0:
        busy = ITEMS % num_splits  # the first splits, which have one more item
        width = num_splits - busy
        offset = tl.where(busy > 0, TILES_OF_ITEM * width, 0)
        early = tl.minimum(tl.cdiv(tl.maximum(num_tiles - (split - busy), 0), width), TILES_OF_ITEM)
        early = tl.where((busy > 0) & (split >= busy), early, 0)
    own = (num_tiles - split - offset + num_splits - 1) // num_splits  # 0 or less without a tile
    if ITEMS > 0:
        own = early + tl.maximum(own, 0)
    return own, early, width, offset


@jit
def own_turn(turns, i, split, num_splits, ITEMS: tl.constexpr):
    """The number of the tile that a split takes in its turn ``i``. ``turns`` is the result of :func:`own_turns`."""
    tile = split + i * num_splits
    if ITEMS > 0:
        _, early, width, offset = turns
        busy = num_splits - width
        tile = tl.where(i < early, split - busy + i * width, offset + split + (i - early) * num_splits)
    return tile


@jit
def tags_of(header_ptr, OPERAND: tl.constexpr):
    """The tags of all entries, int32 of any length; 0 where there is no entry."""
    tags = tl.full([1], 0, tl.int32)
    if OPERAND.num_entries > 0:
        entry = tl.arange(0, OPERAND.residual.padded_entries)
        tags = tl.load(tag_ptrs(header_ptr, entry), mask=entry < OPERAND.num_entries, other=0)
    return tags


@jit
def without_exact_blocks(tokens, key_tags, value_tags, KEY: tl.constexpr, VALUE: tl.constexpr):
    """The visible tokens without the exact blocks at both ends.

    If keys and values have the same exact blocks, the loop over packed tokens skips the first blocks once all their
    entries are filled, and the last blocks if all of them up to the last visible one are exact. It hides all other
    exact blocks.

    Args:
        tokens: the ranges of :func:`kvcompile.kernels.tiles.visible_range.visible_tokens`.
        key_tags, value_tags: the results of :func:`tags_of`.

    Returns:
        tokens: the ranges of the loop. The second one has only tokens that are exact for neither keys nor values.
        apart: the result of :func:`hold_different_blocks`.
    """
    begin, end, all_begin, all_end = tokens
    BLOCK: tl.constexpr = KEY.block_tokens
    SINKS: tl.constexpr = max(_num_sinks(KEY), _num_sinks(VALUE))
    first_recent = tl.minimum(_first_recent_block(key_tags, KEY), _first_recent_block(value_tags, VALUE))
    apart = hold_different_blocks(key_tags, value_tags, KEY, VALUE)
    if have_same_entries(KEY, VALUE):
        entry, end_block = tl.arange(0, key_tags.shape[0]), tl.cdiv(end, BLOCK)
        num_sinks = tl.sum(((entry < SINKS) & (key_tags > 0)).to(tl.int32), 0)
        num_recent = tl.sum(((entry >= SINKS) & (key_tags > 0) & (key_tags <= end_block)).to(tl.int32), 0)
        skips_first = (apart == 0) & (num_sinks == SINKS)
        skips_last = (apart == 0) & (num_recent > 0) & (num_recent == end_block - first_recent)
        begin = tl.where(skips_first, tl.maximum(begin, SINKS * BLOCK), begin)
        end = tl.where(skips_last, tl.minimum(end, first_recent * BLOCK), end)
    all_begin = tl.maximum(all_begin, SINKS * BLOCK)
    all_end = tl.minimum(all_end, first_recent * BLOCK)
    return (begin, end, all_begin, all_end), apart


@jit
def hold_different_blocks(key_tags, value_tags, KEY: tl.constexpr, VALUE: tl.constexpr):
    """Whether some entry holds one block for keys and another one for values; False if their entries differ."""
    apart = False
    if have_same_entries(KEY, VALUE):
        apart = tl.max((key_tags != value_tags).to(tl.int32), 0) != 0
    return apart


@jit
def _first_recent_block(tags, OPERAND: tl.constexpr):
    """The first block in an entry of a recent block."""
    is_recent = (tags > 0) & (tl.arange(0, tags.shape[0]) >= _num_sinks(OPERAND))
    return tl.min(tl.where(is_recent, tags - 1, NO_BLOCK), 0)


@constexpr_function
def _num_sinks(operand):
    return 0 if operand.residual is None else operand.residual.sink_blocks


@jit
def is_packed(key_ptr, value_ptr, token, tile, KEY: tl.constexpr, VALUE: tl.constexpr, TOKENS: tl.constexpr):
    """Whether the block of each ``token`` of a tile is exact for neither keys nor values."""
    BLOCKS: tl.constexpr = TOKENS // KEY.block_tokens
    packed = token >= 0
    for i in tl.static_range(BLOCKS):
        block = tile * BLOCKS + i
        exact = is_exact(key_ptr, block, KEY) | is_exact(value_ptr, block, VALUE)
        packed = packed & ((token // KEY.block_tokens != block) | (exact == 0))
    return packed


@jit
def prefetch_item(
    key_ptr, value_ptr, stride_key_block, stride_value_block, item,
    KEY: tl.constexpr, VALUE: tl.constexpr, NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """Prefetch the rows of an item, whose addresses do not depend on the tag of its entry."""
    TOKENS: tl.constexpr = 16 * NUM_WARPS
    RUNS: tl.constexpr = KEY.block_tokens // TOKENS
    entry, first_row = item // RUNS, item % RUNS * TOKENS
    prefetch_rows(key_ptr, stride_key_block, entry, first_row, KEY, TOKENS)
    prefetch_rows(value_ptr, stride_value_block, entry, first_row, VALUE, TOKENS)


@jit
def attend_to_exact_blocks(
    program, key_factors, caches, outputs, factors, apart, split, num_splits,
    KEY: tl.constexpr, VALUE: tl.constexpr, EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, ITEMS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """Attend to the items ``split``, ``split + num_splits``, ... of the ITEMS items, and store the output.

    The query and the ranges are loaded again, so that a loop over tiles before it need not keep them in registers.

    Args:
        program: the argument of :func:`kvcompile.kernels.attention.query.rows_of_program`.
        key_factors: if HAS_FACTORS, the argument of
            :func:`kvcompile.kernels.attention.key_factors.load_paired_rows`; otherwise None.
        caches: (key_ptr, value_ptr, stride_key_block, stride_value_block): the headers of both caches of a head, and
            the bytes from one block to the next.
        outputs: (out_ptr, lse_ptr, rows_of_split, first_exact_row, num_rows), see
            :func:`kvcompile.kernels.attention.splits.out_rows` and
            :func:`kvcompile.kernels.attention.splits.exact_rows`.
        factors: (score_scale, softcap, key_scale, value_scale).
        apart: the result of :func:`hold_different_blocks`.
        EXACT_KEY, EXACT_VALUE: descriptions of vectors in bfloat16 or float32. Products of tf32 are exact for the rows
            and queries of a half-precision model, and round softmax weights as fp16 does.
    """
    SAME_ENTRIES: tl.constexpr = have_same_entries(KEY, VALUE)
    if SAME_ENTRIES and apart:
        _attend_in_function(
            program, key_factors, caches, outputs, factors, split, num_splits, KEY, VALUE, EXACT_KEY, EXACT_VALUE,
            ITEMS, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, NUM_STAGES, ROWS, NUM_WARPS,
            False, HAS_FACTORS,
        )  # fmt: skip
    else:
        _attend_here(
            program, key_factors, caches, outputs, factors, split, num_splits, KEY, VALUE, EXACT_KEY, EXACT_VALUE,
            ITEMS, GROUP_SIZE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, NUM_STAGES, ROWS, NUM_WARPS,
            SAME_ENTRIES, HAS_FACTORS,
        )  # fmt: skip


def _attend_to_items(
    program, key_factors, caches, outputs, factors, split, num_splits,
    KEY: tl.constexpr, VALUE: tl.constexpr, EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, ITEMS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, SAME_BLOCKS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """:func:`attend_to_exact_blocks`. With SAME_BLOCKS every entry holds the same block for keys and for values."""
    score_scale, softcap, key_scale, value_scale = factors
    position, head, in_query, query_ptrs, tokens, visibility = rows_of_program(
        program, GROUP_SIZE, MASK, IS_CAUSAL, ROWS
    )
    if HAS_FACTORS:
        q = load_query_rows(query_ptrs, in_query, program[7][3], EXACT_KEY)
        paired = load_paired_rows(key_factors, program, head, position, in_query, EXACT_KEY)
        query = query_with_pairs(q, paired, score_scale, EXACT_KEY)
    else:
        query = load_query_columns(program, GROUP_SIZE, ROWS, EXACT_KEY)
    state = empty_state(ROWS, NUM_WARPS, EXACT_VALUE)
    TOKENS: tl.constexpr = 16 * NUM_WARPS
    RUNS: tl.constexpr = KEY.block_tokens // TOKENS
    key_ptr, value_ptr, stride_key_block, stride_value_block = caches
    if SAME_BLOCKS:
        # Rows are loaded ahead. All items take the same code: the tokens of an empty entry are hidden.
        for item in tl.range(split, ITEMS, num_splits, num_stages=NUM_STAGES):
            entry, first_row = item // RUNS, item % RUNS * TOKENS
            keys = load_rows(key_ptr, stride_key_block, entry, first_row, KEY, TOKENS).to(EXACT_KEY.dtype)
            values = load_rows(value_ptr, stride_value_block, entry, first_row, VALUE, TOKENS).to(EXACT_VALUE.dtype)
            first_token = (tl.load(tag_ptrs(key_ptr, entry)) - 1) * KEY.block_tokens + first_row
            state = _attend_to_rows(
                state, query, keys, values, first_token, program, key_factors, tokens, visibility, score_scale, softcap,
                EXACT_KEY, EXACT_VALUE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, ROWS, NUM_WARPS,
                HAS_FACTORS,
            )  # fmt: skip
    else:
        # An item has the rows of the block that the entry holds for keys. If the entry holds another block for values,
        # and no entry holds that block for keys, the item has its rows, too.
        for item in range(split, ITEMS, num_splits):
            entry, first_row = item // RUNS, item % RUNS * TOKENS
            key_tag, value_tag = _tag(key_ptr, entry, KEY), _tag(value_ptr, entry, VALUE)
            for holder in range(2):
                block, key_exact, value_exact = _block_of(holder, key_tag, value_tag, key_ptr, value_ptr, KEY, VALUE)
                if (block >= 0) & (block * KEY.block_tokens < tokens[1]):
                    values = _rows(
                        value_ptr, stride_value_block, block, first_row, value_exact, value_scale, VALUE, EXACT_VALUE,
                        TOKENS,
                    )  # fmt: skip
                    keys = _rows(
                        key_ptr, stride_key_block, block, first_row, key_exact, key_scale, KEY, EXACT_KEY, TOKENS
                    )
                    first_token = block * KEY.block_tokens + first_row
                    state = _attend_to_rows(
                        state, query, keys, values, first_token, program, key_factors, tokens, visibility, score_scale,
                        softcap, EXACT_KEY, EXACT_VALUE, HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL, PRECISION, ROWS,
                        NUM_WARPS, HAS_FACTORS,
                    )  # fmt: skip
    out_row = exact_rows(program, head, position, split, outputs, GROUP_SIZE)
    store_output(state, outputs[0], outputs[1], out_row, in_query, 1.0, EXACT_VALUE, MASK == "float", True)


_attend_here = jit(_attend_to_items)
_attend_in_function = jit(noinline=True)(_attend_to_items)
"""A separate function in the machine code: entries rarely hold different blocks, and decoding is long code."""


@jit
def _attend_to_rows(
    state, query, keys, values, first_token, program, key_factors, tokens, visibility, score_scale, softcap,
    EXACT_KEY: tl.constexpr, EXACT_VALUE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    NUM_WARPS: tl.constexpr, HAS_FACTORS: tl.constexpr,
):  # fmt: skip
    """The state of a softmax over exact tokens after more tokens.

    Args:
        query: columns, or with HAS_FACTORS the result of
            :func:`kvcompile.kernels.attention.key_factors.query_with_pairs`.
        keys, values: [tokens, padded_head_dim].
        first_token: the position of the first token, negative for an empty entry.
        tokens, visibility: results of :func:`kvcompile.kernels.attention.query.rows_of_program`.
    """
    TOKENS: tl.constexpr = keys.shape[0]
    token = first_token + tl.arange(0, TOKENS)
    if HAS_FACTORS:
        scores = products_with_factors((keys,), query, key_factors, token, program[5], EXACT_KEY, PRECISION)
    else:
        scores = first_columns(products_of((keys,), (query,), EXACT_KEY, PRECISION), ROWS) * score_scale
    if HAS_SOFTCAP:
        scores = capped(scores, softcap)
    in_cache = (token >= 0) & (token < tokens[1])
    is_whole = (first_token >= tokens[2]) & (first_token + TOKENS <= tokens[3])
    levels = (tl.trans(values),)
    if not is_whole:
        scores = visible_scores(scores, token, in_cache, visibility, MASK, MASK_PER_ROW, IS_CAUSAL)
        levels = levels_of_tokens(levels, in_cache)
    unused = tl.full([TOKENS], 0.0, tl.float32)
    maximum, scale_maximum, p_sum, zero_sum, decay, weight = weigh(
        state, scores, unused, unused, EXACT_KEY, EXACT_VALUE, MASK == "float", NUM_WARPS
    )
    accs = accumulate(state[4], levels, weight, decay, EXACT_VALUE, PRECISION)
    return maximum, scale_maximum, p_sum, zero_sum, accs


@jit
def _block_of(holder, key_tag, value_tag, key_ptr, value_ptr, KEY: tl.constexpr, VALUE: tl.constexpr):
    """The block that an entry holds for keys (``holder`` 0) or for values only (1), or -1 if there is no such block.

    Args:
        key_tag, value_tag: the tags of the entry.

    Returns:
        The block, and whether it is exact for keys and for values.
    """
    tag = tl.where(holder == 0, key_tag, value_tag)
    if have_same_entries(KEY, VALUE):
        key_exact, value_exact = key_tag == tag, value_tag == tag
    else:
        block = tl.maximum(tag - 1, 0)
        key_exact, value_exact = is_exact(key_ptr, block, KEY), is_exact(value_ptr, block, VALUE)
    is_own = tl.where(holder == 0, key_exact, value_exact & (key_exact == 0))
    return tl.where(is_own, tag - 1, -1), key_exact, value_exact


@constexpr_function
def have_same_entries(key, value):
    """Whether each block has the same entry for keys and for values."""
    return (
        min(key.num_entries, value.num_entries) > 0
        and key.residual.sink_blocks == value.residual.sink_blocks
        and key.residual.recent_blocks == value.residual.recent_blocks
    )


@jit
def _tag(header_ptr, entry, OPERAND: tl.constexpr):
    """The tag of ``entry``, 0 if the cache has no such entry."""
    tag = entry * 0
    if OPERAND.num_entries > 0:
        tag += tl.load(tag_ptrs(header_ptr, entry), mask=entry < OPERAND.num_entries, other=0)
    return tag


@jit
def _rows(
    header_ptr, stride_block, block, first_row, exact, static_scale,
    OPERAND: tl.constexpr, EXACT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The vectors of TOKENS tokens of a block from ``first_row`` on, [TOKENS, padded_head_dim] in EXACT.dtype.

    ``exact`` is whether an entry holds the block.
    """
    packed_ptr = block_ptr(header_ptr, stride_block, block, OPERAND)
    if OPERAND.num_entries > 0 and exact:
        entry = entry_of(block, OPERAND)
        x = load_rows(header_ptr, stride_block, entry, first_row, OPERAND, TOKENS).to(EXACT.dtype)
    else:
        x = decode_rows(packed_ptr, first_row, static_scale, OPERAND, TOKENS).to(EXACT.dtype)
    return x
