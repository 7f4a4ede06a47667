"""``uniform_*``: runs of channels with codes of different widths, and a scale for each run.

A vector is cut into equal runs of channels, the planes. The name gives the bits of a code in each: ``uniform_531``
stores codes of 5, 3 and 1 bits for the three thirds of a vector. Codes of one column, channel ``j`` of every plane,
make one word (:class:`~kvcompile.kernels.formats.bit_planes.WordPacking`).

The range from ``-scale`` to ``scale`` is cut into ``2**b`` equal cells. A code of ``b`` bits is the number of a cell,
counted from the lowest, and its level is the middle of the cell in units of the scale. A number outside of the range
gets the code of the nearest cell.

A scale is one byte, five bits of an exponent and three bits of a mantissa: the highest bits of an fp16 number after its
sign. It is therefore below 2**16, and 255 is NaN. The formats are for vectors whose channels are close to N(0, 1), as
in the bases of ``transform_*``.

The encoder tries three neighbouring scales, and takes the one with the least squared error. A plane has few channels,
and the largest of them differs between vectors. For codes of three bits and more, the scales are near the largest
channel; for fewer bits, near a multiple of the root mean square.

Kernels need few instructions for a level: it is a multiple of 1/128, and the bits of ``2 * code + 1`` at the top of a
byte are this multiple plus 128. The price is a larger error. For codes of 1 to 6 bits in planes of 32 channels of
N(0, 1), it exceeds the error of Lloyd-Max centroids, also with the best of three scales, by 0 %, 2 %, 14 %, 24 %, 23 %
and 9 %. Planes of few bits have most of the error of ``transform_*``. With these formats, the divergence of a model is
therefore only about a tenth larger than with Lloyd-Max centroids.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.bit_planes import WordPacking
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.words_ptx import halves_of_words, integers_of_words
from kvcompile.kernels.lang.triton import jit, tl

UNIFORM = "uniform_"
"""The beginning of the names of the formats."""

LARGEST_BYTE, NAN_BYTE = 0xF7, 0xFF
"""The byte of the largest finite scale, and a byte of NaN."""

LEAST_SCALE = 2.0**-17
"""The scale of byte 1."""

UNITS = 128
"""Levels are multiples of ``1 / UNITS``. Kernels multiply these integers."""

FIRST_SCALES = {1: 1.6, 2: 2.0, 3: 1.0, 4: 1.08, 5: 1.08, 6: 1.08}
"""The second of the three scales that the encoder tries, by bits per code. Up to LARGEST_BY_RMS bits it is in units of
the root mean square of a plane, and for more bits in units of its largest channel."""

LARGEST_BY_RMS = 2
"""The most bits per code with which scales follow the root mean square."""


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    CELLS: tl.constexpr = OPERAND.codec.constants.cells[PLANE]
    return ((2 * (codes & (CELLS - 1)) + (1 - CELLS)) * (OPERAND.codec.constants.units // CELLS)).to(tl.float32)


@jit
def _encode(planes, in_plane, OPERAND: tl.constexpr):
    """The codes, int32 tiles, and the bytes of the scales, int32 [vectors], of a tuple of planes."""
    codes = ()
    scales = ()
    NUM_PLANES: tl.constexpr = OPERAND.num_planes
    for plane in tl.static_range(NUM_PLANES):
        code, scale = _encode_plane(planes[plane], in_plane, plane, OPERAND)
        codes = codes + (code,)  # noqa: RUF005
        scales = scales + (scale,)  # noqa: RUF005
    return codes, scales, scales


@jit
def _encode_plane(x, in_plane, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    first = _first_byte(x, PLANE, OPERAND)
    byte = first
    error = tl.full(first.shape, float("inf"), tl.float32)
    for i in range(3):  # not unrolled, and the codes are computed again after it: registers are few
        tried = tl.minimum(tl.maximum(first - 1 + i, 0), OPERAND.codec.constants.largest_byte)
        level = _levels(_nearest(x, tried, PLANE, OPERAND), PLANE, OPERAND) * OPERAND.gain
        difference = tl.where(in_plane, x - level * scales_of_bytes(tried)[:, None], 0.0)
        tried_error = tl.sum(difference * difference, 1)
        byte = tl.where(tried_error < error, tried, byte)
        error = tl.minimum(error, tried_error)
    return _nearest(x, byte, PLANE, OPERAND), byte


@jit
def _first_byte(x, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The byte of the second of the tried scales, int32 [vectors]."""
    WIDTH: tl.constexpr = float(OPERAND.width)
    if OPERAND.codec.constants.by_rms[PLANE]:
        scale = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), WIDTH))
    else:
        scale = tl.max(tl.abs(x), 1)
    half = (scale * OPERAND.codec.constants.first[PLANE]).to(tl.float16)
    return (half.to(tl.int16, bitcast=True).to(tl.int32) + 64) >> 7


