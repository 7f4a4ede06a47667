"""PTX text that unpacks four bytes of each code section at once, for codes in four planes of two low bits.

An fp16 pattern ``0x6400 | n`` is the number ``1024 + n``. A byte is put into the lower half of such a pattern; masking
it to the bits of one plane leaves ``1024 + code * 4**plane``, from which one multiply-add makes a small number exactly.
"""

from __future__ import annotations

import struct


def half_pair(x: float) -> str:
    """``x`` twice, as fp16 bits."""
    return "0x" + 2 * struct.pack(">e", x).hex()


def unpack_four_planes(has_high: bool, scale: float, center: float, level: str, gamma: float = 0.0) -> str:
    """PTX from registers of four bytes to fp16 levels: $0 to $7, two for each plane.

    Args:
        has_high: whether a section of high bits follows the low ones. The operands are then the low bits ($8), the high
            bits ($9), and for each byte ($10) 0xff if its first piece is meant (bits 0, 2, 4, 6), 0 if the second.
        scale: factor of the codes, a power of two, and
        center: what is subtracted, so that ``v = scale * code - center`` is exact in fp16.
        level: PTX that makes the level ``{out}`` from ``v``; it may use the registers ``t`` and ``gamma``.
        gamma: a constant of ``level``.
    """
    constants = {"gamma": gamma}
    lines = []
    for pair, (selector, twice) in enumerate((("0x4140", "0x1100"), ("0x4342", "0x3322"))):
        lines.append(f"prmt.b32 low, $8, 0x64646464, {selector};")
        if has_high:
            # Twice or four times the byte, in 16 bits: the bit of plane i comes to bit 2 * i + 2.
            lines += [
                f"prmt.b32 high, $9, 0, {selector};",
                f"prmt.b32 first, $10, 0, {twice};",
                "shl.b32 high, high, 1;",
                "and.b32 first, high, first;",
                "add.u32 high, high, first;",
            ]
        for plane in range(4):
            lines.append(f"and.b32 x, low, {_lanes(0x6400 | 3 << 2 * plane)};")
            if has_high:
                lines.append(f"lop3.b32 x, high, {_lanes(4 << 2 * plane)}, x, 0xea;")
            lines += _value(plane, scale, center, constants)
            lines.append(level.format(out=f"${2 * plane + pair}"))
    registers = ", ".join(["low", "high", "first", "x", "v", "t", *constants])
    moves = [f"mov.b32 {name}, {half_pair(value)};" for name, value in constants.items()]
    return "\n".join(["{", f".reg .b32 {registers};", *moves, *lines, "}"])


def _lanes(bits: int) -> str:
    return f"0x{bits:04x}{bits:04x}"


def _value(plane: int, scale: float, center: float, constants: dict[str, float]) -> list[str]:
    """``v = scale * code - center`` from ``x = 1024 + code * 4**plane``; adds the constants that it uses."""
    constants[f"factor{plane}"] = factor = scale / 4**plane
    offset = -1024 * factor - center
    if struct.unpack(">e", struct.pack(">e", offset))[0] == offset:
        constants[f"offset{plane}"] = offset
        return [f"fma.rn.f16x2 v, x, factor{plane}, offset{plane};"]
    constants.update(origin=-1024.0, center=-center)
    return ["add.rn.f16x2 v, x, origin;", f"fma.rn.f16x2 v, v, factor{plane}, center;"]
