"""PTX text that unpacks words of unequal planes into fp16 levels, four columns at once.

The bits of a plane are collected in the bytes of one register, a code in each byte. The lowest three bits of four codes
then make one selector of ``PRMT``, which picks four bytes from a table of eight: once for the high bytes of the levels,
and once for the low bytes. Codes of two and three bits are looked up with their signs. Wider codes are looked up in
several tables of magnitudes, between which their further bits choose; their signs are applied last. A code of one bit
is a sign, and needs no table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvcompile.kernels.formats.bit_planes import WordPacking
from kvcompile.kernels.formats.lookup_ptx import in_all_bytes


def halves_of_words(packing: WordPacking, levels: Sequence[Sequence[float]]) -> str:
    """PTX that looks up fp16 numbers, two registers for each plane, from registers of four bytes.

    Args:
        packing: how codes make words. The operands after the results are a register for each byte of a word. For each
            section of fewer bits, they are a register of its bytes, and a register with four copies of the number of
            bits by which these bytes must be shifted.
        levels: for each plane, the levels of its codes. Levels of the upper half of the codes are the negatives of the
            lower half.
    """
    writer = _Writer()
    operand = 2 * packing.num_planes
    tiles = []  # (register, first bit in the word, number of bits)
    first = 0
    for bits in packing.bits_of_sections:
        for begin in range(0, bits, 8):
            register = f"${operand}"
            operand += 1
            if bits < 8:
                shift, shifted = writer.new(), writer.new()
                writer.add(f"and.b32 {shift}, ${operand}, 7;")
                writer.add(f"shr.u32 {shifted}, {register}, {shift};")
                operand, register = operand + 1, shifted
            tiles.append((register, first + begin, min(bits, 8)))
        first += bits
    for plane, ((shift_of_plane, bits), numbers) in enumerate(zip(packing.fields, levels, strict=True)):
        if bits == 1:
            _apply_signs(writer, tiles, shift_of_plane, numbers[0], plane)
        else:
            code = _collect(writer, tiles, shift_of_plane, bits)
            _look_up(writer, code, bits, numbers, plane)
    return writer.text


class _Writer:
    """Lines of PTX and the registers that they use."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._registers: list[str] = []
        self.one = self.new()
        """Holds 1, but is not a constant for ptxas: see :func:`kvcompile.kernels.formats.lookup_ptx.function_of`."""
        self.add(f"mov.u32 {self.one}, %lanemask_ge;")
        self.add(f"shr.u32 {self.one}, {self.one}, 31;")

    def new(self) -> str:
        """The name of another register."""
        self._registers.append(f"r{len(self._registers)}")
        return self._registers[-1]

    def add(self, line: str) -> None:
        self._lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(["{", f".reg .b32 {', '.join(self._registers)};", *self._lines, "}"])


def _collect(writer: _Writer, tiles: Sequence[tuple[str, int, int]], shift: int, bits: int) -> str:
    """The register whose bytes are the codes of a plane."""
    code = ""
    for register, first, count in tiles:
        low, high = max(first, shift), min(first + count, shift + bits)
        if low >= high:
            continue
        moved = register
        if first != shift:
            moved = writer.new()
            direction = f"shr.u32 {moved}, {register}, {shift - first};"
            writer.add(direction if first < shift else f"shl.b32 {moved}, {register}, {first - shift};")
        mask = in_all_bytes((1 << high - shift) - (1 << low - shift))
        known, code = code, writer.new()
        if known:
            writer.add(f"lop3.b32 {code}, {moved}, {known}, {mask}, 0xec;")  # (moved & mask) | known
        else:
            writer.add(f"and.b32 {code}, {moved}, {mask};")
    return code


def _apply_signs(writer: _Writer, tiles: Sequence[tuple[str, int, int]], shift: int, level: float, plane: int) -> None:
    """The levels of codes of one bit, which is the sign of ``level``."""
    register, first = next((name, first) for name, first, count in tiles if first <= shift < first + count)
    signs = writer.new()
    writer.add(f"shl.b32 {signs}, {register}, {7 - (shift - first)};")
    both = 0x10001 * _half(level)
    for i, selector in enumerate(("0x1404", "0x3424")):  # two of its bytes become the high bytes of two numbers
        moved = writer.new()
        writer.add(f"prmt.b32 {moved}, {signs}, 0, {selector};")
        writer.add(f"lop3.b32 ${2 * plane + i}, {moved}, 0x80008000, 0x{both:08x}, 0x6a;")  # (moved & 0x8000...) ^ both


def _half(number: float) -> int:
    """The bits of an fp16 number."""
    return int(struct.unpack("<H", struct.pack("<e", number))[0])


def _look_up(writer: _Writer, code: str, bits: int, levels: Sequence[float], plane: int) -> None:
    """Look up the levels of the codes in the bytes of a register."""
    has_sign = bits > 3  # otherwise the tables have all levels
    numbers = levels[: len(levels) // 2] if has_sign else levels
    index = code
    if bits > 3:
        index = writer.new()
        writer.add(f"and.b32 {index}, {code}, 0x07070707;")
    upper, both, selector = writer.new(), writer.new(), writer.new()
    writer.add(f"shr.u32 {upper}, {index}, 4;")
    writer.add(f"or.b32 {both}, {index}, {upper};")  # two codes in the nibbles of bytes 0 and 2
    writer.add(f"prmt.b32 {selector}, {both}, {both}, 0x2020;")
    halves = [_half(number) for number in numbers]
    high = _of_tables(writer, code, selector, [half >> 8 for half in halves])
    low = _of_tables(writer, code, selector, [half & 0xFF for half in halves])
    if has_sign:
        signs, signed = writer.new(), writer.new()
        writer.add(f"shl.b32 {signs}, {code}, {8 - bits};")
        writer.add(f"lop3.b32 {signed}, {high}, {signs}, 0x80808080, 0x78;")  # high ^ (signs & 0x80...)
        high = signed
    writer.add(f"prmt.b32 ${2 * plane}, {low}, {high}, 0x5140;")
    writer.add(f"prmt.b32 ${2 * plane + 1}, {low}, {high}, 0x7362;")


def _of_tables(writer: _Writer, code: str, selector: str, numbers: Sequence[int]) -> str:
    """The register of the bytes that the codes select from a table of up to 32 bytes."""
    found = []
    for begin in range(0, len(numbers), 8):
        words: list[str] = []
        for part in (numbers[begin : begin + 4], numbers[begin + 4 : begin + 8]):
            word = writer.new()
            number = "0x" + bytes(reversed([*part, *[0] * (4 - len(part))])).hex()
            writer.add(f"mov.b32 {word}, {number};" if words else f"mul.lo.u32 {word}, {writer.one}, {number};")
            words.append(word)
        found.append(writer.new())
        writer.add(f"prmt.b32 {found[-1]}, {words[0]}, {words[1]}, {selector};")
    bit = 3
    while len(found) > 1:
        moved, mask = writer.new(), writer.new()
        writer.add(f"shl.b32 {moved}, {code}, {7 - bit};")
        writer.add(f"prmt.b32 {mask}, {moved}, {moved}, 0xba98;")  # the highest bit of each byte, spread over the byte
        chosen = []
        for first, second in zip(found[::2], found[1::2], strict=True):
            chosen.append(writer.new())
            writer.add(f"lop3.b32 {chosen[-1]}, {second}, {first}, {mask}, 0xe4;")  # mask ? second : first
        found, bit = chosen, bit + 1
    return found[0]
