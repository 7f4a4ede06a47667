"""Dequantize packed tokens in Triton: for code that reads a cache, and for prefill attention.

Unpacking costs more than reading. A query of some hundred positions has many tiles of rows, and each of them would
unpack every token again. Dequantizing once is cheaper.
"""

from __future__ import annotations

from kvcompile.kernels.lang.rounding import finite_at
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.tiles.header import block_ptr, entry_of, is_exact, load_rows
from kvcompile.kernels.tiles.levels import unpack
from kvcompile.kernels.tiles.packed import has_several_scales, load_packed, of_plane
from kvcompile.kernels.tiles.rotation import hadamard_ones, with_random_signs
from kvcompile.kernels.tiles.runs import unrotate_levels, unrotation_matrix


@jit(do_not_specialize=["first_pair", "num_kv_heads", "num_tokens", "num_blocks", "blocks_per_program"])
def dequantize_kernel(
    data_ptr, bounds_ptr, out_ptr, data_strides, first_pair, num_kv_heads, num_tokens, num_blocks, blocks_per_program,
    static_scale, OPERAND: tl.constexpr, HAS_BOUNDS: tl.constexpr, PRECISION: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Dequantize some KV heads. Grid (pairs, ceil(num_blocks / blocks_per_program)); a pair is a KV head of a sequence.

    Args:
        data_ptr: packed data, uint8, strides (block, batch, head) in bytes.
        bounds_ptr: with HAS_BOUNDS int32 [batch, 2], a range of tokens for each sequence: only blocks with a token in
            the range are written.
        out_ptr: any float dtype. With PADDED [pairs, num_blocks * block_tokens, padded_head_dim], 0 from ``num_tokens``
            on; otherwise [pairs, num_tokens, head_dim].
        first_pair: the pair of the first program, ``batch * num_kv_heads + kv_head``.
        num_tokens: tokens to dequantize.
        static_scale: the static scale of the format.
    """
    pair = tl.program_id(0) + first_pair
    batch = (pair // num_kv_heads).to(tl.int64)
    head = (pair % num_kv_heads).to(tl.int64)
    header_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + head * data_strides[2]
    BLOCK: tl.constexpr = OPERAND.block_tokens
    ROW: tl.constexpr = _row_width(OPERAND, PADDED)
    rows = num_blocks * BLOCK if PADDED else num_tokens
    out_ptr += tl.program_id(0).to(tl.int64) * rows * ROW
    begin, end = 0, num_blocks * BLOCK
    if HAS_BOUNDS:
        begin = tl.load(bounds_ptr + batch * 2) // BLOCK * BLOCK
        end = tl.minimum(tl.load(bounds_ptr + batch * 2 + 1), end)
    matrix = unrotation_matrix(OPERAND)
    for i in range(blocks_per_program):
        block = tl.program_id(1) * blocks_per_program + i
        if (block * BLOCK >= begin) & (block * BLOCK < end):
            tokens_left = num_tokens - block * BLOCK
            row_ptr = out_ptr + block.to(tl.int64) * BLOCK * ROW
            exact = block < 0
            if OPERAND.num_entries > 0:
                exact = (tokens_left > 0) & is_exact(header_ptr, block, OPERAND)
            if exact:
                _copy_exact(row_ptr, header_ptr, data_strides[0], block, tokens_left, OPERAND, PADDED)
            else:
                _dequantize_block(
                    row_ptr, header_ptr, data_strides[0], block, tokens_left, matrix, static_scale, OPERAND,
                    PRECISION, PADDED,
                )  # fmt: skip


@constexpr_function
def _row_width(operand, padded):
    """Elements of a row of the output."""
    return operand.padded_head_dim if padded else operand.head_dim


@jit
def _copy_exact(out_ptr, header_ptr, stride_block, block, tokens_left, OPERAND: tl.constexpr, PADDED: tl.constexpr):
    """Copy the tokens of an exact block."""
    if OPERAND.num_entries > 0:
        x = load_rows(header_ptr, stride_block, entry_of(block, OPERAND), 0, OPERAND, OPERAND.block_tokens)
        _store_rows(out_ptr, x, tokens_left, _row_width(OPERAND, PADDED), OPERAND, PADDED)


@jit
def _dequantize_block(
    out_ptr, header_ptr, stride_block, block, tokens_left, matrix, static_scale, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Dequantize the tokens of a packed block."""
    ptr = block_ptr(header_ptr, stride_block, block, OPERAND)
    packed, scale, zero = load_packed(ptr, stride_block, tokens_left, (), OPERAND, OPERAND.block_tokens)
    levels = unpack(packed, OPERAND)
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if OPERAND.rotated:
        x = _rotate_levels(levels, scale, zero, matrix, OPERAND, PRECISION)
        _store_rows(out_ptr, x * static_scale, tokens_left, _row_width(OPERAND, PADDED), OPERAND, PADDED)
    else:
        for plane in tl.static_range(NUM_PLANES):
            x = levels[plane].to(tl.float32)
            x = x * OPERAND.gains[plane]
            if OPERAND.has_scale:
                x = x * _of_codes(scale, plane, OPERAND)
            if OPERAND.has_zero:
                x = x + _of_codes(zero, plane, OPERAND)
            if OPERAND.column_major:
                x = tl.trans(x)
            _store_rows(out_ptr + plane * OPERAND.width, x * static_scale, tokens_left, OPERAND.width, OPERAND, PADDED)


@jit
def _rotate_levels(levels, scale, zero, matrix, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Vectors [tokens, channels] in the original basis, from levels in the stored basis, without the static scale."""
    tl.static_assert(OPERAND.granularity == "token")
    x = unrotate_levels(levels, matrix, OPERAND, PRECISION) * OPERAND.largest_gain
    if OPERAND.has_scale:
        x = x * scale[:, None]
    if OPERAND.has_zero:
        x = x + zero[:, None] * hadamard_ones(OPERAND)[None, :]
    return with_random_signs(x, OPERAND)


@jit
def _of_codes(metadata, plane: tl.constexpr, OPERAND: tl.constexpr):
    """Scales or zero points of one block, as float32 that broadcasts to a plane of its codes."""
    if OPERAND.granularity == "channel":
        x = metadata[plane].to(tl.float32)
    elif has_several_scales(OPERAND):
        x = of_plane(metadata, plane, OPERAND)
    elif OPERAND.column_major:
        x = metadata[None, :]
    else:
        x = metadata[:, None]
    return x


@jit
def _store_rows(out_ptr, x, tokens_left, WIDTH: tl.constexpr, OPERAND: tl.constexpr, PADDED: tl.constexpr):
    """Store the first WIDTH columns of a tile [tokens, columns] of a block.

    With PADDED, rows from ``tokens_left`` on are stored as 0; otherwise they are not stored.
    """
    token = tl.arange(0, OPERAND.block_tokens)[:, None]
    column = tl.arange(0, x.shape[1])[None, :]
    x = tl.where(token < tokens_left, x.to(tl.float32), 0.0)
    x = finite_at(out_ptr, x)
    ptrs = out_ptr + token * _row_width(OPERAND, PADDED) + column
    if not PADDED:
        tl.store(ptrs, x, mask=(token < tokens_left) & (column < WIDTH))
    elif x.shape[1] == WIDTH:
        tl.store(ptrs, x)
    else:
        tl.store(ptrs, x, mask=column < WIDTH)
