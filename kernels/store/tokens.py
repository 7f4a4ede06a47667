"""Write tokens to a packed cache in Triton: one kernel rotates, quantizes and packs tokens of every format."""

from __future__ import annotations

from kvcompile.kernels.lang.planes import channels_of, cut, in_piece_order, planes_in_pieces, side_by_side
from kvcompile.kernels.lang.triton import constexpr_function, jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.store.code_pairs import packed_field, pairs_of
from kvcompile.kernels.tiles.packed import tiles_of_words
from kvcompile.kernels.tiles.runs import rotates_by_products, rotation_matrix, to_stored_basis


@jit(do_not_specialize=["num_tokens", "capacity", "tiles_per_program"])
def store_kernel(
    data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_tokens, capacity, tiles_per_program, static_scale,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ``tiles_per_program`` tiles of TOKENS tokens of one head.

    Grid (ceil(num_tokens / (TOKENS * tiles_per_program)), num_kv_heads, batch).

    Args:
        data_ptr: packed data, uint8, strides (block, batch, head) in bytes; changed in place.
        x_ptr: [batch, num_kv_heads, num_tokens, head_dim], any float dtype, strides (batch, head, token, channel).
        positions_ptr: int64 [batch, num_tokens], strides (batch, token). A position outside [0, capacity) fails an
            assertion, as in the indexing kernels of PyTorch, and no byte is written for it.
        valid_ptr: with HAS_VALID uint8 [batch, num_tokens], strides (batch, token): 0 for a token that is not written.
        capacity: tokens that the cache has room for.
        static_scale: the static scale of the format, if OPERAND takes one.
    """
    _store_tiles(
        tl.program_id(1), data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides,
        valid_strides, num_tokens, capacity, tiles_per_program, static_scale, OPERAND, HAS_VALID, TOKENS, PRECISION,
    )  # fmt: skip


@jit(do_not_specialize=["num_kv_heads", "num_tokens", "capacity", "tiles_per_program"])
def store_pair_kernel(
    k_data_ptr, v_data_ptr, key_ptr, value_ptr, positions_ptr, valid_ptr,
    k_data_strides, v_data_strides, key_strides, value_strides, position_strides, valid_strides,
    num_kv_heads, num_tokens, capacity, tiles_per_program, key_scale, value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`store_kernel` for keys and values at the same positions.

    The second dimension of the grid has the heads of keys, and after them the heads of values.
    """
    head = tl.program_id(1)
    if head < num_kv_heads:
        _store_tiles(
            head, k_data_ptr, key_ptr, positions_ptr, valid_ptr, k_data_strides, key_strides, position_strides,
            valid_strides, num_tokens, capacity, tiles_per_program, key_scale, KEY, HAS_VALID, TOKENS, PRECISION,
        )  # fmt: skip
    else:
        _store_tiles(
            head - num_kv_heads, v_data_ptr, value_ptr, positions_ptr, valid_ptr, v_data_strides, value_strides,
            position_strides, valid_strides, num_tokens, capacity, tiles_per_program, value_scale, VALUE, HAS_VALID,
            TOKENS, PRECISION,
        )  # fmt: skip


@jit
def _store_tiles(
    head, data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_tokens, capacity, tiles_per_program, static_scale,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the tiles of one program, all of one head."""
    batch = tl.program_id(2).to(tl.int64)
    head = head.to(tl.int64)
    head_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + head * data_strides[2]
    x_ptr += batch * x_strides[0] + head * x_strides[1]
    matrix = rotation_matrix(OPERAND, TOKENS)
    for i in range(tiles_per_program):
        first_token = (tl.program_id(0) * tiles_per_program + i) * TOKENS
        if first_token < num_tokens:
            tokens_left = tl.minimum(num_tokens - first_token, TOKENS)
            before = first_token.to(tl.int64)
            # Vectors that are not written are loaded, too, so that the load need not wait for positions.
            x = load_vectors(x_ptr + before * x_strides[2], x_strides, tokens_left, OPERAND, TOKENS)
            tile_positions_ptr = positions_ptr + before * position_strides[1]
            position, written = load_positions(
                tile_positions_ptr, valid_ptr + before * valid_strides[1], batch, tl.arange(0, TOKENS).to(tl.int64),
                position_strides, valid_strides, tokens_left, capacity, HAS_VALID,
            )  # fmt: skip
            first_position = tl.load(tile_positions_ptr + batch * position_strides[0])
            in_pieces: tl.constexpr = loads_piece_order(OPERAND, TOKENS)
            encoded = encode_tile(x, matrix, static_scale, OPERAND, PRECISION, in_pieces)
            _store_tile(head_ptr, data_strides[0], first_position, position, written, encoded, OPERAND, TOKENS)


@constexpr_function
def loads_piece_order(operand, tokens):
    """Whether :func:`load_vectors` loads vectors in piece order: nothing needs them in the order of channels."""
    return tokens > 1 and not operand.rotated and operand.granularity != "group"


@constexpr_function
def columns_at_once(operand, tokens):
    """The number of columns that :func:`load_vectors` loads at once."""
    all_at_once = tokens == 1 or rotates_by_products(operand, tokens)
    return operand.padded_head_dim if all_at_once else min(32, operand.padded_head_dim)


@jit
def load_vectors(x_ptr, x_strides, tokens_left, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Load the vectors of TOKENS tokens from ``x_ptr`` on, in piece order if :func:`loads_piece_order`.

    Only ``tokens_left`` tokens exist; the last of them is repeated.

    Triton spreads each row of a load over as many threads as it can. Loads of 32 columns put a bfloat16 vector into
    four threads. One thread then holds the planes of codes that share a byte, and few threads repeat the computations
    per vector. (Products on tensor cores, and single tokens, need other layouts: they load whole vectors.)
    """
    RUN: tl.constexpr = columns_at_once(OPERAND, TOKENS)
    COLUMNS: tl.constexpr = OPERAND.padded_columns if loads_piece_order(OPERAND, TOKENS) else OPERAND.padded_head_dim
    RUNS: tl.constexpr = COLUMNS // RUN
    token = tl.minimum(tl.arange(0, TOKENS), tokens_left - 1).to(tl.int64)
    x_ptrs = x_ptr + (token * x_strides[2])[:, None]
    runs = ()
    for i in tl.static_range(RUNS):
        channel = i * RUN + tl.arange(0, RUN)[None, :]
        if loads_piece_order(OPERAND, TOKENS):
            channel, exists = channels_of(channel, OPERAND)
        else:
            exists = channel < OPERAND.head_dim
        # A mask would clear the registers of the load first, even if no element is masked.
        if OPERAND.head_dim == COLUMNS:
            run = tl.load(x_ptrs + channel * x_strides[3])
        else:
            run = tl.load(x_ptrs + channel * x_strides[3], mask=exists, other=0.0)
        runs = runs + (run,)  # noqa: RUF005
    return side_by_side(runs)


@jit
def load_positions(
    positions_ptr, valid_ptr, batch, token, position_strides, valid_strides, num_tokens, capacity,
    HAS_VALID: tl.constexpr,
):  # fmt: skip
    """Load the positions of tokens.

    A valid token with a position outside [0, capacity) fails an assertion.

    Returns:
        The positions, int64, and whether each token is written, bool.
    """
    wanted = token < num_tokens
    if HAS_VALID:
        valid_ptrs = valid_ptr + batch * valid_strides[0] + token * valid_strides[1]
        wanted = wanted & (tl.load(valid_ptrs, mask=wanted, other=0) != 0)
    position_ptrs = positions_ptr + batch * position_strides[0] + token * position_strides[1]
    position = tl.load(position_ptrs, mask=wanted, other=0)
    in_cache = (position >= 0) & (position < capacity)
    tl.device_assert(in_cache, "kvcompile::store: a position is outside of the cache")
    return position, wanted & in_cache


@jit
def _store_tile(
    ptr, stride_block, first_position, position, written, encoded, OPERAND: tl.constexpr, TOKENS: tl.constexpr
):
    """Store encoded tokens at their positions.

    ``ptr`` points to the first block of the head. ``first_position`` is the position of the first token, as a scalar.
    Tokens that share scales must be a block in order.
    """
    in_order = (position == first_position + tl.arange(0, TOKENS)) & written
    if (
        OPERAND.block_tokens == TOKENS
        and (tl.min(in_order.to(tl.int32), 0) > 0)
        and (first_position % OPERAND.block_tokens < 1)
    ):
        # The tokens fill a block in order, as in a prefill. Neighbours in memory allow wide stores.
        block_ptr = ptr + first_position // OPERAND.block_tokens * stride_block
        everywhere = tl.full([TOKENS], True, tl.int1)
        store_sections(block_ptr, tl.arange(0, TOKENS), everywhere, encoded, OPERAND)
    elif OPERAND.granularity != "channel":
        block_ptrs = ptr + (position // OPERAND.block_tokens) * stride_block
        store_sections(block_ptrs, position % OPERAND.block_tokens, written, encoded, OPERAND)


@jit
def store_sections(block_ptrs, row, written, encoded, OPERAND: tl.constexpr):
    """Store encoded tokens in the rows ``row`` [tokens] of the blocks at ``block_ptrs``, a scalar or [tokens]."""
    codes, scale, zero = encoded
    _store_codes(block_ptrs, row, written, codes, OPERAND)
    if OPERAND.has_scale:
        _store_metadata(block_ptrs + OPERAND.scale_offset, row, written, scale, OPERAND.scale_dtype, OPERAND)
    if OPERAND.has_zero:
        _store_metadata(block_ptrs + OPERAND.zero_offset, row, written, zero, OPERAND.zero_dtype, OPERAND)


@jit
def encode_tile(x, matrix, static_scale, OPERAND: tl.constexpr, PRECISION: tl.constexpr, IN_PIECES: tl.constexpr):
    """Rotate and quantize a tile of vectors, [tokens, columns]; with IN_PIECES they are in piece order.

    As in the specification, a vector that is not finite in the stored basis gets the codes of the zero vector, and
    scales of NaN unless scales are per channel. Plain floats are stored unchanged.

    Returns:
        Codes in piece order [tokens, columns] of a format with one plane, otherwise pairs of codes; scales; and zero
        points. Scales and zero points are [tokens], or [tokens, num_scales] per group, or [columns] per channel; in the
        last case the tile must be one block.
    """
    TOKENS: tl.constexpr = x.shape[0]
    x = to_stored_basis(x, matrix, OPERAND, PRECISION)
    if not (IN_PIECES or rotates_by_products(OPERAND, TOKENS) or OPERAND.granularity == "group"):
        x = in_piece_order(x, OPERAND)
    finite = tl.sum(x * 0.0, 1) == 0.0  # infinity times zero is NaN, and so is the sum
    if OPERAND.code_dtype == tl.uint8:
        x = tl.where(finite[:, None], x, 0.0)
    if OPERAND.takes_static_scale:
        x = x * tl.div_rn(1.0, static_scale)
    if OPERAND.granularity == "plane":
        planes = planes_in_pieces(x, OPERAND)
        _, in_plane = channels_of(tl.arange(0, planes[0].shape[1])[None, :], OPERAND)
        codes, scale, zero = OPERAND.codec.encode(planes, in_plane, OPERAND)
        scale = _marked(scale, finite, OPERAND)
    elif OPERAND.granularity == "group":
        GROUPS: tl.constexpr = OPERAND.padded_head_dim // OPERAND.group_size
        in_group = tl.full([1, OPERAND.group_size], True, tl.int1)
        x = tl.reshape(x, [TOKENS * GROUPS, OPERAND.group_size])
        codes, scale, zero = OPERAND.codec.encode(x, in_group, OPERAND)
        codes = in_piece_order(tl.reshape(codes, [TOKENS, OPERAND.padded_head_dim]), OPERAND)
        scale, zero = tl.reshape(scale, [TOKENS, GROUPS]), tl.reshape(zero, [TOKENS, GROUPS])
        scale = tl.where(finite[:, None], scale, float("nan"))
    elif OPERAND.granularity == "channel":
        in_block = tl.full([1, TOKENS], True, tl.int1)
        codes, scale, zero = OPERAND.codec.encode(tl.trans(x), in_block, OPERAND)
        codes = tl.trans(codes)
    else:
        _, in_vector = channels_of(tl.arange(0, x.shape[1])[None, :], OPERAND)
        codes, scale, zero = OPERAND.codec.encode(x, in_vector, OPERAND)
        scale = tl.where(finite, scale, float("nan"))
    whole: tl.constexpr = OPERAND.num_planes == 1 or OPERAND.codec.paired or OPERAND.low_bits == 0
    encoded = codes if whole else pairs_of(codes, OPERAND)
    return encoded, scale, zero


@jit
def _marked(scale, finite, OPERAND: tl.constexpr):
    """Bytes of scales per plane, with the byte of NaN for vectors that are not finite."""
    marked = ()
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        marked = marked + (tl.where(finite, scale[plane], OPERAND.codec.constants.nan),)  # noqa: RUF005
    return marked


@jit
def _store_codes(block_ptrs, row, written, codes, OPERAND: tl.constexpr):
    """Pack codes, [tokens, columns] or pairs, and store them; arguments as in :func:`store_sections`."""
    if OPERAND.low_bits == 0:
        _store_words(block_ptrs, row, written, codes, OPERAND)
    elif OPERAND.num_planes == 1:
        _store_columns(block_ptrs, row, written, codes, 0, OPERAND.code_dtype, OPERAND.width, OPERAND)
    else:
        low = packed_field(codes, 0, OPERAND.low_bits, OPERAND.low_bits, OPERAND.num_planes)
        _store_columns(block_ptrs, row, written, low, 0, tl.uint8, OPERAND.width, OPERAND)
        NUM_HIGH: tl.constexpr = OPERAND.num_high
        for k in tl.static_range(NUM_HIGH):
            _store_high_bits(block_ptrs, row, written, codes, k, OPERAND)


@jit
def _store_words(block_ptrs, row, written, planes, OPERAND: tl.constexpr):
    """Store a tuple of planes of codes, int32 [tokens, columns], as words."""
    word = planes[0]
    OTHER_PLANES: tl.constexpr = OPERAND.num_planes - 1
    for plane in tl.static_range(OTHER_PLANES):
        word |= planes[plane + 1] << OPERAND.word_fields[plane + 1][0]
    NUM_TILES: tl.constexpr = len(tiles_of_words(OPERAND))
    for i in tl.static_range(NUM_TILES):
        _store_word_tile(block_ptrs, row, written, word, i, OPERAND)


@jit
def _store_word_tile(block_ptrs, row, written, word, TILE: tl.constexpr, OPERAND: tl.constexpr):
    """Store the bits of words, int32 [tokens, columns], that lie in one tile of their sections."""
    BEGIN: tl.constexpr = tiles_of_words(OPERAND)[TILE][0]
    BITS: tl.constexpr = tiles_of_words(OPERAND)[TILE][1]
    WIDTH: tl.constexpr = tiles_of_words(OPERAND)[TILE][2]
    OFFSET: tl.constexpr = tiles_of_words(OPERAND)[TILE][3]
    FIRST: tl.constexpr = tiles_of_words(OPERAND)[TILE][4]
    byte = _joined_pieces((word >> BEGIN) & ((1 << BITS) - 1), 8 // BITS, WIDTH, BITS, OPERAND)
    offset = OFFSET + FIRST * (OPERAND.block_tokens if OPERAND.column_major else 1)
    _store_columns(block_ptrs, row, written, byte, offset, tl.uint8, WIDTH, OPERAND)


@jit
def _store_high_bits(block_ptrs, row, written, pairs, K: tl.constexpr, OPERAND: tl.constexpr):
    """Pack bit ``low_bits + K`` of the planes that have this bit, and store it in high section K."""
    COUNT: tl.constexpr = OPERAND.high_planes[K]
    PIECES: tl.constexpr = 8 // COUNT
    WIDTH: tl.constexpr = OPERAND.high_widths[K]
    high = packed_field(pairs, OPERAND.low_bits + K, 1, PIECES, COUNT)
    high = _joined_pieces(high, PIECES, WIDTH, 1, OPERAND)
    _store_columns(block_ptrs, row, written, high, OPERAND.high_offsets[K], tl.uint8, WIDTH, OPERAND)


@jit
def _joined_pieces(x, PIECES: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr, OPERAND: tl.constexpr):
    """Cut a plane in PIECES of WIDTH channels, and join them. Each is shifted by SHIFT bits more than the previous."""
    OTHER_PIECES: tl.constexpr = PIECES - 1
    if OPERAND.num_pieces >= PIECES * OPERAND.num_parts:
        pieces = cut(x, PIECES)
        joined = pieces[0]
        for i in tl.static_range(OTHER_PIECES):
            joined |= pieces[i + 1] << (SHIFT * (i + 1))
    else:
        column = tl.broadcast_to(tl.arange(0, x.shape[1])[None, :], x.shape)
        joined = x
        for i in tl.static_range(OTHER_PIECES):
            piece = tl.gather(x, tl.minimum(column + (i + 1) * WIDTH, x.shape[1] - 1), 1)
            joined |= piece << (SHIFT * (i + 1))
    return joined


@jit
def _store_columns(
    block_ptrs, row, written, x, offset, DTYPE: tl.constexpr, WIDTH: tl.constexpr, OPERAND: tl.constexpr
):
    """Store a tile [tokens, columns] in piece order in the code section at byte ``offset`` of a block.

    A row of the section has WIDTH elements.
    """
    ptrs = (block_ptrs + offset).to(tl.pointer_type(DTYPE))
    column, exists = channels_of(tl.arange(0, x.shape[1]), OPERAND)
    if OPERAND.column_major:
        ptrs = (ptrs + row)[:, None] + (column * OPERAND.block_tokens)[None, :]
    else:
        ptrs = (ptrs + row * WIDTH)[:, None] + column[None, :]
    tl.store(ptrs, x.to(DTYPE), mask=written[:, None] & (exists & (column < WIDTH))[None, :])


@jit
def _store_metadata(section_ptrs, row, written, x, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    """Store scales or zero points, [tokens], [tokens, groups] or [columns]."""
    ptrs = section_ptrs.to(tl.pointer_type(DTYPE))
    if OPERAND.granularity == "plane":
        PLANES: tl.constexpr = OPERAND.num_planes
        for plane in tl.static_range(PLANES):
            tl.store(ptrs + row * OPERAND.num_scales + plane, x[plane].to(DTYPE), mask=written)
    elif OPERAND.granularity == "group":
        group = tl.arange(0, x.shape[1])[None, :]
        ptrs = (ptrs + row * OPERAND.num_scales)[:, None] + group
        tl.store(ptrs, x.to(DTYPE), mask=written[:, None] & (group < OPERAND.num_scales))
    elif OPERAND.granularity == "channel":
        channel, exists = channels_of(tl.arange(0, x.shape[0]), OPERAND)
        tl.store(ptrs + channel, x.to(DTYPE), mask=exists)
    else:
        tl.store(ptrs + row, x.to(DTYPE), mask=written)
