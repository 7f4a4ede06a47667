"""How codes become bytes: several planes of channels share the bits of a byte.

A vector of ``head_dim`` channels is cut into ``num_planes`` runs of channels, the planes. Byte ``j`` of the section
``codes`` holds the code of channel ``j`` of every plane, with the first plane in the lowest bits. Codes of 2.5, 3 and
3.5 bits keep their two low bits there. Each further bit lies in a high section, which packs one bit for each plane that
has it:

    bits        codes                   high sections
    8           1 plane of 8 bits
    4           2 planes of 4 bits
    2           4 planes of 2 bits
    3           4 planes of 2 bits      1 bit for 4 planes
    2.5         4 planes of 2 bits      1 bit for the first 2 planes
    3.5         4 planes of 2 bits      1 bit for 4 planes, 1 bit for the first 2 planes

The section ``codes`` is cut into pieces as wide as the high section. Byte ``i`` of the high section serves byte ``i``
of every piece, with the bits of the pieces interleaved: first plane 0 of every piece, then plane 1. One shift of a high
byte then moves the bits of all planes of a piece beside their low bits.

Planes of different widths (:class:`WordPacking`) form *words*: the word of column ``j`` holds the code of channel ``j``
of every plane, with the first plane in the lowest bits. Words are cut into sections: whole bytes first, then 4, 2 and 1
bits as the remainder needs them. A word of 9 bits takes one byte in ``codes`` and one bit in ``high``. Bytes of a
section lie one after the other, each for all columns. A section of 4, 2 or 1 bits is cut into pieces of columns: byte
``i`` holds column ``i`` of every piece, with the first piece in the lowest bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

HIGH_SECTIONS = ("high", "higher", "highest")

VECTOR_CHANNELS = 32
"""The most codes that one vector holds in generated code for CPUs."""


@dataclass(frozen=True)
class Section:
    """One kind of data that a format stores: codes, high bits, scales or zero points.

    Attributes:
        name: ``codes``, ``high``, ``higher``, ``highest``, ``scale`` or ``zero``.
        dtype: dtype of its elements in memory.
        width: elements per token and head, or per block and head if ``shared``.
        shared: whether all tokens of a block share the section.
    """

    name: str
    dtype: torch.dtype
    width: int
    shared: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes per token and head, or per block and head if ``shared``."""
        return self.width * self.dtype.itemsize

    @property
    def is_codes(self) -> bool:
        return self.name not in ("scale", "zero")


