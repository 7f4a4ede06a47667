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
        has_high: whether a section of high bits follows the low ones. The operands are then the low bits ($8), and the
            high bits where the first piece is meant (bits 0, 2, 4, 6 of $9) and the second (bits 1, 3, 5, 7 of $10);
            the other one is 0.
        scale: factor of the codes, a power of two, and
        center: what is subtracted, so that ``v = scale * code - center`` is exact in fp16.
        level: PTX that makes the level ``{out}`` from ``v``; it may use the registers ``t`` and ``gamma``.
        gamma: a constant of ``level``.
    """
    constants = {"gamma": gamma}
    lines = []
    if has_high:
        lines += ["shr.u32 second, $10, 1;", "or.b32 both, $9, second;"]
    for pair, selector in enumerate(("0x4140", "0x4342")):
        lines.append(f"prmt.b32 low, $8, 0x64646464, {selector};")
        if has_high:
            # Four times the byte, in 16 bits: the bit of plane i comes to bit 2 * i + 2.
            lines += [f"prmt.b32 high, both, 0, {selector};", "shl.b32 high, high, 2;"]
            for half in range(2):
                # The low bits of planes half and half + 2 from one register, the high bits beside them from the other.
                keep = 0xFE00 | 3 << 2 * half | 3 << 2 * (half + 2)
                lines.append(f"lop3.b32 low{half}, low, high, {_lanes(keep)}, 0xe4;")
        for plane in range(4):
            source, bits = (f"low{plane % 2}", 7) if has_high else ("low", 3)
            lines.append(f"and.b32 x, {source}, {_lanes(0x6400 | bits << 2 * plane)};")
            lines += _value(plane, scale, center, constants)
            lines.append(level.format(out=f"${2 * plane + pair}"))
    registers = ", ".join(["low", "low0", "low1", "high", "second", "both", "x", "v", "t", *constants])
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
