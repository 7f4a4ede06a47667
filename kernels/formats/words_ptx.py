"""PTX text that unpacks words of unequal planes into levels, four columns at once.

The bits of a plane are collected at the top of the bytes of one register, a code in each byte, and the next bit is set:
the byte is then ``128 * (level + 1)`` (:mod:`kvcompile.kernels.formats.uniform`). With its highest bit inverted, it is
the signed integer ``128 * level``. An fp16 number with this low byte, and the high byte of 1024, is 1024 plus the byte.
Subtracting 1152 makes it ``128 * level``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.formats.bit_planes import WordPacking
from kvcompile.kernels.formats.lookup_ptx import in_all_bytes

SIGN = 0x80


def halves_of_words(packing: WordPacking) -> str:
    """PTX that makes fp16 numbers ``128 * level``, two registers for each plane, from registers of four bytes.

    Args:
        packing: how codes make words. The operands after the results are a register for each byte of a word. For each
            section of fewer bits, they are a register of its bytes, and a register with four copies of the number of
            bits by which these bytes must be shifted.
    """
    writer = _Writer()
    minus_1152 = writer.new()
    writer.add(f"mov.b32 {minus_1152}, 0xe480e480;")
    tiles = _tiles(writer, packing, 2 * packing.num_planes)
    for plane in range(packing.num_planes):
        code = _collect(writer, tiles, *packing.fields[plane], inverted=0)
        for output, selector in ((2 * plane, "0x4140"), (2 * plane + 1, "0x4342")):  # 0x64 is the high byte of 1024
            number = writer.new()
            writer.add(f"prmt.b32 {number}, {code}, 0x64646464, {selector};")
            writer.add(f"add.rn.f16x2 ${output}, {number}, {minus_1152};")
    return writer.text


def integers_of_words(packing: WordPacking) -> str:
    """PTX that makes int8 numbers ``128 * level``, a register for each plane; its inputs are those of
    :func:`halves_of_words`.
    """
    writer = _Writer()
    tiles = _tiles(writer, packing, packing.num_planes)
    for plane in range(packing.num_planes):
        code = _collect(writer, tiles, *packing.fields[plane], inverted=SIGN)
        writer.add(f"mov.b32 ${plane}, {code};")
    return writer.text


class _Writer:
    """Lines of PTX and the registers that they use."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._registers: list[str] = []

    def new(self) -> str:
        """The name of another register."""
        self._registers.append(f"r{len(self._registers)}")
        return self._registers[-1]

    def add(self, line: str) -> None:
        self._lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(["{", f".reg .b32 {', '.join(self._registers)};", *self._lines, "}"])


@dataclass(frozen=True)
class _Tile:
    """A register with some bits of the words of four columns, in the lowest bits of its bytes.

    Attributes:
        register: the name. Other bits of its bytes are arbitrary.
        first: the first of the bits in a word.
        count: the number of bits.
    """

    register: str
    first: int
    count: int


def _tiles(writer: _Writer, packing: WordPacking, operand: int) -> list[_Tile]:
    """The tiles of words. The inputs begin with the register ``$operand``."""
    tiles = []
    first = 0
    for bits in packing.bits_of_sections:
        for begin in range(0, bits, 8):
            register = f"${operand}"
            operand += 1
            if bits < 8:
                shifted = writer.new()
                # It shifts by the lowest five bits of the last register, whose four bytes are equal and below 8.
                writer.add(f"shf.r.wrap.b32 {shifted}, {register}, {register}, ${operand};")
                operand, register = operand + 1, shifted
            tiles.append(_Tile(register, first + begin, min(bits, 8)))
        first += bits
    return tiles


def _collect(writer: _Writer, tiles: list[_Tile], shift: int, bits: int, *, inverted: int) -> str:
    """The register whose bytes have the codes of a plane as their highest bits, and then a bit that is set.

    Args:
        shift, bits: the first bit of the plane in a word, and the number of bits.
        inverted: the bits of a byte that are inverted.
    """
    top = 8 - bits
    known = in_all_bytes((1 << top - 1) ^ inverted)
    for tile in tiles:
        low, high = max(tile.first, shift), min(tile.first + tile.count, shift + bits)
        if low >= high:
            continue
        moved = tile.register
        distance = top + (low - shift) - (low - tile.first)
        if distance != 0:
            moved = writer.new()
            operation = "shl" if distance > 0 else "shr"
            writer.add(f"{operation}.b32 {moved}, {tile.register}, {abs(distance)};")
        mask = in_all_bytes((1 << top + high - shift) - (1 << top + low - shift))
        code = writer.new()
        writer.add(f"lop3.b32 {code}, {moved}, {mask}, {known}, 0x6a;")  # (moved & mask) ^ known
        known = code
    return known
