"""Pairs of codes: int32 tiles with the codes of one plane in the lower half, and of the next plane in the upper half.

Formats of several planes are packed from pairs, because one shift moves the bits of both halves. A code lies in the
lowest bits of its half; the other bits are arbitrary.
"""

from __future__ import annotations

from kvcompile.kernels.lang.planes import planes_in_pieces
from kvcompile.kernels.lang.rounding import has_ptx
from kvcompile.kernels.lang.triton import jit, tl


@jit
def pairs_of(codes, OPERAND: tl.constexpr):
    """A tuple of pairs from codes in piece order, [rows, channels], of an even number of planes."""
    planes = planes_in_pieces(codes, OPERAND)
    pairs = ()
    NUM_PAIRS: tl.constexpr = OPERAND.num_planes // 2
    for i in tl.static_range(NUM_PAIRS):
        pairs = pairs + (_pair(planes[2 * i], planes[2 * i + 1]),)  # noqa: RUF005
    return pairs


@jit
def _pair(first, second):
    if has_ptx():
        pair = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        pair = (first & 0xFFFF) | (second << 16)
    return pair


@jit
def packed_field(pairs, FIRST: tl.constexpr, BITS: tl.constexpr, SPACING: tl.constexpr, PLANES: tl.constexpr):
    """The bits FIRST to FIRST + BITS - 1 of the codes of PLANES planes, in the lowest byte, SPACING bits apart."""
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x00010001
    OTHER_PAIRS: tl.constexpr = PLANES // 2 - 1
    both = (pairs[0] >> FIRST) & MASK
    for i in tl.static_range(OTHER_PAIRS):
        both |= ((pairs[i + 1] >> FIRST) & MASK) << (2 * SPACING * (i + 1))
    return both | (both >> (16 - SPACING))
