"""Tiles of packed tokens in registers: loading their bytes, unpacking levels, and decoding single rows."""

from __future__ import annotations

from kvcompile.kernels.formats.lloyd_max import scales_of_bytes
from kvcompile.kernels.lang.planes import alternating, alternating_rows, halves
from kvcompile.kernels.lang.tiles import prefetch_lines
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.tiles.rotation import unrotate


@jit
def load_packed(ptr, stride_block, tokens_left, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Load a tile of packed tokens.

    Masks are per block and not per token, because blocks exist as a whole, and masks per token break up wide loads.

    Returns:
        A tuple of the code sections; the scales; and the zero points, or the scales again if there are no zero points.

        Code sections are tiles [tokens, width] of keys or [width, tokens] of values: first the section ``codes``, then
        the high sections as :func:`_load_high_bits` returns them. If planes are loaded in pieces, they are the tiles of
        :func:`_load_pieces`; for words, the tiles of :func:`load_words`. Scales and zero points are float32 [tokens] if
        they are per token. Per group they are a tuple with a float32 tile for each plane, which broadcasts to the
        codes. Per channel they are a tuple with a tile [blocks, width] for each plane, in the dtype of the section. Per
        plane they are a tuple with a float32 tile [tokens] for each plane.
    """
    token = tl.arange(0, TOKENS)
    block, row = token // OPERAND.block_tokens, token % OPERAND.block_tokens
    exists = block * OPERAND.block_tokens < tokens_left
    block_offset = block.to(tl.int64) * stride_block
    column = tl.arange(0, OPERAND.padded_width)
    if OPERAND.low_bits == 0:
        packed = load_words(ptr, block_offset, row, exists, column, OPERAND)
    elif OPERAND.alternation > 0:
        packed = _load_pieces(ptr, block_offset, row, exists, OPERAND)
    else:
        HAS_PADDING: tl.constexpr = OPERAND.width != OPERAND.padded_width
        codes = _load_codes(
            ptr, block_offset, row, exists, column, column < OPERAND.width, 0,
            OPERAND.code_dtype, OPERAND.width, HAS_PADDING, OPERAND,
        )  # fmt: skip
        packed = (codes,)
        NUM_HIGH: tl.constexpr = OPERAND.num_high
        for k in tl.static_range(NUM_HIGH):
            high = _load_high_bits(ptr, block_offset, row, exists, column, k, OPERAND)
            packed = packed + high
    scale = tl.full([TOKENS], 1.0, tl.float32)
    zero = scale
    if OPERAND.granularity == "channel":
        block = tl.arange(0, TOKENS // OPERAND.block_tokens)
        row, exists = block * 0, block * OPERAND.block_tokens < tokens_left
    if OPERAND.has_scale:
        scale = _load_metadata(
            ptr + OPERAND.scale_offset, stride_block, block, row, exists, column, OPERAND.scale_dtype, OPERAND
        )
        zero = scale
    if OPERAND.has_zero:
        zero = _load_metadata(
            ptr + OPERAND.zero_offset, stride_block, block, row, exists, column, OPERAND.zero_dtype, OPERAND
        )
    return packed, scale, zero


@jit
def _load_pieces(ptr, block_offset, row, exists, OPERAND: tl.constexpr):
    """Load planes in two pieces (:func:`kvcompile.kernels.layout.operand._in_pieces`).

    Both pieces of a key lie in its row of codes, and are loaded together: a load of one piece fetches the other half of
    each sector of 32 bytes for nothing. Attention with 3-bit keys then takes 65 us instead of 58 on an H200.

    Returns:
        Tiles of the codes of the first piece, the codes of the second piece, and the high bits of both.
    """
    WIDTH: tl.constexpr = OPERAND.width // 2
    PADDED: tl.constexpr = OPERAND.padded_width // 2
    HAS_PADDING: tl.constexpr = WIDTH != PADDED
    column = tl.arange(0, PADDED)
    in_piece = column < WIDTH
    if OPERAND.column_major or HAS_PADDING:
        first = _load_codes(
            ptr, block_offset, row, exists, column, in_piece, 0, tl.uint8, OPERAND.width, HAS_PADDING, OPERAND
        )
        second = _load_codes(
            ptr, block_offset, row, exists, column + WIDTH, in_piece, 0, tl.uint8, OPERAND.width, HAS_PADDING, OPERAND
        )
    else:
        columns = tl.arange(0, 2 * WIDTH)
        codes = _load_codes(
            ptr, block_offset, row, exists, columns, columns >= 0, 0, tl.uint8, OPERAND.width, False, OPERAND
        )
        first, second = halves(codes)
    high = _load_codes(
        ptr, block_offset, row, exists, column, in_piece, OPERAND.high_offsets[0], tl.uint8, WIDTH, HAS_PADDING, OPERAND
    )
    return first, second, high


@jit
def load_words(ptr, block_offset, row, exists, column, OPERAND: tl.constexpr):
    """Load the sections of words: a tile for each byte of a word, and for each section of fewer bits.

    Returns:
        Without inline PTX int32 tiles. In the tile of a section of fewer bits, these bits of each column are lowest,
        and the bits above them are arbitrary. With inline PTX tiles of unchanged bytes. The tile of a section of fewer
        bits is then followed by a tile with the number of bits by which it must be shifted.
    """
    tiles = ()
    NUM_TILES: tl.constexpr = len(tiles_of_words(OPERAND))
    for i in tl.static_range(NUM_TILES):
        tiles = tiles + _load_word_tile(ptr, block_offset, row, exists, column, i, OPERAND)
    return tiles


@constexpr_function
def tiles_of_words(operand):
    """The tiles of words: a tuple (first bit in the word, bits, bytes per vector of the section, byte offset of the
    section in a block, first byte in the section) for each.
    """
    tiles, first = [], 0
    for bits, width, offset in operand.word_sections:
        for begin in range(0, bits, 8):
            tiles.append((first + begin, min(bits, 8), width, offset, begin // 8 * operand.width))
        first += bits
    return tuple(tiles)


@jit
def _load_word_tile(ptr, block_offset, row, exists, column, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """Load one tile of :func:`load_words`, with the tile of its shifts if it has one: a tuple."""
    BITS: tl.constexpr = tiles_of_words(OPERAND)[TILE][1]
    WIDTH: tl.constexpr = tiles_of_words(OPERAND)[TILE][2]
    OFFSET: tl.constexpr = tiles_of_words(OPERAND)[TILE][3]
    FIRST: tl.constexpr = tiles_of_words(OPERAND)[TILE][4]
    HAS_PADDING: tl.constexpr = OPERAND.width != OPERAND.padded_width
    in_vector = column < OPERAND.width
    if BITS == 8:
        tile = _load_codes(
            ptr, block_offset, row, exists, column + FIRST, in_vector, OFFSET, tl.uint8, WIDTH, HAS_PADDING, OPERAND
        )
        tiles = (tile,) if OPERAND.unpack_ptx is not None else (tile.to(tl.int32),)
    else:
        tile = _load_codes(
            ptr, block_offset, row, exists, column % WIDTH, in_vector, OFFSET, tl.uint8, WIDTH, HAS_PADDING, OPERAND
        )
        shift = tl.where(in_vector, column // WIDTH, 0) * BITS
        shift = shift[:, None] if OPERAND.column_major else shift[None, :]
        if OPERAND.unpack_ptx is not None:
            tiles = (tile, tl.broadcast_to(shift.to(tl.uint8), tile.shape))
        else:
            tiles = (tile.to(tl.int32) >> shift,)
    return tiles


@jit
def codes_of_words(tiles, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The codes of a plane, int32, from the tiles of :func:`load_words`."""
    BITS: tl.constexpr = OPERAND.word_fields[PLANE][1]
    codes = tl.zeros(tiles[0].shape, tl.int32)
    NUM_TILES: tl.constexpr = len(tiles)
    for i in tl.static_range(NUM_TILES):
        codes |= _bits_of_tile(tiles[i], i, PLANE, OPERAND)
    return codes & ((1 << BITS) - 1)


@jit
def _bits_of_tile(tile, TILE: tl.constexpr, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The bits of the codes of a plane that lie in a tile, at their places in the codes."""
    FIRST: tl.constexpr = tiles_of_words(OPERAND)[TILE][0]
    COUNT: tl.constexpr = tiles_of_words(OPERAND)[TILE][1]
    SHIFT: tl.constexpr = OPERAND.word_fields[PLANE][0]
    BITS: tl.constexpr = OPERAND.word_fields[PLANE][1]
    if FIRST + COUNT <= SHIFT or SHIFT + BITS <= FIRST:
        bits = tile * 0
    elif FIRST + COUNT < SHIFT + BITS:  # the code goes on in the next tile
        bits = tile & ((1 << COUNT) - 1)
        bits = bits >> (SHIFT - FIRST) if FIRST < SHIFT else bits << (FIRST - SHIFT)
    else:
        bits = tile >> (SHIFT - FIRST) if FIRST < SHIFT else tile << (FIRST - SHIFT)
    return bits


@jit
def prefetch(ptr, stride_block, tokens_left, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Prefetch the bytes of a tile to the L2 cache, where a later :func:`load_packed` finds them."""
    if OPERAND.ptx > 0:
        BLOCKS: tl.constexpr = TOKENS // OPERAND.block_tokens
        LINES: tl.constexpr = OPERAND.prefetched_lines
        last_block = tl.maximum((tokens_left - 1) // OPERAND.block_tokens, 0)
        block = tl.minimum(tl.arange(0, BLOCKS), last_block).to(tl.int64)
        byte = tl.minimum(tl.arange(0, LINES) * 128, OPERAND.block_bytes - 1)
        prefetch_lines(ptr + block[:, None] * stride_block + byte[None, :])


@jit
def _load_high_bits(ptr, block_offset, row, exists, column, K: tl.constexpr, OPERAND: tl.constexpr):
    """Load high section K in the shape of the section ``codes``.

    Returns:
        Without inline PTX a tuple of one tile, int32, with the bit of plane 0 lowest. With inline PTX a tuple of tiles
        of unchanged bytes, one for each piece; a tile is 0 in the columns of the other pieces. Then only the loads
        depend on the column, and Triton loads the tiles in the layout of the products that use them.
    """
    WIDTH: tl.constexpr = OPERAND.high_widths[K]
    OFFSET: tl.constexpr = OPERAND.high_offsets[K]
    PIECES: tl.constexpr = 8 // OPERAND.high_planes[K]
    piece = column // WIDTH
    if OPERAND.unpack_ptx is not None:
        high = ()
        for i in tl.static_range(PIECES):
            tile = _load_codes(
                ptr, block_offset, row, exists, column - i * WIDTH, piece == i, OFFSET, tl.uint8, WIDTH, True, OPERAND
            )
            high = high + (tile,)  # noqa: RUF005
    else:
        in_vector = column < OPERAND.width
        tile = _load_codes(
            ptr, block_offset, row, exists, column % WIDTH, in_vector, OFFSET, tl.uint8, WIDTH, True, OPERAND
        )
        piece = tl.where(in_vector, piece, 0)
        high = (tile.to(tl.int32) >> (piece[:, None] if OPERAND.column_major else piece[None, :]),)
    return high


@jit
def _load_codes(
    ptr, block_offset, row, exists, column, in_vector, offset,
    DTYPE: tl.constexpr, WIDTH: tl.constexpr, HAS_PADDING: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load columns of a code section that has WIDTH columns: [tokens, columns] of keys, [columns, tokens] of values.

    Columns that are not ``in_vector`` are 0. Without HAS_PADDING all columns are in the vector.
    """
    ptr = (ptr + offset).to(tl.pointer_type(DTYPE))
    block_offset = block_offset // (DTYPE.primitive_bitwidth // 8)
    if OPERAND.column_major:
        ptrs = ptr + (block_offset + row)[None, :] + (column * OPERAND.block_tokens)[:, None]
        in_bounds, in_vector = exists[None, :], in_vector[:, None]
    else:
        ptrs = ptr + (block_offset + row * WIDTH)[:, None] + column[None, :]
        in_bounds, in_vector = exists[:, None], in_vector[None, :]
    if HAS_PADDING:
        in_bounds = in_bounds & in_vector
    return tl.load(ptrs, mask=in_bounds, other=0)


@jit
def _load_metadata(
    ptr, stride_block, block, row, exists, column, DTYPE: tl.constexpr, OPERAND: tl.constexpr
):  # fmt: skip
    """Load scales or zero points for :func:`load_packed`; ``block``, ``row`` and ``exists`` are [tokens] or [blocks].

    Strides of packed data are multiples of 64 bytes, so that the size of any dtype divides them.
    """
    ptr = ptr.to(tl.pointer_type(DTYPE))
    block_offset = block.to(tl.int64) * (stride_block // (DTYPE.primitive_bitwidth // 8))
    if OPERAND.granularity == "token":
        metadata = tl.load(ptr + block_offset + row, mask=exists, other=0.0).to(tl.float32)
    elif OPERAND.granularity == "plane":
        metadata = _load_scales_of_planes(ptr, block_offset, row, exists, OPERAND)
    else:
        metadata = ()
        NUM_PLANES: tl.constexpr = OPERAND.num_planes
        for plane in tl.static_range(NUM_PLANES):
            index = plane * OPERAND.width + column
            if OPERAND.granularity == "group" or OPERAND.width != OPERAND.padded_width:
                index = tl.minimum(index, OPERAND.head_dim - 1)
            if OPERAND.granularity == "group":
                index //= OPERAND.group_size
            row_offset = block_offset
            if OPERAND.granularity == "group":
                row_offset += row * OPERAND.num_scales
            if OPERAND.column_major:
                ptrs, mask = ptr + index[:, None] + row_offset[None, :], exists[None, :]
            else:
                ptrs, mask = ptr + row_offset[:, None] + index[None, :], exists[:, None]
            tile = tl.load(ptrs, mask=mask, other=0.0)
            if OPERAND.granularity == "group":
                tile = tile.to(tl.float32)
            metadata = metadata + (tile,)  # noqa: RUF005
    return metadata


@jit
def _load_scales_of_planes(ptr, block_offset, row, exists, OPERAND: tl.constexpr):
    """Load the scales of vectors that have one byte for each plane: a tuple of float32 [tokens].

    Two or four bytes of a vector are loaded as one number, because small loads are not copied asynchronously.
    """
    scales = ()
    PLANES: tl.constexpr = OPERAND.num_planes
    if PLANES == 2 or PLANES == 4:
        DTYPE: tl.constexpr = tl.uint16 if PLANES == 2 else tl.uint32
        word = tl.load(ptr.to(tl.pointer_type(DTYPE)) + block_offset // PLANES + row, mask=exists, other=0)
        word = word.to(tl.int32, bitcast=PLANES == 4)
        for plane in tl.static_range(PLANES):
            scales = scales + (scales_of_bytes((word >> (8 * plane)) & 0xFF, OPERAND),)  # noqa: RUF005
    else:
        for plane in tl.static_range(PLANES):
            byte = tl.load(ptr + block_offset + row * PLANES + plane, mask=exists, other=0)
            scales = scales + (scales_of_bytes(byte.to(tl.int32), OPERAND),)  # noqa: RUF005
    return scales


@jit
def unpack(packed, scale, zero, OPERAND: tl.constexpr):
    """Unpack a tile: the levels of each plane, divided by the gain of the plane, in the dtype of the products.

    With scales per group the results are dequantized values, because these scales cannot be taken out of the products.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if OPERAND.unpack_ptx is not None:
        planes = halves_of_bytes(packed, OPERAND)
    elif OPERAND.alternation > 0:
        planes = ()
        high = packed[2].to(tl.int32)
        for plane in tl.static_range(NUM_PLANES):
            first = _codes_of_plane((packed[0], high), plane, OPERAND)
            second = _codes_of_plane((packed[1], high >> 1), plane, OPERAND)
            codes = _plane_of_pieces(first, second, OPERAND)
            planes = planes + (OPERAND.codec.levels(codes, plane, OPERAND).to(OPERAND.dtype),)  # noqa: RUF005
    elif OPERAND.code_dtype == OPERAND.dtype:
        planes = (packed[0],)
    elif OPERAND.low_bits == 0:
        planes = ()
        for plane in tl.static_range(NUM_PLANES):
            codes = codes_of_words(packed, plane, OPERAND)
            planes = planes + (OPERAND.codec.levels(codes, plane, OPERAND).to(OPERAND.dtype),)  # noqa: RUF005
    else:
        planes = ()
        for plane in tl.static_range(NUM_PLANES):
            codes = _codes_of_plane(packed, plane, OPERAND)
            planes = planes + (OPERAND.codec.levels(codes, plane, OPERAND).to(OPERAND.dtype),)  # noqa: RUF005
    if OPERAND.granularity == "group":
        values = ()
        for plane in tl.static_range(NUM_PLANES):
            value = planes[plane].to(tl.float32) * (scale[plane] * OPERAND.unpack_gains[plane])
            if OPERAND.has_zero:
                value += zero[plane]
            values = values + (value.to(OPERAND.dtype),)  # noqa: RUF005
        planes = values
    return planes


@jit
def _codes_of_plane(sections, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The codes of a plane: its low bits in ``sections[0]``, and a further bit in each int32 tile of high bits.

    In the tiles of high bits the bit of plane 0 is lowest.
    """
    codes = sections[0]
    if OPERAND.num_planes > 1:
        codes = (codes.to(tl.int32) >> (OPERAND.low_bits * PLANE)) & ((1 << OPERAND.low_bits) - 1)
    NUM_HIGH: tl.constexpr = OPERAND.num_high
    for k in tl.static_range(NUM_HIGH):
        if OPERAND.high_planes[k] > PLANE:
            codes |= ((sections[k + 1] >> (8 // OPERAND.high_planes[k] * PLANE)) & 1) << (OPERAND.low_bits + k)
    return codes


@jit
def _plane_of_pieces(first, second, OPERAND: tl.constexpr):
    """The tile of a plane from the tiles of its two pieces."""
    if OPERAND.column_major:
        plane = alternating_rows(first, second, OPERAND.alternation)
    else:
        plane = alternating(first, second, OPERAND.alternation)
    return plane


@jit
def _planes_of_pieces(first, second, OPERAND: tl.constexpr):
    """The tiles of all planes from the tiles of their two pieces: a tuple."""
    planes = ()
    NUM_PLANES: tl.constexpr = len(first)
    for plane in tl.static_range(NUM_PLANES):
        planes = planes + (_plane_of_pieces(first[plane], second[plane], OPERAND),)  # noqa: RUF005
    return planes


@jit
def halves_of_bytes(packed, OPERAND: tl.constexpr):
    """Unpack tiles of the code sections by inline PTX: a tuple with an fp16 tile for each plane."""
    return _run_ptx(packed, False, OPERAND)


@jit
def integers_of_bytes(packed, OPERAND: tl.constexpr):
    """:func:`halves_of_bytes` for the integers of the codec: an int8 tile for each plane."""
    return _run_ptx(packed, True, OPERAND)


@jit
def _run_ptx(packed, TO_INTEGERS: tl.constexpr, OPERAND: tl.constexpr):
    """Run the PTX of the codec on all code sections: a tuple with a tile for each plane."""
    if OPERAND.alternation > 0:
        first = _run_ptx_on_tile((packed[0], packed[2]), 1, TO_INTEGERS, OPERAND)
        second = _run_ptx_on_tile((packed[1], packed[2]), 2, TO_INTEGERS, OPERAND)
        planes = _planes_of_pieces(first, second, OPERAND)
    else:
        planes = _run_ptx_on_tile(packed, 0, TO_INTEGERS, OPERAND)
    return planes


@jit
def _run_ptx_on_tile(sections, KIND: tl.constexpr, TO_INTEGERS: tl.constexpr, OPERAND: tl.constexpr):
    """Run the PTX of the codec on one tile of each section, four bytes of every section at a time.

    The operands of the PTX are one register with four integers, or two registers with two fp16 levels each, for each
    plane, and then a register with four bytes for each section.

    Args:
        sections: a tuple of tiles.
        KIND: the number of the tile's kind in :attr:`~kvcompile.kernels.formats.bit_planes.Packing.pieces_of_tiles`.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if TO_INTEGERS:
        INTEGERS: tl.constexpr = OPERAND.codec.integers_ptx[KIND]
        ONE_EACH: tl.constexpr = _constraints(NUM_PLANES, len(sections))
        planes = tl.inline_asm_elementwise(
            INTEGERS, ONE_EACH, sections, dtype=(tl.int8,) * NUM_PLANES, is_pure=True, pack=4
        )
    else:
        HALVES: tl.constexpr = OPERAND.unpack_ptx[KIND]
        TWO_EACH: tl.constexpr = _constraints(2 * NUM_PLANES, len(sections))
        planes = tl.inline_asm_elementwise(
            HALVES, TWO_EACH, sections, dtype=(tl.float16,) * NUM_PLANES, is_pure=True, pack=4
        )
    return planes


@constexpr_function
def _constraints(num_outputs, num_inputs):
    return ",".join(["=r"] * num_outputs + ["r"] * num_inputs)


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
            scale = scales_of_bytes(scale.to(tl.int32), OPERAND)
        x = x * scale.to(tl.float32)
    if OPERAND.has_zero:
        zero_ptr = (block_ptr + OPERAND.zero_offset).to(tl.pointer_type(OPERAND.zero_dtype))
        x = x + tl.load(zero_ptr + index).to(tl.float32)
    if OPERAND.takes_static_scale:
        x = x * static_scale
    x = tl.where((tl.arange(0, OPERAND.padded_head_dim) < OPERAND.head_dim)[None, :], x, 0.0)
    if OPERAND.rotated:
        x = unrotate(x, OPERAND)
    return x


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
