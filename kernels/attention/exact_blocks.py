"""Attention to the exact blocks in the header of a packed cache.

The loop over tiles of packed tokens skips exact blocks; afterwards the splits take turns at them. A block may be exact
for keys only, or for values only. The other operand is then read from the packed block.
"""

from __future__ import annotations

import math

from kvcompile.kernels.attention.query import first_columns
from kvcompile.kernels.attention.softmax_tile import (
    accumulate,
    packed_scores,
    products_of,
    token_metadata,
    value_levels,
    visible_scores,
    weigh,
)
from kvcompile.kernels.lang.tiles import normalise_rows, planes_of, transposed
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.header import block_ptr, entry_of, is_exact, load_rows, tag_ptrs
from kvcompile.kernels.tiles.packed import load_packed
from kvcompile.kernels.tiles.rotation import rotation_matrix, to_stored_basis


@jit
def recent_tags(header_ptr, OPERAND: tl.constexpr):
    """The tags of the entries of recent blocks, int32 of any length; 0 for all other entries."""
    tags = tl.full([1], 0, tl.int32)
    if OPERAND.num_entries > 0:
        entry = tl.arange(0, OPERAND.residual.padded_entries)
        is_recent = (entry >= OPERAND.residual.sink_blocks) & (entry < OPERAND.num_entries)
        tags = tl.load(tag_ptrs(header_ptr, entry), mask=is_recent, other=0)
    return tags


@jit
def exact_range(key_tags, value_tags):
    """The first recent block that is exact for keys or values, and the block after the last one."""
    first_key = tl.min(tl.where(key_tags > 0, key_tags - 1, 1 << 30), 0)
    first_value = tl.min(tl.where(value_tags > 0, value_tags - 1, 1 << 30), 0)
    return tl.minimum(first_key, first_value), tl.maximum(tl.max(key_tags, 0), tl.max(value_tags, 0))


@jit
def overlaps_exact(tile, first_exact, end_exact, KEY: tl.constexpr, VALUE: tl.constexpr, TOKENS: tl.constexpr):
    """Whether a block of the tile may be exact, a scalar."""
    SINKS: tl.constexpr = _most_sinks(KEY, VALUE)
    BLOCKS: tl.constexpr = TOKENS // KEY.block_tokens
    first_block = tile * BLOCKS
    return (first_block < SINKS) | ((first_block < end_exact) & (first_block + BLOCKS > first_exact))


