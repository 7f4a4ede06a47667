"""PTX text that makes fp16 numbers from packed integer codes, four bytes of each code section at once.

A code in the lowest bits of an fp16 pattern is the subnormal number ``code * 2**-24``; ``n`` bits higher it is ``2**n``
times this number. Tensor cores multiply subnormal numbers as fast as others, so codes need no conversion. ``PRMT``
moves bytes to the halves of a register, and a mask for each plane leaves its code. The factor that turns these numbers
into codes, a power of two, is applied outside of the products.
"""

from __future__ import annotations

from kvcompile.kernels.formats.lookup_ptx import function_of, nibbles_of


def halves_of_codes(bits: int, pieces: tuple[int, ...]) -> tuple[str, tuple[float, ...]]:
    """PTX that makes fp16 numbers, two registers for each plane, from registers of four bytes.

    Args:
        bits: bits of a code: 2, 3 or 4.
        pieces: as in :func:`kvcompile.kernels.formats.lookup_ptx.lookup_integers`.

    Returns:
        The text, and for each plane the factor from these numbers to codes.
    """
    num_planes = 2 if bits == 4 else 4
    lines: list[str] = []
    registers, planes = [f"${2 * num_planes}"], [range(num_planes)]
    if bits == 3:
        lines, registers = nibbles_of(num_planes, pieces, num_outputs=2 * num_planes)
        planes = [range(0, num_planes, 2), range(1, num_planes, 2)]
    gains = [0.0] * num_planes
    for register, planes_of_register in zip(registers, planes, strict=True):
        distance = 8 // len(planes_of_register)
        lines += [f"prmt.b32 low, {register}, 0, 0x4140;", f"prmt.b32 high, {register}, 0, 0x4342;"]
        for i, plane in enumerate(planes_of_register):
            mask = hex((2**bits - 1 << distance * i) * 0x10001)
            lines += [f"and.b32 ${2 * plane}, low, {mask};", f"and.b32 ${2 * plane + 1}, high, {mask};"]
            gains[plane] = 2.0 ** (24 - distance * i)
    return function_of(lines, {}), tuple(gains)


def integers_of_nibbles() -> str:
    """PTX that makes int8 codes, a register for each of two planes, from a register of four bytes."""
    mask = "0x0f0f0f0f"
    return function_of([f"and.b32 $0, $2, {mask};", "shr.b32 high, $2, 4;", f"and.b32 $1, high, {mask};"], {})
