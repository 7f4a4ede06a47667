"""How codes become bytes: planes of channels in the bits of a byte, and extra bits in sections of their own.

A vector of ``head_dim`` channels is cut into ``num_planes`` runs of channels, the planes. Byte ``j`` of the section
``codes`` holds the code of channel ``j`` of every plane, the first plane in the lowest bits. Codes whose width does not
divide a byte keep their low bits there and each further bit in a section ``high``, which packs, for byte ``j``, one bit
for each plane that has it:

    bits        codes                   high sections
    8           1 plane of 8 bits
    4           2 planes of 4 bits
    2           4 planes of 2 bits
    3           4 planes of 2 bits      1 bit for 4 planes
    2.5         4 planes of 2 bits      1 bit for the first 2 planes
    3.5         4 planes of 2 bits      1 bit for 4 planes, 1 bit for the first 2 planes

Byte ``i`` of a high section serves the bytes ``i``, ``i + high_width``, ... of ``codes``, the pieces, with their bits
interleaved: plane 0 of every piece first, then plane 1. Shifting such a byte then moves the bits of all planes of a
piece to where they belong beside their low bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

HIGH_SECTIONS = ("high", "higher")


@dataclass(frozen=True)
class Section:
    """One kind of data that a format keeps.

    Attributes:
        name: ``codes``, ``high``, ``higher``, ``scale`` or ``zero``.
        dtype: element type in memory.
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
        dtype: element type of the section ``codes``; formats of 16 bits and more store one number a channel.
        low_bits: bits of a code in that section.
        high: for each high section, how many planes have a bit in it.
    """

    dtype: torch.dtype = torch.uint8
    low_bits: int = 8
    high: tuple[int, ...] = ()

    @property
    def num_planes(self) -> int:
        return 8 * self.dtype.itemsize // self.low_bits

    @property
    def bits(self) -> Fraction:
        """Bits per channel, on average."""
        return self.low_bits + Fraction(sum(self.high), self.num_planes)

    def plane_bits(self, plane: int) -> int:
        """Bits per channel of one plane."""
        return self.low_bits + sum(plane < planes for planes in self.high)

    def width(self, head_dim: int) -> int:
        """Elements of the section ``codes``: the channels of a plane."""
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
        """Codes uint8 [..., head_dim] -> the sections, each [..., width]."""
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

    def planes(self, sections: dict[str, Tensor]) -> list[Tensor]:
        """Inverse of :meth:`pack`: the codes of each plane, [..., width]."""
        packed = sections["codes"]
        if self.num_planes == 1:
            return [packed]
        # As few operations as possible: Inductor buffers what takes many of them and is used twice.
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