@jit
def is_packed(
    key_ptr, value_ptr, token, tile, may_be_exact, KEY: tl.constexpr, VALUE: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Whether the block of each ``token`` of a tile is not exact. Tags are read only if a block ``may_be_exact``."""
    BLOCKS: tl.constexpr = TOKENS // KEY.block_tokens
    first_block = tile * BLOCKS
    packed = token >= 0
    if may_be_exact:
        for i in tl.static_range(BLOCKS):
            block = first_block + i
            exact = is_exact(key_ptr, block, KEY) | is_exact(value_ptr, block, VALUE)
            packed = packed & ((token // KEY.block_tokens != block) | (exact == 0))
    return packed


@constexpr_function
def _most_sinks(key, value):
    return max(0 if operand.residual is None else operand.residual.sink_blocks for operand in (key, value))


@jit
def attend_to_exact_blocks(
    state, query, key_ptr, value_ptr, stride_key_block, stride_value_block, visible_len, softcap, visibility, split,
    num_splits, key_scale, value_scale, KEY: tl.constexpr, VALUE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    MASK: tl.constexpr, MASK_PER_ROW: tl.constexpr, IS_CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):  # fmt: skip
    """The state of attention after the exact blocks of one split, which takes the entries split, split + num_splits,
    ...

    Entries of keys come first, then entries of values. A block that both hold is attended to once, by the key's entry.
    """
    for index in range(split, KEY.num_entries + VALUE.num_entries, num_splits):
        block, key_exact, value_exact = _block_of(index, key_ptr, value_ptr, KEY, VALUE)
        if (block >= 0) & (block * KEY.block_tokens < visible_len):
            token = block * KEY.block_tokens + tl.arange(0, KEY.block_tokens)
            in_cache = token < visible_len
            scores = _scores(block, key_exact, query, key_ptr, stride_key_block, key_scale, KEY, PRECISION)
            levels, scale, zero = _values(
                block, value_exact, value_ptr, stride_value_block, value_scale, VALUE, PRECISION
            )
            scores, scale, zero = visible_scores(
                scores, scale, zero, token, in_cache, False, softcap, visibility,
                HAS_SOFTCAP, MASK, MASK_PER_ROW, IS_CAUSAL,
            )  # fmt: skip
            maximum, scale_maximum, p_sum, zero_sum, decay, weight = weigh(
                state, scores, scale, zero, KEY, VALUE, MASK == "float", NUM_WARPS
            )
            accs = accumulate(state[4], levels, weight, decay, in_cache, VALUE, True, PRECISION)
            state = (maximum, scale_maximum, p_sum, zero_sum, accs)
    return state


@jit
def _block_of(index, key_ptr, value_ptr, KEY: tl.constexpr, VALUE: tl.constexpr):
    """The block to attend to for an entry, or -1 for none, and whether it is exact for keys and for values."""
    if index < KEY.num_entries:
        block = tl.load(tag_ptrs(key_ptr, index)) - 1
    else:
        block = tl.load(tag_ptrs(value_ptr, index - KEY.num_entries)) - 1
    key_exact = is_exact(key_ptr, tl.maximum(block, 0), KEY)
    value_exact = is_exact(value_ptr, tl.maximum(block, 0), VALUE)
    first_of_block = tl.where(index < KEY.num_entries, key_exact, value_exact & (key_exact == 0))
    return tl.where(first_of_block, block, -1), key_exact, value_exact


@jit
def _scores(block, exact, query, header_ptr, stride_block, static_scale, KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of the tokens of a block, in units of log2."""
    if KEY.num_entries > 0:
        if exact:
            levels, scale = _exact_levels(header_ptr, stride_block, block, static_scale, KEY, PRECISION)
            products = products_of(levels, query[0], KEY, PRECISION)
            scores = first_columns(products, query[1].shape[0]) * query[1][None, :] * scale[:, None]
        else:
            scores = _packed_block_scores(block, query, header_ptr, stride_block, KEY, PRECISION)
    else:
        scores = _packed_block_scores(block, query, header_ptr, stride_block, KEY, PRECISION)
    return scores


@jit
def _packed_block_scores(block, query, header_ptr, stride_block, KEY: tl.constexpr, PRECISION: tl.constexpr):
    TOKENS: tl.constexpr = KEY.block_tokens
    ptr = block_ptr(header_ptr, stride_block, block, KEY)
    keys = load_packed(ptr, stride_block, TOKENS, KEY, TOKENS)
    return packed_scores(keys, query, KEY, PRECISION, TOKENS)


@jit
def _values(block, exact, header_ptr, stride_block, static_scale, VALUE: tl.constexpr, PRECISION: tl.constexpr):
    """The values of a block: levels [width, tokens] of each plane, scales and zero points [tokens]."""
    if VALUE.num_entries > 0:
        if exact:
            rows, scale = _exact_levels(header_ptr, stride_block, block, static_scale, VALUE, PRECISION)
            levels = transposed(rows, VALUE)
            zero = tl.full([VALUE.block_tokens], 0.0, tl.float32)
        else:
            levels, scale, zero = _packed_block_values(block, header_ptr, stride_block, VALUE)
    else:
        levels, scale, zero = _packed_block_values(block, header_ptr, stride_block, VALUE)
    return levels, scale, zero


@jit
def _packed_block_values(block, header_ptr, stride_block, VALUE: tl.constexpr):
    TOKENS: tl.constexpr = VALUE.block_tokens
    ptr = block_ptr(header_ptr, stride_block, block, VALUE)
    values = load_packed(ptr, stride_block, TOKENS, VALUE, TOKENS)
    scale, zero = token_metadata(values, VALUE, TOKENS)
    return value_levels(values[0], values[1], values[2], VALUE), scale, zero


@jit
def _exact_levels(header_ptr, stride_block, block, static_scale, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """The tokens of an exact block in the stored basis, as levels and scales.

    A token is ``static_scale * gain * scale * level``, with the same gains as unpacked levels have. A gain above 1, of
    codes that are read as subnormal fp16 numbers, would make either these levels or the weights of values very small.
    Its square root goes to each, which leaves both enough digits.

    Returns:
        Planes of levels [tokens, width] in the dtype of the products, and scales [tokens].
    """
    x = load_rows(header_ptr, stride_block, entry_of(block, OPERAND), OPERAND)
    x = to_stored_basis(x, rotation_matrix(OPERAND, OPERAND.block_tokens), OPERAND, PRECISION)
    levels, scale = normalise_rows(x, _exact_exponent(OPERAND), OPERAND.dtype)
    planes = planes_of(levels, OPERAND)
    levels = ()
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        levels = levels + (planes[plane] * (1.0 / OPERAND.relative_gains[plane]),)  # noqa: RUF005
    return levels, scale / (OPERAND.largest_gain * static_scale)


@constexpr_function
def _exact_exponent(operand):
    return 7 - int(math.log2(operand.largest_gain / operand.gain)) // 2
