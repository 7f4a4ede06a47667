"""Levels and integers of codes: tiles that :mod:`kvcompile.kernels.tiles.packed` has loaded are unpacked."""

from __future__ import annotations

from kvcompile.compat.triton_names import MOVES_ONE_OUTPUT
from kvcompile.kernels.lang.planes import alternating, alternating_rows
from kvcompile.kernels.lang.triton import constant, constexpr_function, jit, tl
from kvcompile.kernels.tiles.packed import tiles_of_words

COPY_FOR_EACH_PLANE = constant(MOVES_ONE_OUTPUT)


@jit
def unpack(packed, OPERAND: tl.constexpr):
    """Unpack a tile: the levels of each plane, divided by the gain of the plane, in the dtype of the products."""
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
        planes = planes + (_plane_of_pieces(first[plane], second[plane], OPERAND),)  # type: ignore[assignment]  # noqa: RUF005
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
    """Run the PTX of the codec on one tile of each section: a tuple with a tile for each plane.

    Args:
        sections: a tuple of tiles.
        KIND: the number of the tile's kind in :attr:`~kvcompile.kernels.formats.bit_planes.Packing.pieces_of_tiles`.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if NUM_PLANES > 1 and COPY_FOR_EACH_PLANE:
        planes = ()
        for plane in tl.static_range(NUM_PLANES):
            planes = planes + (_outputs_of_ptx(sections, KIND, TO_INTEGERS, plane, OPERAND)[plane],)  # noqa: RUF005
    else:
        planes = _outputs_of_ptx(sections, KIND, TO_INTEGERS, 0, OPERAND)
    return planes


@jit
def _outputs_of_ptx(sections, KIND: tl.constexpr, TO_INTEGERS: tl.constexpr, COPY: tl.constexpr, OPERAND: tl.constexpr):
    """Run the PTX of the codec on four bytes of every section at a time: a tuple with a tile for each plane.

    The operands of the PTX are one register with four integers, or two registers with two fp16 levels each, for each
    plane, and then a register with four bytes for each section.

    Args:
        sections, KIND: as in :func:`_run_ptx_on_tile`.
        COPY: operations of different copies stay apart.
    """
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    if TO_INTEGERS:
        INTEGERS: tl.constexpr = _copy_of(OPERAND.codec.integers_ptx[KIND], COPY)
        ONE_EACH: tl.constexpr = _constraints(NUM_PLANES, len(sections))
        planes = tl.inline_asm_elementwise(
            INTEGERS, ONE_EACH, sections, dtype=(tl.int8,) * NUM_PLANES, is_pure=True, pack=4
        )
    else:
        HALVES: tl.constexpr = _copy_of(OPERAND.unpack_ptx[KIND], COPY)
        TWO_EACH: tl.constexpr = _constraints(2 * NUM_PLANES, len(sections))
        planes = tl.inline_asm_elementwise(
            HALVES, TWO_EACH, sections, dtype=(tl.float16,) * NUM_PLANES, is_pure=True, pack=4
        )
    return planes


@constexpr_function
def _copy_of(ptx, copy):
    """The PTX with a comment, so that Triton does not merge this copy with another one. ptxas merges instructions."""
    return ptx if copy == 0 else f"// copy {copy}\n{ptx}"


@constexpr_function
def _constraints(num_outputs, num_inputs):
    return ",".join(["=r"] * num_outputs + ["r"] * num_inputs)


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
