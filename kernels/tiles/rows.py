"""Single vectors of a packed block, as the specification decodes them."""

from __future__ import annotations

from kvcompile.kernels.formats.uniform import scales_of_bytes
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.tiles.packed import tiles_of_words
from kvcompile.kernels.tiles.rotation import unrotate


@jit
def decode_rows(block_ptr, first_row, static_scale, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """The vectors of TOKENS tokens of a block, from ``first_row`` on, as the specification decodes them.

    The function is slow, because every channel loads its own byte. It is meant for rows that are rarely read.

    Returns:
        float32 [TOKENS, padded_head_dim]; 0 in padding.
    """
    token = first_row + tl.arange(0, TOKENS)[:, None]
    channel = tl.minimum(tl.arange(0, OPERAND.padded_head_dim), OPERAND.head_dim - 1)[None, :]
    column, plane = channel % OPERAND.width, channel // OPERAND.width
    if OPERAND.low_bits == 0:
        codes = _word_codes_of_columns(block_ptr, token, column, plane, OPERAND)
    else:
        codes = _load_column(block_ptr, token, column, 0, OPERAND.code_dtype, OPERAND.width, OPERAND)
    if OPERAND.low_bits > 0 and OPERAND.num_planes > 1:
        codes = (codes.to(tl.int32) >> (OPERAND.low_bits * plane)) & ((1 << OPERAND.low_bits) - 1)
    NUM_HIGH: tl.constexpr = OPERAND.num_high
    for k in tl.static_range(NUM_HIGH):
        codes |= _high_bit_of_columns(block_ptr, token, column, plane, k, OPERAND) << (OPERAND.low_bits + k)
    x = OPERAND.codec.levels(codes, 0, OPERAND)
    OTHER_PLANES: tl.constexpr = OPERAND.num_planes - 1
    for i in tl.static_range(OTHER_PLANES):
        x = tl.where(plane == i + 1, OPERAND.codec.levels(codes, i + 1, OPERAND), x)
    x = x * OPERAND.gain
    if OPERAND.granularity == "channel":
        index = channel
    elif OPERAND.granularity == "group":
        index = token * OPERAND.num_scales + channel // OPERAND.group_size
    elif OPERAND.granularity == "plane":
        index = token * OPERAND.num_scales + plane
    else:
        index = token
    if OPERAND.has_scale:
        scale_ptr = (block_ptr + OPERAND.scale_offset).to(tl.pointer_type(OPERAND.scale_dtype))
        scale = tl.load(scale_ptr + index)
        if OPERAND.granularity == "plane":
            scale = scales_of_bytes(scale.to(tl.int32))
        x = x * scale.to(tl.float32)
    if OPERAND.has_zero:
        zero_ptr = (block_ptr + OPERAND.zero_offset).to(tl.pointer_type(OPERAND.zero_dtype))
        x = x + tl.load(zero_ptr + index).to(tl.float32)
    if OPERAND.takes_static_scale:
        x = x * static_scale
    x = tl.where((tl.arange(0, OPERAND.padded_head_dim) < OPERAND.head_dim)[None, :], x, 0.0)
    if OPERAND.rotated:
        x = unrotate(x, OPERAND)
    return _without_origin(x)


@jit
def _without_origin(x):
    """``x``, as if it did not come from bytes.

    Triton looks at the loads and joins from which the first operand of a product comes. After a load of bytes and a
    join it gives each thread eight neighbouring columns, and a row needs 32 columns for its four threads. With 16
    columns (16 channels, or the 16 tokens of one warp) products are wrong (Triton 3.6). It does not look beyond a sum.
    """
    return tl.sum(x[:, :, None], 2)


@jit
def _word_codes_of_columns(block_ptr, token, column, plane, OPERAND: tl.constexpr):
    """The codes of tokens, int32 [tokens, channels]. Each channel is a ``column`` of a ``plane``."""
    word = tl.zeros([token.shape[0], column.shape[1]], tl.int32)
    NUM_TILES: tl.constexpr = len(tiles_of_words(OPERAND))
    for i in tl.static_range(NUM_TILES):
        word |= _word_bits_of_columns(block_ptr, token, column, i, OPERAND)
    codes = tl.zeros(word.shape, tl.int32)
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for i in tl.static_range(NUM_PLANES):
        field = (word >> OPERAND.word_fields[i][0]) & ((1 << OPERAND.word_fields[i][1]) - 1)
        codes = tl.where(plane == i, field, codes)
    return codes


@jit
def _word_bits_of_columns(block_ptr, token, column, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """The bits of the words of columns that lie in a tile, at their places in the words."""
    BEGIN: tl.constexpr = tiles_of_words(OPERAND)[TILE][0]
    BITS: tl.constexpr = tiles_of_words(OPERAND)[TILE][1]
    WIDTH: tl.constexpr = tiles_of_words(OPERAND)[TILE][2]
    OFFSET: tl.constexpr = tiles_of_words(OPERAND)[TILE][3]
    FIRST: tl.constexpr = tiles_of_words(OPERAND)[TILE][4]
    if BITS == 8:
        bits = _load_column(block_ptr, token, column + FIRST, OFFSET, tl.uint8, WIDTH, OPERAND).to(tl.int32)
    else:
        byte = _load_column(block_ptr, token, column % WIDTH, OFFSET, tl.uint8, WIDTH, OPERAND).to(tl.int32)
        bits = (byte >> (column // WIDTH * BITS)) & ((1 << BITS) - 1)
    return bits << BEGIN


@jit
def _high_bit_of_columns(block_ptr, token, column, plane, K: tl.constexpr, OPERAND: tl.constexpr):
    """The bit of each code in high section K, int32; 0 for planes without such a bit."""
    WIDTH: tl.constexpr = OPERAND.high_widths[K]
    PLANES: tl.constexpr = OPERAND.high_planes[K]
    high = _load_column(block_ptr, token, column % WIDTH, OPERAND.high_offsets[K], tl.uint8, WIDTH, OPERAND)
    bit = (high.to(tl.int32) >> (8 // PLANES * plane + column // WIDTH)) & 1
    return tl.where(plane < PLANES, bit, 0)


@jit
def _load_column(block_ptr, token, column, offset, DTYPE: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr):
    """Load the elements ``column`` of tokens from one code section."""
    ptr = (block_ptr + offset).to(tl.pointer_type(DTYPE))
    if OPERAND.column_major:
        x = tl.load(ptr + column * OPERAND.block_tokens + token)
    else:
        x = tl.load(ptr + token * WIDTH + column)
    return x
