"""PTX text that makes fp16 numbers from packed integer codes, four bytes of each code section at once.

A code in the lowest bits of an fp16 pattern is the subnormal number ``code * 2**-24``; ``n`` bits higher it is ``2**n``
times this number. Tensor cores multiply subnormal numbers as fast as others, so codes need no conversion. ``PRMT``
moves bytes to the halves of a register, and a mask for each plane leaves its code. The factor that turns these numbers
into codes, a power of two, is applied outside of the products.

Several planes share a byte. Numbers are *nested* if those of a plane still contain the codes of the planes above it in
the byte: ``code + 16 * next_code`` needs no mask. The products of the next plane, which have the same weights, are
subtracted after the last tile. With 3 or 4 bits a decode loop has 60 to 85 instructions less.
"""

from __future__ import annotations

from itertools import pairwise

from kvcompile.kernels.formats.lookup_ptx import function_of, in_all_bytes, nibbles_of


def halves_of_codes(bits: int, pieces: tuple[int, ...], *, nested: bool = False) -> tuple[str, tuple[float, ...]]:
    """PTX that makes fp16 numbers, two registers for each plane, from registers of four bytes.

    Args:
        bits: bits of a code: 2, 3 or 4.
        pieces: as in :func:`kvcompile.kernels.formats.lookup_ptx.lookup_integers`.
        nested: whether the numbers are nested.

    Returns:
        The text, and for each plane the factor from its numbers to codes. Nested numbers take it after the numbers of
        the plane above (:func:`planes_above`) are subtracted.
    """
    num_planes = len(planes_above(bits))
    lines: list[str] = []
    registers = [f"${2 * num_planes}"]
    if bits == 3:
        lines, registers = nibbles_of(num_planes, pieces, num_outputs=2 * num_planes)
    gains = [0.0] * num_planes
    for register, planes in zip(registers, _planes_of_bytes(bits), strict=True):
        distance = 8 // len(planes)
        lines += [f"prmt.b32 low, {register}, 0, 0x4140;", f"prmt.b32 high, {register}, 0, 0x4342;"]
        for i, plane in enumerate(planes):
            end = 8 if nested else distance * i + bits
            lines += _fields(plane, distance * i, end)
            gains[plane] = 2.0 ** (24 - distance * i)
    return function_of(lines, {}), tuple(gains)


def planes_above(bits: int) -> tuple[int | None, ...]:
    """For each plane of codes, the plane above it in a byte, whose codes its nested numbers contain, or None."""
    above = {plane: after for planes in _planes_of_bytes(bits) for plane, after in pairwise((*planes, None))}
    return tuple(above[plane] for plane in sorted(above))


def _planes_of_bytes(bits: int) -> list[range]:
    """The planes whose codes share a byte, from its lowest bits on. Codes of 3 bits are moved to nibbles first."""
    return {2: [range(4)], 3: [range(0, 4, 2), range(1, 4, 2)], 4: [range(2)]}[bits]


def _fields(plane: int, begin: int, end: int) -> list[str]:
    """PTX that takes the bits of a plane out of the bytes in ``low`` and ``high``."""
    if end - begin == 8:
        return [f"mov.b32 ${2 * plane}, low;", f"mov.b32 ${2 * plane + 1}, high;"]
    mask = hex((2**end - 2**begin) * 0x10001)
    return [f"and.b32 ${2 * plane}, low, {mask};", f"and.b32 ${2 * plane + 1}, high, {mask};"]


def integers_of_codes(bits: int) -> str:
    """PTX that makes int8 codes, a register for each plane, from a register of four bytes. Codes have 2 or 4 bits."""
    num_planes = 8 // bits
    lines = []
    for plane in range(num_planes):
        register = f"${num_planes}"
        if plane > 0:
            lines.append(f"shr.b32 high, {register}, {bits * plane};")
            register = "high"
        lines.append(f"and.b32 ${plane}, {register}, {in_all_bytes(2**bits - 1)};")
    return function_of(lines, {})
