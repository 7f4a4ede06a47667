"""Inline PTX that finds the nearest centroid by bisection, for two channels at once, in the halves of registers.

Magnitudes are rounded to fp16 and compared with thresholds half way between centroids, which fp16 holds exactly. The
first comparison gives the highest bit of the index. Each further threshold is computed from the bits that are known, as
a sum of products. Bisection takes fewer comparisons than there are thresholds, and each comparison serves two channels.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

IN_BOTH_HALVES = 0x00010001
SECOND_WHERE_THIRD = 0xD8
"""The table of ``lop3`` that takes a bit of its second operand where the third has a one, else of the first."""


def last_below(threshold: float) -> float:
    """The largest float32 that rounds to an fp16 number of at most ``threshold``, which is an fp16 number."""
    (bits,) = struct.unpack("<H", struct.pack("<e", threshold))
    (next_half,) = struct.unpack("<e", struct.pack("<H", bits + 1))
    middle = (threshold + next_half) / 2  # exact in float32; rounds to the neighbour whose last bit is 0
    if bits % 2 == 0:
        return middle
    (bits,) = struct.unpack("<I", struct.pack("<f", middle))
    return struct.unpack("<f", struct.pack("<I", bits - 1))[0]


def thresholds(centroids: Sequence[float]) -> list[float]:
    """The numbers half way between neighbouring centroids."""
    return [(low + high) / 2 for low, high in itertools.pairwise(centroids)]


def nearest_pair(centroids: Sequence[float]) -> str:
    """PTX that encodes ``$2 * $4`` and ``$3 * $4``, from float32 $2, $3 and $4.

    $0 holds the code of ``$2 * $4`` in its lowest bits and the code of ``$3 * $4`` from bit 16 on. A code is the index
    of the centroid nearest to the magnitude; the bit above it says whether the number is negative. Other bits are
    arbitrary. $1 is the sum of the squares of twice the two centroids.

    Args:
        centroids: 2, 4 or 8 numbers in ascending order: odd multiples of one half, below 128.
    """
    search = _Search(centroids)
    index_bits = len(search.bits)
    table = bytes(round(2 * centroid) for centroid in centroids).ljust(8, b"\0")
    low, high = struct.unpack("<2I", table)
    # The high byte of each half of ``index`` is 0x64, whose nibbles select bytes 4 and 6 of the table.
    beside = table[4] ** 2 + table[6] ** 2
    return f"""{{
        .reg .f32 first, second;
        .reg .b32 both, magnitude, index, signs, swapped, selectors, doubled, {", ".join(search.registers)};
        fma.rn.f32 first, $2, $4, 0f00000000;
        fma.rn.f32 second, $3, $4, 0f00000000;
        cvt.rn.f16x2.f32 both, second, first;
        and.b32 magnitude, both, 0x7fff7fff;
        {" ".join(search.statements)}
        shr.u32 signs, both, {15 - index_bits};
        lop3.b32 $0, index, signs, {IN_BOTH_HALVES << index_bits:#x}, {SECOND_WHERE_THIRD:#x};
        shr.u32 swapped, index, 12;
        lop3.b32 selectors, index, swapped, 0xf0, {SECOND_WHERE_THIRD:#x};
        prmt.b32 doubled, {low:#x}, {high:#x}, selectors;
        dp4a.u32.u32 $1, doubled, doubled, {-beside & 0xFFFFFFFF:#x};
        }}"""


class _Search:
    """The PTX statements that compute ``index`` from ``magnitude``: 1024 plus the index of the nearest centroid.

    Attributes:
        statements: the statements, in order.
        bits: registers with the bits of the index as 1.0 or 0.0, from the highest bit on.
        registers: all registers that the statements use.
    """

    def __init__(self, centroids: Sequence[float]) -> None:
        self.statements: list[str] = []
        self.registers: list[str] = []
        self.bits: list[str] = []
        levels = thresholds(centroids)
        while len(self.bits) < len(centroids).bit_length() - 1:
            step = len(centroids) >> len(self.bits)
            threshold = self._chosen(levels[step // 2 - 1 :: step])
            self.bits.append(self._add("set.gt.f16x2.f16x2", "magnitude", threshold))
        index = self._constant(1024)
        for i, bit in enumerate(reversed(self.bits)):
            index = self._add("fma.rn.f16x2", bit, self._constant(2**i), index)
        self.statements.append(f"mov.b32 index, {index};")

    def _chosen(self, choices: Sequence[float]) -> str:
        """The register that holds ``choices[number]``; the bits that are known so far make up the number."""
        known = self.bits[: len(choices).bit_length() - 1]
        if not known:
            return self._constant(choices[0])
        # The bit that was found last is the lowest bit of the number.
        zero, one = choices[::2], choices[1::2]
        steps = [high - low for low, high in zip(zero, one, strict=True)]
        return self._add("fma.rn.f16x2", known[-1], self._chosen(steps), self._chosen(zero))

    def _constant(self, number: float) -> str:
        (bits,) = struct.unpack("<H", struct.pack("<e", number))
        return self._add("mov.b32", f"{bits * IN_BOTH_HALVES:#x}")

    def _add(self, instruction: str, *operands: str) -> str:
        register = f"search{len(self.registers)}"
        self.registers.append(register)
        self.statements.append(f"{instruction} {register}, {', '.join(operands)};")
        return register