@jit
def _nearest(x, byte, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The codes of the nearest levels, int32, if the byte of the scale is ``byte``, [vectors]."""
    CELLS: tl.constexpr = OPERAND.codec.constants.cells[PLANE]
    scale = tl.maximum(scales_of_bytes(byte), OPERAND.codec.constants.least)
    cell = tl.floor(x * tl.div_rn(CELLS / 2, scale)[:, None]) + CELLS // 2
    return tl.clamp(cell, 0.0, CELLS - 1.0).to(tl.int32)


@jit
def scales_of_bytes(byte):
    """:func:`scale_of_byte` of a tile of int32."""
    return (byte << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


class Uniform(Format):
    """A format of uniform codes of different widths.

    Args:
        bits: the bits of a code in each plane, 1 to 6; from one plane to four.
        num_parts: number of runs of channels in a vector; the planes are the first runs, by default all.
    """

    granularity = "plane"
    scale_dtype = torch.uint8
    least_scale = 1
    nan_scale = NAN_BYTE
    gain = 1 / UNITS

    def __init__(self, bits: tuple[int, ...], num_parts: int | None = None) -> None:
        self.name = f"{UNIFORM}{''.join(map(str, bits))}"
        if not 1 <= len(bits) <= 4 or not set(bits) <= set(FIRST_SCALES):
            raise ValueError(
                f"{self.name} is not a format: give bits from 1 to 6 for up to four planes, as uniform_531"
            )
        self.num_parts = len(bits) if num_parts is None else num_parts
        packing = WordPacking(bits, self.num_parts)
        self.packing = packing
        self.bits_of_planes = bits
        constants = SimpleNamespace(
            cells=tuple(1 << width for width in bits), units=UNITS,
            first=tuple(FIRST_SCALES[width] for width in bits), by_rms=tuple(width <= LARGEST_BY_RMS for width in bits),
            least=LEAST_SCALE, largest_byte=LARGEST_BYTE, nan=NAN_BYTE,
        )  # fmt: skip
        halves, integers = (halves_of_words(packing),), (integers_of_words(packing),)
        self.codec = Codec(_encode, _levels, {0: halves}, integers_ptx=integers, constants=constants)

    @classmethod
    def parse(cls, name: str) -> Uniform:
        """The format called ``name``; ValueError if no format has this name."""
        digits = name.removeprefix(UNIFORM)
        return cls(tuple(map(int, digits)) if digits.isdecimal() else ())

    def unsupported(self, head_dim: int, role: str) -> str | None:
        width = 8 * self.num_parts
        if head_dim % width or not width <= head_dim <= 256:
            return f"head_dim {head_dim} is not a multiple of {width} up to 256"
        return None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        codes, scales = [], []
        for plane, bits in zip(x.chunk(self.num_planes, -1), self.bits_of_planes, strict=True):
            offsets = torch.arange(-1, 2, device=x.device)
            tried = (_starting_byte(plane, bits) + offsets).clamp(0, LARGEST_BYTE)  # [..., 3]
            level = _middle(_nearest_codes(plane.unsqueeze(-2), tried.unsqueeze(-1), bits), bits)
            errors = (plane.unsqueeze(-2) - level * scale_of_byte(tried).unsqueeze(-1)).square().sum(-1)
            is_best = errors == errors.amin(-1, keepdim=True)
            byte = torch.where(is_best, tried, NAN_BYTE).amin(-1, keepdim=True)  # the least of equally good bytes
            codes.append(_nearest_codes(plane, byte, bits).to(torch.uint8))
            scales.append(byte.to(torch.uint8))
        return torch.cat(codes, -1), torch.cat(scales, -1), None

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        return _middle(codes.float(), self.bits_of_planes[plane])

    def metadata_of(self, section: Tensor) -> Tensor:
        return scale_of_byte(section)


def scale_of_byte(byte: Tensor) -> Tensor:
    """The scales, float32 [...], of their bytes, integers [...]."""
    return (byte.short() << 7).view(torch.float16).float()


def _starting_byte(x: Tensor, bits: int) -> Tensor:
    """The byte of the second of the tried scales, int32 [..., 1]."""
    by_rms = bits <= LARGEST_BY_RMS
    scale = x.square().mean(-1, keepdim=True).sqrt() if by_rms else x.abs().amax(-1, keepdim=True)
    return ((scale * FIRST_SCALES[bits]).half().view(torch.int16).int() + 64) >> 7


def _nearest_codes(x: Tensor, byte: Tensor, bits: int) -> Tensor:
    """The codes of the nearest levels, float32, if the bytes of the scales are ``byte``."""
    half = 1 << bits - 1
    cell = torch.floor(x * (half / scale_of_byte(byte).clamp(min=LEAST_SCALE)))
    return (cell + half).clamp(0, 2 * half - 1)


def _middle(code: Tensor, bits: int) -> Tensor:
    """The levels of codes, both float32: the middles of ``2**bits`` equal cells from -1 to 1."""
    half = 1 << bits - 1
    return (code + (0.5 - half)) / half
