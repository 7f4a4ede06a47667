"""Tiles cut along their columns: planes of channels, and pieces of planes.

A tile in *piece order* has the pieces of a vector side by side, each padded to a power of two. A piece is the longest
run of channels that no section of codes cuts (:mod:`kvcompile.kernels.formats.bit_planes`). :func:`cut` gives the
planes and the pieces of such a tile. No number moves between threads if each thread has a number of every piece.

Products take planes, tiles [rows, padded_width]. If a plane is loaded in two pieces, the pieces take turns in its tile
(:func:`alternating`); otherwise its columns are in the order of channels, and padding comes last.
"""

from __future__ import annotations

import math

from kvcompile.kernels.lang.triton import constexpr_function, jit, tl, triton


@jit
def halves(x):
    """The left and the right half of the columns of a tile."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))


@jit
def cut(x, COUNT: tl.constexpr):
    """The columns of a tile in COUNT equal tiles, at most 16 and a power of two: a tuple."""
    tiles = (x,)
    for stage in tl.static_range(4):
        if 1 << stage < COUNT:
            shorter = ()
            for i in tl.static_range(1 << stage):
                shorter = shorter + halves(tiles[i])  # type: ignore[assignment]
            tiles = shorter  # type: ignore[assignment]
    return tiles


@jit
def side_by_side(tiles):
    """Concatenate equal tiles along their columns, at most 64 and a power of two; the inverse of :func:`cut`."""
    COUNT: tl.constexpr = len(tiles)
    ROWS: tl.constexpr = tiles[0].shape[0]
    COLUMNS: tl.constexpr = tiles[0].shape[1]
    for stage in tl.static_range(6):
        if COUNT >> stage > 1:
            # Join each tile of the first half with its tile of the second half. The new last dimension is a bit of a
            # tile's number.
            pairs = ()
            for i in tl.static_range(COUNT >> (stage + 1)):
                pairs = pairs + (tl.join(tiles[i], tiles[i + (COUNT >> (stage + 1))]),)  # type: ignore[assignment]  # noqa: RUF005
            tiles = pairs
    x = tl.permute(tl.reshape(tiles[0], [ROWS, COLUMNS, COUNT]), (0, 2, 1))
    return tl.reshape(x, [ROWS, COUNT * COLUMNS])


@jit
def with_zeros(tiles, COUNT: tl.constexpr):
    """COUNT tiles: equal tiles, and tiles of zeros after them."""
    MISSING: tl.constexpr = COUNT - len(tiles)
    for _ in tl.static_range(MISSING):
        tiles = tiles + (tl.zeros(tiles[0].shape, tiles[0].dtype),)  # type: ignore[assignment, misc]  # noqa: RUF005
    return tiles


@constexpr_function
def has_padding(operand):
    """Whether pieces have padding; without it, piece order is the order of channels."""
    return operand.piece_width != operand.padded_piece_width


@jit
def channels_of(column, OPERAND: tl.constexpr):
    """The channels of columns in piece order, and whether they exist: the others are padding.

    Columns may also be columns of a plane; then its first channel is 0.
    """
    if has_padding(OPERAND):
        piece, place = column // OPERAND.padded_piece_width, column % OPERAND.padded_piece_width
        channel = piece * OPERAND.piece_width + place
        exists = (place < OPERAND.piece_width) & (piece < OPERAND.num_pieces)
    else:
        channel, exists = column, column < OPERAND.head_dim
    return channel, exists


@jit
def in_piece_order(x, OPERAND: tl.constexpr):
    """A tile [rows, padded_head_dim] in piece order; padding is zero."""
    if has_padding(OPERAND):
        channel, exists = channels_of(tl.arange(0, OPERAND.padded_columns), OPERAND)
        x = _gathered(x, channel, exists)
    return x


@jit
def planes_in_pieces(x, OPERAND: tl.constexpr):
    """The planes of a tile in piece order: a tuple."""
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    parts = cut(x, OPERAND.padded_parts)
    planes = ()
    for i in tl.static_range(NUM_PLANES):
        planes = planes + (parts[i],)  # type: ignore[assignment]  # noqa: RUF005
    return planes


@jit
def alternating(first, second, COLUMNS: tl.constexpr):
    """Two equal tiles as one, whose columns take turns: COLUMNS of the first tile, COLUMNS of the second, and so on."""
    ROWS: tl.constexpr = first.shape[0]
    WIDTH: tl.constexpr = first.shape[1]
    pairs = tl.reshape(tl.join(first, second), [ROWS, WIDTH // COLUMNS, COLUMNS, 2])
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), [ROWS, 2 * WIDTH])


@jit
def alternating_rows(first, second, COUNT: tl.constexpr):
    """:func:`alternating` for the rows of tiles."""
    ROWS: tl.constexpr = first.shape[0]
    WIDTH: tl.constexpr = first.shape[1]
    pairs = tl.reshape(tl.join(first, second), [ROWS // COUNT, COUNT, WIDTH, 2])
    return tl.reshape(tl.permute(pairs, (0, 3, 1, 2)), [2 * ROWS, WIDTH])


@jit
def channels_of_plane(column, OPERAND: tl.constexpr):
    """The channels of the columns of a plane, counted from its first channel, and whether they exist."""
    COLUMNS: tl.constexpr = OPERAND.alternation
    if COLUMNS > 0:
        place = column // (2 * COLUMNS) * COLUMNS + column % COLUMNS
        channel = column // COLUMNS % 2 * (OPERAND.width // 2) + place
        exists = place < OPERAND.width // 2
    else:
        channel, exists = column, column < OPERAND.width
    return channel, exists


@jit
def _in_turns(planes, OPERAND: tl.constexpr):
    """Planes in the order of channels with their pieces in turns: a tuple."""
    result = ()
    NUM_PLANES: tl.constexpr = len(planes)
    for i in tl.static_range(NUM_PLANES):
        first, second = halves(planes[i])
        result = result + (alternating(first, second, OPERAND.alternation),)  # type: ignore[assignment]  # noqa: RUF005
    return result


@constexpr_function
def next_power_of_2(n):
    return triton.next_power_of_2(n)


@jit
def planes_of(x, OPERAND: tl.constexpr):
    """The planes of a tile [rows, padded_head_dim] in the order of channels, as a tuple of [rows, padded_width].

    The padding of planes is zero.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if NUM_PLANES == 1:
        planes = (x,)
    elif OPERAND.head_dim == NUM_PLANES * OPERAND.padded_width and NUM_PLANES != 3:
        planes = cut(x, NUM_PLANES)
        if OPERAND.alternation > 0:
            planes = _in_turns(planes, OPERAND)
    else:
        planes = _padded_planes(x, OPERAND)
    return planes


