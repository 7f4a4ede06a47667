"""Write one token to a block with scales per channel that an entry holds: most steps of decoding.

A new token may change the scales of its block, so all 64 rows are encoded again. :mod:`kvcompile.kernels.store.blocks`
does this for all writes, with a tile of 8 or 16 channels of few tokens in each thread. A thread then computes a scale
and its reciprocal for each of these channels. Here a thread has two channels of many tokens, and computes two scales
for each plane. A step of the preset ``int4`` thus takes 3.3 us on an H200 instead of 7.8.
"""

from __future__ import annotations

from kvcompile.kernels.lang.planes import channels_of
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.header import block_ptr, entry_of, has_entry, row_ptrs, tag_ptrs


@constexpr_function
def appends_tokens(operand):
    """Whether :func:`append_token` serves a format: its codes have no high bits and are not encoded in pairs."""
    return operand.low_bits > 0 and operand.num_high == 0 and not operand.codec.paired and not operand.rotated


@jit
def append_token(
    header_ptr, stride_block, x_ptr, x_strides, position, written, static_scale, OPERAND: tl.constexpr
):  # fmt: skip
    """Write one token of one head, if its block has an entry that holds it, and all rows are finite.

    The result is the same as of :func:`kvcompile.kernels.store.blocks.write_block`, with fewer instructions.

    Args:
        position, written: of the token, [1].

    Returns:
        Whether nothing is left to do. Otherwise no byte was changed.
    """
    TOKENS: tl.constexpr = OPERAND.block_tokens
    own = tl.max(tl.where(written, position, -1), 0).to(tl.int32)
    row = own % TOKENS
    block = tl.maximum(own, 0) // TOKENS
    entry = entry_of(block, OPERAND)
    is_held = (tl.load(tag_ptrs(header_ptr, entry)) == block + 1) & has_entry(block, OPERAND)
    # Rows are loaded and encoded before it is known whether the entry holds the block, so that latencies overlap.
    contents, new, is_finite = _load_planes(header_ptr, stride_block, entry, row, x_ptr, x_strides, OPERAND)
    encoded = _encode_planes(contents, static_scale, OPERAND)
    if (own >= 0) & is_held & is_finite:
        _store_planes(block_ptr(header_ptr, stride_block, block, OPERAND), encoded, OPERAND)
        _store_new(row_ptrs(header_ptr, stride_block, entry, row, OPERAND, 1)[:, None], new, OPERAND)
    return (own < 0) | (is_held & is_finite)


@jit
def _columns(OPERAND: tl.constexpr):
    """The channels of the columns of a padded plane, and whether they exist, in piece order.

    Triton is told that only two neighbours are contiguous. It then gives a thread two channels of many tokens, not
    eight or sixteen channels of few, so that the thread computes few scales, and has the codes that share a byte.
    """
    column = tl.arange(0, OPERAND.padded_columns // OPERAND.padded_parts)
    column = tl.multiple_of(tl.max_contiguous(column, 2), 2)
    column, exists = channels_of(column, OPERAND)
    return column, exists & (column < OPERAND.width)


@jit
def _load_planes(header_ptr, stride_block, entry, row, x_ptr, x_strides, OPERAND: tl.constexpr):
    """Load an entry, and put a new token into its ``row``.

    Returns:
        The planes of the entry, float32 [block_tokens, columns]; the planes of the token, [1, columns], in the dtype of
        the residual; and whether all numbers of the entry are finite.
    """
    column, exists = _columns(OPERAND)
    TOKENS: tl.constexpr = OPERAND.block_tokens
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    is_new = (tl.arange(0, TOKENS) == row)[:, None]
    ptrs = row_ptrs(header_ptr, stride_block, entry, 0, OPERAND, TOKENS)[:, None]
    zeros = tl.zeros([TOKENS, column.shape[0]], tl.float32)
    contents = ()
    new = ()
    for plane in tl.static_range(NUM_PLANES):
        channel = (plane * OPERAND.width + column)[None, :]
        # A mask would clear the registers of the load first, even if no element is masked.
        if OPERAND.head_dim == OPERAND.padded_columns:
            old = tl.load(ptrs + channel)
            one = tl.load(x_ptr + channel * x_strides[3])
        else:
            old = tl.load(ptrs + channel, mask=exists[None, :], other=0.0)
            one = tl.load(x_ptr + channel * x_strides[3], mask=exists[None, :], other=0.0)
        one = one.to(OPERAND.residual.dtype)
        x = tl.where(is_new, one, old).to(tl.float32)
        zeros += x * 0.0  # infinity times zero is NaN, and so is the sum
        contents = contents + (x,)  # type: ignore[assignment]  # noqa: RUF005
        new = new + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return contents, new, tl.sum(tl.sum(zeros, 0), 0) == 0.0


@jit
def _encode_planes(planes, static_scale, OPERAND: tl.constexpr):
    """Encode a block with scales per channel; ``planes`` as :func:`_load_planes` returns them.

    Returns:
        The bytes of the codes, int32 [block_tokens, columns], and for each plane scales and zero points, [columns].
    """
    in_block = tl.full([1, OPERAND.block_tokens], True, tl.int1)
    MASK: tl.constexpr = (1 << OPERAND.low_bits) - 1
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    byte = tl.zeros(planes[0].shape, tl.int32)
    scales = ()
    zeros = ()
    for plane in tl.static_range(NUM_PLANES):
        x = planes[plane]
        if OPERAND.takes_static_scale:
            x = x * tl.div_rn(1.0, static_scale)
        codes, scale, zero = OPERAND.codec.encode(tl.trans(x), in_block, OPERAND)
        byte |= (tl.trans(codes) & MASK) << (plane * OPERAND.low_bits)
        scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
        zeros = zeros + (zero,)  # type: ignore[assignment]  # noqa: RUF005
    return byte, scales, zeros


@jit
def _store_planes(packed_ptr, encoded, OPERAND: tl.constexpr):
    """Store a block that :func:`_encode_planes` encoded."""
    byte, scales, zeros = encoded
    column, exists = _columns(OPERAND)
    row = tl.arange(0, OPERAND.block_tokens)[:, None]
    if OPERAND.column_major:
        ptrs = packed_ptr + row + (column * OPERAND.block_tokens)[None, :]
    else:
        ptrs = packed_ptr + row * OPERAND.width + column[None, :]
    tl.store(ptrs, byte.to(tl.uint8), mask=exists[None, :])
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        channel = plane * OPERAND.width + column
        if OPERAND.has_scale:
            ptrs = (packed_ptr + OPERAND.scale_offset).to(tl.pointer_type(OPERAND.scale_dtype))
            tl.store(ptrs + channel, scales[plane].to(OPERAND.scale_dtype), mask=exists)
        if OPERAND.has_zero:
            ptrs = (packed_ptr + OPERAND.zero_offset).to(tl.pointer_type(OPERAND.zero_dtype))
            tl.store(ptrs + channel, zeros[plane].to(OPERAND.zero_dtype), mask=exists)


@jit
def _store_new(ptrs, planes, OPERAND: tl.constexpr):
    """Store the planes of one token, [1, columns], in its row of the entry."""
    column, exists = _columns(OPERAND)
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        tl.store(ptrs + (plane * OPERAND.width + column)[None, :], planes[plane], mask=exists[None, :])
