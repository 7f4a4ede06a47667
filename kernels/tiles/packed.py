"""Loading tiles of packed tokens, and prefetching them to the L2 cache."""

from __future__ import annotations

from kvcompile.kernels.formats.uniform import scales_of_bytes
from kvcompile.kernels.lang.planes import halves
from kvcompile.kernels.lang.tiles import prefetch_lines
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl


@jit
def load_packed(ptr, stride_block, tokens_left, shifts, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Load a tile of packed tokens. ``shifts`` are the results of :func:`shifts_of_words` in a loop, otherwise empty.

    Masks are per block and not per token, because blocks exist as a whole, and masks per token break up wide loads.

    Returns:
        A tuple of the code sections; the scales; and the zero points, or the scales again if there are no zero points.

        Code sections are tiles [tokens, width] of keys or [width, tokens] of values: first the section ``codes``, then
        the high sections as :func:`_load_high_bits` returns them. If planes are loaded in pieces, they are the tiles of
        :func:`_load_pieces`; for words, the tiles of :func:`load_words`. Scales and zero points are float32 [tokens] if
        they are per token. Per group and per plane they are a tuple with a float32 tile [tokens] for each. Per
        channel they are a tuple with a tile [blocks, width] for each plane, in the dtype of the section.
    """
    token = tl.arange(0, TOKENS)
    block, row = token // OPERAND.block_tokens, token % OPERAND.block_tokens
    exists = block * OPERAND.block_tokens < tokens_left
    block_offset = block.to(tl.int64) * stride_block
    column = tl.arange(0, OPERAND.padded_width)
    if OPERAND.low_bits == 0:
        packed = load_words(ptr, block_offset, row, exists, column, shifts, OPERAND)
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
def load_words(ptr, block_offset, row, exists, column, shifts, OPERAND: tl.constexpr):
    """Load the sections of words: a tile for each byte of a word, and for each section of fewer bits.

    Returns:
        Without inline PTX int32 tiles. In the tile of a section of fewer bits, these bits of each column are lowest,
        and the bits above them are arbitrary. With inline PTX tiles of unchanged bytes. The tile of a section of fewer
        bits is then followed by a tile with the number of bits by which it must be shifted.
    """
    tiles = ()
    NUM_TILES: tl.constexpr = len(tiles_of_words(OPERAND))
    for i in tl.static_range(NUM_TILES):
        tiles = tiles + _load_word_tile(ptr, block_offset, row, exists, column, shifts, i, OPERAND)
    return tiles


@jit
def shifts_of_words(ptr, never, OPERAND: tl.constexpr):
    """For each tile of :func:`tiles_of_words`, the number of bits by which it must be shifted, [1, width] or [width, 1]
    for values.

    A loop that unpacks words by inline PTX needs them. Triton unpacks a tile in the layout of its product if all its
    inputs are loaded, and otherwise passes the levels through shared memory. These numbers therefore are the ``other``
    of a load.

    Args:
        ptr: any pointer to bytes.
        never: False, unknown to the compiler.
    """
    shifts = ()
    if OPERAND.low_bits == 0 and OPERAND.unpack_ptx is not None:
        NUM_TILES: tl.constexpr = len(tiles_of_words(OPERAND))
        for i in tl.static_range(NUM_TILES):
            shifts = shifts + (_load_shift(ptr, never, i, OPERAND),)  # noqa: RUF005
    return shifts


@jit
def _load_shift(ptr, never, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """One of the results of :func:`shifts_of_words`.

    Fewer numbers are loaded than a warp has threads. Triton otherwise keeps the layout of this load, instead of the
    layout of the products.
    """
    EQUAL: tl.constexpr = _equal_shifts(TILE, OPERAND)
    shift = _shift_of_tile(EQUAL * tl.arange(0, OPERAND.padded_width // EQUAL), TILE, OPERAND)
    shift = tl.load(ptr + shift, mask=(shift >= 0) & never, other=shift)
    shift = tl.broadcast_to(shift[:, None], [OPERAND.padded_width // EQUAL, EQUAL])
    if OPERAND.column_major:
        shift = tl.reshape(shift, [OPERAND.padded_width, 1])
    else:
        shift = tl.reshape(shift, [1, OPERAND.padded_width])
    return shift


@constexpr_function
def _equal_shifts(tile, operand):
    """The number of neighbouring columns, from 1 to 4, that have the same shift in a tile of words."""
    width = tiles_of_words(operand)[tile][2]
    return 4 if width % 4 == 0 else 2 if width % 2 == 0 else 1


@jit
def _shift_of_tile(column, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """The number of bits by which columns of a tile of words must be shifted, uint8."""
    BITS: tl.constexpr = tiles_of_words(OPERAND)[TILE][1]
    WIDTH: tl.constexpr = tiles_of_words(OPERAND)[TILE][2]
    return (tl.where(column < OPERAND.width, column // WIDTH, 0) * BITS).to(tl.uint8)


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
def _load_word_tile(ptr, block_offset, row, exists, column, shifts, TILE: tl.constexpr, OPERAND: tl.constexpr):
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
        if len(shifts) > 0:
            shift = shifts[TILE]
        else:
            shift = _shift_of_tile(column[:, None] if OPERAND.column_major else column[None, :], TILE, OPERAND)
        if OPERAND.unpack_ptx is not None:
            tiles = (tile, tl.broadcast_to(shift, tile.shape))
        else:
            tiles = (tile.to(tl.int32) >> shift,)
    return tiles


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
    elif OPERAND.granularity == "group":
        metadata = _load_scales_of_groups(ptr, block_offset, row, exists, OPERAND)
    elif OPERAND.granularity == "plane":
        metadata = _load_scales_of_planes(ptr, block_offset, row, exists, OPERAND)
    else:
        metadata = ()
        NUM_PLANES: tl.constexpr = OPERAND.num_planes
        for plane in tl.static_range(NUM_PLANES):
            index = plane * OPERAND.width + column
            if OPERAND.width != OPERAND.padded_width:
                index = tl.minimum(index, OPERAND.head_dim - 1)
            if OPERAND.column_major:
                ptrs, mask = ptr + index[:, None] + block_offset[None, :], exists[None, :]
            else:
                ptrs, mask = ptr + block_offset[:, None] + index[None, :], exists[:, None]
            tile = tl.load(ptrs, mask=mask, other=0.0)
            metadata = metadata + (tile,)  # noqa: RUF005
    return metadata


@constexpr_function
def has_several_scales(operand):
    """Whether the channels of a vector have several scales: one for each plane, or for each group."""
    return operand.granularity in ("plane", "group")


@constexpr_function
def has_zeros_of_groups(operand):
    """Whether the channels of a vector have several zero points, one for each group."""
    return operand.granularity == "group" and operand.has_zero


@constexpr_function
def groups_of_plane(operand, plane):
    """The numbers of the scales of a plane, if scales are per plane or per group."""
    if operand.granularity == "plane":
        return (plane,)
    first, end = plane * operand.width, min((plane + 1) * operand.width, operand.head_dim)
    return tuple(range(first // operand.group_size, -(-end // operand.group_size)))


@jit
def in_group(column, PLANE: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr):
    """Whether columns of a plane lie in a group."""
    return (PLANE * OPERAND.width + column) // OPERAND.group_size == GROUP


@jit
def of_plane(numbers, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The numbers of groups or planes as a tile that broadcasts to a plane; a tuple of [tokens]."""
    GROUPS: tl.constexpr = groups_of_plane(OPERAND, PLANE)
    column = tl.arange(0, OPERAND.padded_width)
    column = column[:, None] if OPERAND.column_major else column[None, :]
    x = _along_tokens(numbers[GROUPS[0]], OPERAND)
    for i in tl.static_range(1, len(GROUPS)):
        x = tl.where(in_group(column, PLANE, GROUPS[i], OPERAND), _along_tokens(numbers[GROUPS[i]], OPERAND), x)
    return x


@jit
def _along_tokens(x, OPERAND: tl.constexpr):
    return x[None, :] if OPERAND.column_major else x[:, None]


@jit
def _load_scales_of_groups(ptr, block_offset, row, exists, OPERAND: tl.constexpr):
    """Load the scales or zero points of vectors that have one for each group: a tuple of float32 [tokens].

    Two of 16 bits are loaded as one number, because small loads are not copied asynchronously.
    """
    metadata = ()
    GROUPS: tl.constexpr = OPERAND.num_scales
    DTYPE: tl.constexpr = ptr.dtype.element_ty
    if GROUPS % 2 == 0 and DTYPE.primitive_bitwidth == 16:
        for pair in tl.static_range(GROUPS // 2):
            ptrs = ptr.to(tl.pointer_type(tl.uint32)) + block_offset // 2 + row * (GROUPS // 2) + pair
            word = tl.load(ptrs, mask=exists, other=0)
            for i in tl.static_range(2):
                half = ((word >> (16 * i)) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)
                metadata = metadata + (half.to(tl.float32),)  # noqa: RUF005
    else:
        for group in tl.static_range(GROUPS):
            half = tl.load(ptr + block_offset + row * GROUPS + group, mask=exists, other=0.0)
            metadata = metadata + (half.to(tl.float32),)  # noqa: RUF005
    return metadata


@jit
def _load_scales_of_planes(ptr, block_offset, row, exists, OPERAND: tl.constexpr):
    """Load the scales of vectors that have one for each plane: a tuple of float32 [tokens].

    Two or four bytes of a vector are loaded as one number, because small loads are not copied asynchronously.
    """
    scales = ()
    PLANES: tl.constexpr = OPERAND.num_planes
    if PLANES == 2 or PLANES == 4:
        DTYPE: tl.constexpr = tl.uint16 if PLANES == 2 else tl.uint32
        word = tl.load(ptr.to(tl.pointer_type(DTYPE)) + block_offset // PLANES + row, mask=exists, other=0)
        word = word.to(tl.int32, bitcast=PLANES == 4)
        for plane in tl.static_range(PLANES):
            scales = scales + (scales_of_bytes((word >> (8 * plane)) & 0xFF),)  # noqa: RUF005
    else:
        for plane in tl.static_range(PLANES):
            byte = tl.load(ptr + block_offset + row * PLANES + plane, mask=exists, other=0)
            scales = scales + (scales_of_bytes(byte.to(tl.int32)),)  # noqa: RUF005
    return scales