@jit
def _padded_planes(x, OPERAND: tl.constexpr):
    """:func:`planes_of` for planes with padding.

    One gather makes all planes, unless they have more columns than ``x``: Triton 3.6 and 3.7 fail on such a gather
    (``TritonGPUOptimizeThreadLocality``). After a gather for each plane, Triton may keep a query in shared memory, and
    load it again for each tile of keys.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    COUNT: tl.constexpr = next_power_of_2(NUM_PLANES)
    planes = ()
    if COUNT * OPERAND.padded_width <= x.shape[1]:
        column = tl.arange(0, COUNT * OPERAND.padded_width)
        channel, exists = channels_of_plane(column % OPERAND.padded_width, OPERAND)
        plane = column // OPERAND.padded_width
        parts = cut(_gathered(x, channel + plane * OPERAND.width, exists & (plane < NUM_PLANES)), COUNT)
        for i in tl.static_range(NUM_PLANES):
            planes = planes + (parts[i],)  # type: ignore[assignment]  # noqa: RUF005
    else:
        channel, exists = channels_of_plane(tl.arange(0, OPERAND.padded_width), OPERAND)
        for i in tl.static_range(NUM_PLANES):
            planes = planes + (_gathered(x, channel + i * OPERAND.width, exists),)  # type: ignore[assignment]  # noqa: RUF005
    return planes


@constexpr_function
def unpadded_channels(operand):
    """The largest power of two that divides the channels of a plane and its padding."""
    return math.gcd(operand.width, operand.padded_width)


@jit
def in_channel_order(planes, OPERAND: tl.constexpr):
    """Planes [rows, padded_width] as a tile [rows, padded_head_dim] in the order of channels: inverse of planes_of.

    Planes must be loaded as a whole.
    """
    tl.static_assert(OPERAND.alternation == 0)
    if OPERAND.num_planes == 1:
        x = planes[0]
    else:
        CHANNELS: tl.constexpr = unpadded_channels(OPERAND)
        NUM_PLANES: tl.constexpr = OPERAND.num_planes
        TILES_OF_PLANE: tl.constexpr = OPERAND.width // CHANNELS
        tiles = ()
        for plane in tl.static_range(NUM_PLANES):
            parts = cut(planes[plane], OPERAND.padded_width // CHANNELS)
            for i in tl.static_range(TILES_OF_PLANE):
                tiles = tiles + (parts[i],)  # type: ignore[assignment]  # noqa: RUF005
        x = side_by_side(with_zeros(tiles, OPERAND.padded_head_dim // CHANNELS))
    return x


@jit
def _gathered(x, column, exists):
    """The columns ``column`` of a tile, where ``exists``, and zero elsewhere; both are [columns]."""
    ROWS: tl.constexpr = x.shape[0]
    index = tl.broadcast_to(tl.where(exists, column, 0)[None, :], [ROWS, column.shape[0]])
    return tl.where(exists[None, :], tl.gather(x, index, 1), 0)