@dataclass(frozen=True)
class Packing:
    """A way to pack codes.

    Attributes:
        dtype: dtype of the section ``codes``; formats of 16 and 32 bits store one number per channel.
        low_bits: bits of a code in the section ``codes``.
        high: for each high section, the number of planes that have a bit in it.
    """

    dtype: torch.dtype = torch.uint8
    low_bits: int = 8
    high: tuple[int, ...] = ()

    @property
    def num_planes(self) -> int:
        return 8 * self.dtype.itemsize // self.low_bits

    @property
    def bits(self) -> Fraction:
        """Average bits per channel."""
        return self.low_bits + Fraction(sum(self.high), self.num_planes)

    @property
    def has_equal_planes(self) -> bool:
        """Whether all planes have equally many bits per channel."""
        return all(planes == self.num_planes for planes in self.high)

    @property
    def pieces_of_tiles(self) -> tuple[tuple[int, ...], ...]:
        """The pieces in each tile that kernels may load: in a tile of a whole plane, then in a tile of one piece.

        Without a high section that has a bit of every plane, kernels only load whole planes: ``((),)``.
        """
        return ((0, 1), (0,), (1,)) if self.high == (self.num_planes,) else ((),)

    def plane_bits(self, plane: int) -> int:
        """Bits per channel of the plane with number ``plane``."""
        return self.low_bits + sum(plane < planes for planes in self.high)

    def width(self, head_dim: int) -> int:
        """Elements per token of the section ``codes``: the channels of a plane."""
        return head_dim // self.num_planes

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        """The sections of one token and head."""
        width = self.width(head_dim)
        high = [
            Section(name, torch.uint8, width * planes // 8)
            for name, planes in zip(HIGH_SECTIONS, self.high, strict=False)
        ]
        return (Section("codes", self.dtype, width), *high)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """Pack codes, uint8 [..., head_dim], into sections [..., width], by name."""
        if self.num_planes == 1:
            return {"codes": codes}
        planes = codes.chunk(self.num_planes, dim=-1)
        mask = (1 << self.low_bits) - 1
        sections = {"codes": _combine([(plane & mask) << (self.low_bits * i) for i, plane in enumerate(planes)])}
        for k, count in enumerate(self.high):
            pieces = 8 // count
            bits = [((plane >> (self.low_bits + k)) & 1) << (pieces * i) for i, plane in enumerate(planes[:count])]
            chunks = _combine(bits).chunk(pieces, dim=-1)
            sections[HIGH_SECTIONS[k]] = _combine([chunk << i for i, chunk in enumerate(chunks)])
        return sections

    def unpacks_in_vectors(self, width: int) -> bool:
        """Whether code that Inductor generates for CPUs computes :meth:`unpack` in vectors.

        A vector holds up to VECTOR_CHANNELS channels, which must lie in one plane. Then :meth:`unpack` takes less
        time than a concatenation of the planes, and otherwise more.
        """
        return self.num_planes > 1 and not self.high and width % VECTOR_CHANNELS == 0

    def unpack(self, codes: Tensor) -> Tensor:
        """Codes, uint8 [..., head_dim], from the section ``codes`` [..., width] of a packing without high sections."""
        shifts = self.low_bits * torch.arange(self.num_planes, dtype=torch.uint8, device=codes.device)
        return ((codes.unsqueeze(-2) >> shifts.unsqueeze(-1)) & ((1 << self.low_bits) - 1)).flatten(-2)

    def planes(self, sections: dict[str, Tensor]) -> list[Tensor]:
        """Inverse of :meth:`pack`: the codes of each plane, uint8 [..., width]."""
        packed = sections["codes"]
        if self.num_planes == 1:
            return [packed]
        # As few operations as possible: Inductor buffers a value that takes many operations and is used twice.
        mask = (1 << self.low_bits) - 1
        planes = [packed] + [packed >> (self.low_bits * i) for i in range(1, self.num_planes)]
        planes = [*(plane & mask for plane in planes[:-1]), planes[-1]]
        for k, count in enumerate(self.high):
            high = sections[HIGH_SECTIONS[k]]
            pieces = 8 // count
            repeated = high.unsqueeze(-2).expand(*high.shape[:-1], pieces, high.shape[-1]).reshape(packed.shape)
            piece = torch.arange(packed.shape[-1], device=packed.device) // high.shape[-1]
            bits = repeated >> piece.to(torch.uint8)
            for i in range(count):
                planes[i] = planes[i] | (((bits >> (pieces * i)) & 1) << (self.low_bits + k))
        return planes


@dataclass(frozen=True)
class WordPacking:
    """A way to pack codes whose width differs between planes.

    Attributes:
        bits_of_planes: bits of a code in each plane.
        num_parts: number of runs of channels in a vector; the planes are the first runs.
    """

    bits_of_planes: tuple[int, ...]
    num_parts: int

    dtype = torch.uint8
    low_bits = 0
    high = ()
    has_equal_planes = False  # also for equal widths: kernels look up the codes of one plane after the other

    @property
    def num_planes(self) -> int:
        return len(self.bits_of_planes)

    @property
    def word_bits(self) -> int:
        return sum(self.bits_of_planes)

    @property
    def bits(self) -> Fraction:
        """Average bits per channel."""
        return Fraction(self.word_bits, self.num_parts)

    @property
    def fields(self) -> tuple[tuple[int, int], ...]:
        """The first bit and the bits of each plane in a word."""
        return tuple((sum(self.bits_of_planes[:i]), bits) for i, bits in enumerate(self.bits_of_planes))

    @property
    def bits_of_sections(self) -> tuple[int, ...]:
        """Bits of a word in each section."""
        whole = self.word_bits // 8 * 8
        return tuple(bits for bits in (whole, *(self.word_bits & bit for bit in (4, 2, 1))) if bits)

    def plane_bits(self, plane: int) -> int:
        """Bits per channel of the plane with number ``plane``."""
        return self.bits_of_planes[plane]

    def width(self, head_dim: int) -> int:
        """Channels of a plane, which are the columns of words."""
        return head_dim // self.num_parts

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        """The sections of one token and head."""
        names = zip(("codes", *HIGH_SECTIONS), self.bits_of_sections, strict=False)
        return tuple(Section(name, torch.uint8, self.width(head_dim) * bits // 8) for name, bits in names)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """Pack codes, uint8 [..., channels of all planes], into sections [..., width], by name."""
        planes = codes.int().chunk(self.num_planes, dim=-1)
        word = _combine([plane << shift for plane, (shift, _) in zip(planes, self.fields, strict=True)])
        sections, offset = {}, 0
        for name, bits in zip(("codes", *HIGH_SECTIONS), self.bits_of_sections, strict=False):
            if bits >= 8:
                section = torch.cat([(word >> byte) & 0xFF for byte in range(0, bits, 8)], dim=-1)
            else:
                pieces = ((word >> offset) & ((1 << bits) - 1)).chunk(8 // bits, dim=-1)
                section = _combine([piece << (bits * i) for i, piece in enumerate(pieces)])
            sections[name] = section.to(torch.uint8)
            offset += bits
        return sections

    def planes(self, sections: dict[str, Tensor]) -> list[Tensor]:
        """Inverse of :meth:`pack`: the codes of each plane, uint8 [..., width]."""
        word = self._words(sections)
        return [((word >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift, bits in self.fields]

    def _words(self, sections: dict[str, Tensor]) -> Tensor:
        """The words, int32 [..., columns]."""
        parts: list[Tensor] = []
        offset = 0
        for name, bits in zip(("codes", *HIGH_SECTIONS), self.bits_of_sections, strict=False):
            section = sections[name].int()
            if bits >= 8:
                columns = section.chunk(bits // 8, dim=-1)
                parts.extend(column << (8 * byte) for byte, column in enumerate(columns))
            else:
                pieces = 8 // bits
                repeated = section.unsqueeze(-2).expand(*section.shape[:-1], pieces, section.shape[-1])
                shift = bits * torch.arange(pieces, dtype=torch.int32, device=section.device)[:, None]
                parts.append((((repeated >> shift) & ((1 << bits) - 1)) << offset).flatten(-2))
            offset += bits
        return _combine(parts)


def _combine(fields: list[Tensor]) -> Tensor:
    return functools.reduce(torch.bitwise_or, fields)


PACKINGS = {
    Fraction(2): Packing(low_bits=2),
    Fraction(5, 2): Packing(low_bits=2, high=(2,)),
    Fraction(3): Packing(low_bits=2, high=(4,)),
    Fraction(7, 2): Packing(low_bits=2, high=(4, 2)),
    Fraction(4): Packing(low_bits=4),
    Fraction(8): Packing(),
}
"""Packings of integer codes, by bits per channel."""
