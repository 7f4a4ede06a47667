"""PTX text that looks up small numbers by packed codes, four bytes of each code section at once.

``PRMT`` picks four of eight bytes by the four lowest nibbles of a register; three bits of each nibble count. One
instruction looks up four codes, one per nibble, in a table of eight bytes. The highest bit of a code of four bits is
its sign. The two nibbles of a byte are codes of two planes. The bytes of a looked-up register therefore alternate
between the planes: byte ``j`` of the first plane, ``j`` of the second, ``j + 1`` of the first, ``j + 1`` of the second.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

from kvcompile.kernels.formats.bit_planes import Packing


def lookup_integers(levels: Sequence[float], pieces: tuple[int, ...]) -> str:
    """PTX that looks up int8 numbers, a register for each plane, from registers of four bytes.

    The results are $0 and $1 for codes of four bits, else $0 to $3, in the order of
    :func:`kvcompile.kernels.attention.query.interleaved`. They are ``floor(level)``, which equals ``level - 0.5``.

    Args:
        levels: the levels of codes 0, 1, ...: 4, 8 or 16 odd multiples of one half. The second half of 16 levels are
            the negatives of the first half.
        pieces: the pieces of the tile, 0 and 1; empty without a section of high bits. The operands are the low bits,
            and high bits for each piece: bits 0, 2, 4 and 6 of a byte for piece 0, and the others for piece 1. If there
            are two pieces, the high bits of a piece are 0 in the columns of the other piece.
    """
    num_planes = _num_planes(levels)
    lines, nibbles = nibbles_of(num_planes, pieces, num_outputs=num_planes)
    tables = _tables("integer", [math.floor(level) for level in levels])
    for i, register in enumerate(nibbles):
        lines += _index(register, levels)
        for half in range(2):
            lines.append(_lookup(f"${2 * i + half}", "integer", half, levels))
            if num_planes == 2:
                lines.append(f"xor.b32 ${half}, ${half}, sign{half};")  # floor(-x) is the complement of floor(x)
    return function_of(lines, tables)


def lookup_halves(levels: Sequence[float], pieces: tuple[int, ...]) -> str:
    """PTX that looks up fp16 numbers, two registers for each plane, from registers of four bytes.

    The results are $0 to $3 for codes of four bits, else $0 to $7. Arguments are the same as in
    :func:`lookup_integers`, but levels may be any numbers that are exact in fp16.
    """
    num_planes = _num_planes(levels)
    lines, nibbles = nibbles_of(num_planes, pieces, num_outputs=2 * num_planes)
    tables: dict[str, str] = {}
    for i, register in enumerate(nibbles):
        lines += _halves(register, levels, (i, i + num_planes // 2), "", tables)
    return function_of(lines, tables)


def lookup_halves_of_unequal_planes(packing: Packing, levels: Sequence[Sequence[float]]) -> str:
    """:func:`lookup_halves` for four planes, of which the first two have more bits than the others.

    Args:
        packing: how codes are packed. The operands after the results are the low bits, and for each high section a
            register for each piece. The register of a piece is 0 in the columns of the other pieces.
        levels: the levels of each plane.
    """
    operands = itertools.count(2 * packing.num_planes)
    codes = f"${next(operands)}"
    lines: list[str] = []
    tables: dict[str, str] = {}
    for k, planes in enumerate(packing.high):
        pieces = [f"${next(operands)}" for _ in range(8 // planes)]
        # The bit of plane p is at p * len(pieces), for each piece. All other bits are cleared.
        places = sum(1 << place for place in range(0, 8, len(pieces)))
        lines += _gathered(f"section{k}", [(piece, -i, places) for i, piece in enumerate(pieces)])
    for first in (0, 2):
        fields: dict[tuple[str, int], int] = {}  # maps (register, its shift to the left) to a mask of a byte
        for plane, place in ((first, 0), (first + 1, 4)):
            parts = [(codes, packing.low_bits * plane, place, packing.low_bits)]  # register, first bit, its place, bits
            parts += [
                (f"section{k}", 8 // planes * plane, place + packing.low_bits + k, 1)
                for k, planes in enumerate(packing.high)
                if plane < planes
            ]
            for register, begin, end, count in parts:
                field = register, end - begin
                fields[field] = fields.get(field, 0) | ((1 << count) - 1) << end
        lines += _gathered("nibbles0", [(*field, bits) for field, bits in fields.items()])
        lines += _halves("nibbles0", levels[first], (first, first + 1), "ab"[first // 2], tables)
    return function_of(lines, tables, [f"section{k}" for k in range(len(packing.high))])


def _gathered(output: str, fields: Sequence[tuple[str, int, int]]) -> list[str]:
    """PTX that puts bits of several registers together: a register, its shift to the left, and the bits of a byte."""
    lines = []
    for number, (register, shift, bits) in enumerate(fields):
        if shift > 0:
            lines.append(f"shl.b32 shifted, {register}, {shift};")
        elif shift < 0:
            lines.append(f"shr.u32 shifted, {register}, {-shift};")
        moved, mask = "shifted" if shift else register, in_all_bytes(bits)
        if number == 0:
            lines.append(f"and.b32 {output}, {moved}, {mask};")
        else:
            lines.append(f"lop3.b32 {output}, {moved}, {output}, {mask}, 0xec;")  # (moved & mask) | output
    return lines


def in_all_bytes(byte: int) -> str:
    """A constant with four equal bytes."""
    return f"0x{byte:02x}{byte:02x}{byte:02x}{byte:02x}"


def _halves(
    nibbles: str, levels: Sequence[float], planes: tuple[int, int], name: str, tables: dict[str, str]
) -> list[str]:
    """PTX that looks up fp16 numbers by the codes of two planes, whose tables of this name are added to ``tables``."""
    numbers = [struct.unpack("<H", struct.pack("<e", level))[0] for level in levels]
    tables |= _tables(f"high{name}", [n >> 8 for n in numbers])
    has_low = any(n & 0xFF for n in numbers)
    if has_low:
        tables |= _tables(f"low{name}", [n & 0xFF for n in numbers])
    lines = _index(nibbles, levels) if has_low else ["mov.b32 low, 0;", *_index(nibbles, levels)]
    for half in range(2):
        lines.append(_lookup("high", f"high{name}", half, levels))
        if has_low:
            lines.append(_lookup("low", f"low{name}", half, levels))
        if len(levels) == 16:
            lines.append(f"lop3.b32 high, high, sign{half}, 0x80808080, 0x78;")  # high ^ (sign & 0x80...)
        for plane, selector in zip(planes, ("0x6240", "0x7351"), strict=True):
            lines.append(f"prmt.b32 ${2 * plane + half}, low, high, {selector};")
    return lines


def _num_planes(levels: Sequence[float]) -> int:
    return 2 if len(levels) == 16 else 4


def nibbles_of(num_planes: int, pieces: tuple[int, ...], num_outputs: int) -> tuple[list[str], list[str]]:
    """PTX that puts codes into the nibbles of registers, and the names of these registers.

    The nibbles of register ``i`` hold the codes of planes ``i`` and ``i + num_planes // 2``.
    """
    codes = f"${num_outputs}"
    if num_planes == 2:
        return [], [codes]
    names = ["nibbles0", "nibbles1"]
    if not pieces:
        shift = f"shr.u32 nibbles1, {codes}, 2;"
        return [f"and.b32 nibbles0, {codes}, 0x33333333;", shift, "and.b32 nibbles1, nibbles1, 0x33333333;"], names
    high = f"${num_outputs + 1}"
    # The bit of plane p is at 2 * p, for either piece. All other bits are cleared: a nibble's fourth bit stays 0.
    bits = {
        (0,): [f"and.b32 bits, {high}, 0x55555555;"],
        (1,): [f"shr.u32 bits, {high}, 1;", "and.b32 bits, bits, 0x55555555;"],
        (0, 1): [
            f"shr.u32 bits, ${num_outputs + 2}, 1;",
            f"lop3.b32 bits, {high}, bits, 0x55555555, 0xa8;",  # (high | bits) & 0x55...
        ],
    }
    return [
        *bits[pieces],
        "shl.b32 shifted, bits, 2;",
        f"lop3.b32 nibbles0, {codes}, shifted, 0x33333333, 0xe4;",  # codes & 0x33... | shifted & ~0x33...
        f"shr.u32 shifted, {codes}, 2;",
        "lop3.b32 nibbles1, shifted, bits, 0x33333333, 0xe4;",
    ], names


def _index(nibbles: str, levels: Sequence[float]) -> list[str]:
    """PTX that makes selectors from the lower and upper four nibbles, and masks of bytes from their sign bits."""
    if len(levels) < 16:
        return [f"mov.b32 index0, {nibbles};", f"shr.u32 index1, {nibbles}, 16;"]
    return [
        f"and.b32 index0, {nibbles}, 0x77777777;",
        "shr.u32 index1, index0, 16;",
        f"shl.b32 shifted, {nibbles}, 4;",
        # PRMT spreads the highest bit of a byte over the byte; in ``shifted`` it is the sign bit of the low nibble.
        f"prmt.b32 sign0, {nibbles}, shifted, 0x9d8c;",
        f"prmt.b32 sign1, {nibbles}, shifted, 0xbfae;",
    ]


def _lookup(output: str, table: str, half: int, levels: Sequence[float]) -> str:
    """PTX that looks up four nibbles in a table."""
    return f"prmt.b32 {output}, {table}0, {table}{0 if len(levels) == 4 else 1}, index{half};"


def _tables(name: str, numbers: Sequence[int]) -> dict[str, str]:
    """The lookup table of up to eight bytes, as the words of registers: four bytes per register."""
    words = [numbers[i : i + 4] for i in range(0, min(8, len(numbers)), 4)]
    return {f"{name}{i}": "0x" + bytes(n & 0xFF for n in reversed(word)).hex() for i, word in enumerate(words)}


def function_of(lines: list[str], tables: dict[str, str], registers: Sequence[str] = ()) -> str:
    """PTX text that declares registers, loads ``tables``, and then runs ``lines``.

    The declared registers are ``registers``, the registers of the tables, and the registers that functions here use.

    ``PRMT`` needs the first word of a table in a register of the thread. ptxas puts constants into uniform registers,
    and copies them before each use. These copies would be a seventh of the instructions of a decode loop with two
    tables. The first words are therefore multiplied by the highest bit of ``%lanemask_ge``, which is 1 in each lane,
    but not a constant for ptxas.
    """
    names = ["nibbles0", "nibbles1", "bits", "shifted", "index0", "index1", "sign0", "sign1", "low", "high"]
    names += [*registers, *tables]
    moves = []
    if tables:
        names.append("one")
        moves = ["mov.u32 one, %lanemask_ge;", "shr.u32 one, one, 31;"]
    for name, word in tables.items():
        moves.append(f"mul.lo.u32 {name}, one, {word};" if name.endswith("0") else f"mov.b32 {name}, {word};")
    return "\n".join(["{", f".reg .b32 {', '.join(names)};", *moves, *lines, "}"])
