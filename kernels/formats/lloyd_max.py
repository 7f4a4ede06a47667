"""``lloyd_max_*``: runs of channels with codes of different widths, and a scale for each run.

A vector is cut into equal runs of channels, the planes. The name gives the bits of a code in each: ``lloyd_max_531``
stores codes of 5, 3 and 1 bits for the three thirds of a vector. Codes of one column, channel ``j`` of every plane,
make one word (:class:`~kvcompile.kernels.formats.bit_planes.WordPacking`).

The centroids of ``b`` bits are values of a polynomial of ``u = index + 0.5``. Their distortion on N(0, 1) is at most
1 % above the distortion of Lloyd-Max centroids:

    level(u) = u * (a + b * u**2 + c * u**4 + d * u**6)

The highest bit of a code is the sign; the other bits are an index that counts up from the smallest centroid.

A scale is one byte: 0 for zero, 255 for NaN, and otherwise ``2**((byte - 128) / 16)``. Scales lie between 2**-8 and
2**8; larger ones saturate. The formats are therefore for vectors whose channels are close to N(0, 1), as in the bases
of ``transform_*``.

The encoder tries three scales, and takes the one with the least squared error. A plane has few channels, and the
largest of them differs between vectors. For codes of three bits and more, the three scales are near the scale that
gives the largest channel the largest centroid; for fewer bits, near the root mean square. With one scale that keeps the
norm of the channels, as in TurboQuant, the error is larger. In planes of 32 channels of N(0, 1) with codes of 1 to 6
bits, it is larger by 11 %, 5 %, 18 %, 38 %, 51 % and 64 %.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, float32
from kvcompile.kernels.formats.bit_planes import WordPacking
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.words_ptx import halves_of_words
from kvcompile.kernels.lang.tiles import round_to_integer
from kvcompile.kernels.lang.triton import jit, tl

LLOYD_MAX = "lloyd_max_"
"""The beginning of the names of the formats."""

SCALE_STEPS = 16
"""The number of steps of a scale byte that double the scale."""

SCALE_OF_ONE, LARGEST_BYTE, SCALE_OF_NAN = 128, 254, 255

LEAST_SCALE = 2.0 ** ((1 - SCALE_OF_ONE) / SCALE_STEPS)
"""The scale of byte 1; scales below its half become 0."""

COEFFICIENTS = {
    1: (1.5957691216, 0.0, 0.0, 0.0),
    2: (0.8928869439, 0.0506925015, 0.0, 0.0),
    3: (0.4885412984, 0.00656221876, 9.98714581e-05, 1.682357034e-05),
    4: (0.2547726454, 0.0013541810, -1.69666170e-05, 4.889901867e-07),
    5: (0.1291421563, 0.00027455617, -1.659700824e-06, 7.953748160e-09),
    6: (0.06478650505, 4.7505838254e-05, -8.834540150e-08, 9.439907905e-11),
}
"""``(a, b, c, d)`` of the polynomial, by bits per code."""

TRIED_STEPS = {
    1: range(-2, 3, 2),
    2: range(-3, 4, 3),
    3: range(-5, 0, 2),
    4: range(-2, 1),
    5: range(-1, 2),
    6: range(-1, 6, 3),
}
"""The steps from the first scale to each scale that the encoder tries, by bits per code."""

LARGEST_BY_RMS = 2
"""The most bits per code with which the first scale is the root mean square."""


@jit
def _magnitude(index, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    A: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][0]
    B: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][1]
    C: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][2]
    D: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][3]
    u = index.to(tl.float32) + 0.5
    square = u * u
    return u * (A + square * (B + square * (C + square * D)))


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    SIGN: tl.constexpr = OPERAND.codec.constants.sign[PLANE]
    magnitude = _magnitude(codes & (SIGN - 1), PLANE, OPERAND)
    return tl.where((codes & SIGN) != 0, 0.0 - magnitude, magnitude)


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
    SIGN: tl.constexpr = OPERAND.codec.constants.sign[PLANE]
    LEAST: tl.constexpr = OPERAND.codec.constants.tried[PLANE][0]
    STRIDE: tl.constexpr = OPERAND.codec.constants.tried[PLANE][1] - LEAST
    NUM_TRIED: tl.constexpr = len(OPERAND.codec.constants.tried[PLANE])
    magnitude = tl.abs(x)
    first = _first_byte(magnitude, PLANE, OPERAND)
    byte = first
    error = tl.full(first.shape, float("inf"), tl.float32)
    for i in range(NUM_TRIED):  # not unrolled, and the codes are computed again after it: registers are few
        tried = tl.clamp(first + (LEAST + STRIDE * i), 0.0, OPERAND.codec.constants.largest_byte)
        decoded = _magnitude(_nearest(magnitude, tried, PLANE, OPERAND), PLANE, OPERAND)
        difference = magnitude - decoded * scales_of_bytes(tried, OPERAND)[:, None]
        difference = tl.where(in_plane, difference, 0.0)
        tried_error = tl.sum(difference * difference, 1)
        byte = tl.where(tried_error < error, tried, byte)
        error = tl.minimum(error, tried_error)
    index = _nearest(magnitude, byte, PLANE, OPERAND)
    return tl.where(x < 0, index + SIGN, index), byte.to(tl.int32)


@jit
def _first_byte(magnitude, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The byte of the scale from which the encoder counts, float32 [vectors]; it may be out of range for a byte."""
    WIDTH: tl.constexpr = float(OPERAND.width)
    if OPERAND.codec.constants.by_rms[PLANE]:
        scale = tl.sqrt_rn(tl.div_rn(tl.sum(magnitude * magnitude, 1), WIDTH))
    else:
        scale = tl.max(magnitude, 1) * OPERAND.codec.constants.inverse_largest[PLANE]
    scale = tl.maximum(scale, OPERAND.codec.constants.least / 2)
    return round_to_integer(tl.log2(scale) * OPERAND.codec.constants.steps) + OPERAND.codec.constants.one


@jit
def _nearest(magnitude, byte, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """The indices of the nearest centroids if the byte of the scale is ``byte``, float32 [vectors]."""
    NUM_THRESHOLDS: tl.constexpr = len(OPERAND.codec.constants.thresholds[PLANE])
    inverse = tl.exp2((OPERAND.codec.constants.one - byte) / OPERAND.codec.constants.steps)
    direction = magnitude * inverse[:, None]
    index = tl.zeros(magnitude.shape, tl.int32)
    for i in tl.static_range(NUM_THRESHOLDS):
        index += (direction > OPERAND.codec.constants.thresholds[PLANE][i]).to(tl.int32)
    return index


@jit
def scales_of_bytes(byte, OPERAND: tl.constexpr):
    """:func:`scale_of_byte` of a tile."""
    scale = tl.exp2((byte.to(tl.float32) - OPERAND.codec.constants.one) / OPERAND.codec.constants.steps)
    scale = tl.where(byte == OPERAND.codec.constants.nan, float("nan"), scale)
    return tl.where(byte == 0, 0.0, scale)


@jit
def log2_scales_of_bytes(byte, OPERAND: tl.constexpr):
    """The base-2 logarithm of :func:`scale_of_byte` of a tile, int32; -inf for a scale of zero, and NaN for NaN.

    The inline PTX puts a byte into the exponent of a float32 number, and 1 into its mantissa. The logarithm of this
    number is -inf for 0, NaN for 255, and ``byte - 127`` for all others.
    """
    if OPERAND.ptx > 0:
        y = tl.inline_asm_elementwise(
            "{.reg .b32 x; shl.b32 x, $1, 23; or.b32 x, x, 1; lg2.approx.ftz.f32 $0, x;}", "=f,r", [byte],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        STEP: tl.constexpr = 1 / OPERAND.codec.constants.steps
        x = tl.fma(y, STEP, (127 - OPERAND.codec.constants.one) * STEP)
    else:
        x = (byte.to(tl.float32) - OPERAND.codec.constants.one) / OPERAND.codec.constants.steps
        x = tl.where(byte == OPERAND.codec.constants.nan, float("nan"), x)
        x = tl.where(byte == 0, float("-inf"), x)
    return x


class LloydMax(Format):
    """A format of Lloyd-Max codes of different widths.

    Args:
        bits: the bits of a code in each plane, 1 to 6; from one plane to four.
        num_parts: number of runs of channels in a vector; the planes are the first runs, by default all.
    """

    granularity = "plane"
    scale_dtype = torch.uint8
    least_scale = 1
    nan_scale = SCALE_OF_NAN

    def __init__(self, bits: tuple[int, ...], num_parts: int | None = None) -> None:
        self.name = f"{LLOYD_MAX}{''.join(map(str, bits))}"
        if not 1 <= len(bits) <= 4 or not set(bits) <= set(COEFFICIENTS):
            raise ValueError(
                f"{self.name} is not a format: give bits from 1 to 6 for up to four planes, as lloyd_max_531"
            )
        self.num_parts = len(bits) if num_parts is None else num_parts
        packing = WordPacking(bits, self.num_parts)
        self.packing = packing
        self.bits_of_planes = bits
        self.thresholds = {width: _thresholds(width) for width in bits}
        self.inverse_largest = {width: float32(1 / _magnitudes(width)[-1].item()) for width in bits}
        constants = SimpleNamespace(
            coefficients=tuple(COEFFICIENTS[width] for width in bits),
            sign=tuple(1 << width - 1 for width in bits),
            thresholds=tuple(tuple(self.thresholds[width]) for width in bits),
            tried=tuple(tuple(TRIED_STEPS[width]) for width in bits),
            by_rms=tuple(width <= LARGEST_BY_RMS for width in bits),
            inverse_largest=tuple(self.inverse_largest[width] for width in bits),
            least=LEAST_SCALE, steps=float(SCALE_STEPS), one=float(SCALE_OF_ONE), largest_byte=float(LARGEST_BYTE),
            nan=SCALE_OF_NAN,
        )  # fmt: skip
        levels = [self.levels(torch.arange(1 << width, dtype=torch.uint8), i).tolist() for i, width in enumerate(bits)]
        self.codec = Codec(_encode, _levels, {0: (halves_of_words(packing, levels),)}, constants=constants)

    @classmethod
    def parse(cls, name: str) -> LloydMax:
        """The format called ``name``; ValueError if no format has this name."""
        digits = name.removeprefix(LLOYD_MAX)
        return cls(tuple(map(int, digits)) if digits.isdecimal() else ())

    def unsupported(self, head_dim: int, role: str) -> str | None:
        width = 8 * self.num_parts
        if head_dim % width or not width <= head_dim <= 256:
            return f"head_dim {head_dim} is not a multiple of {width} up to 256"
        return None

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        codes, scales = [], []
        for plane, bits in zip(x.chunk(self.num_planes, -1), self.bits_of_planes, strict=True):
            magnitude = plane.abs()
            steps = TRIED_STEPS[bits]
            offsets = torch.arange(steps.start, steps.stop, steps.step, device=x.device)
            tried = (self._first_byte(magnitude, bits) + offsets).clamp(0, LARGEST_BYTE)  # [..., 3]
            index = self._nearest(magnitude.unsqueeze(-2), tried.unsqueeze(-1), bits)
            decoded = _centroid(index, bits) * scale_of_byte(tried).unsqueeze(-1)
            errors = (magnitude.unsqueeze(-2) - decoded).square().sum(-1)
            is_best = errors == errors.amin(-1, keepdim=True)
            byte = torch.where(is_best, tried, SCALE_OF_NAN).amin(-1, keepdim=True)  # the least of equally good bytes
            codes.append(self._nearest(magnitude, byte, bits) + ((plane < 0).byte() << bits - 1))
            scales.append(byte.to(torch.uint8))
        return torch.cat(codes, -1), torch.cat(scales, -1), None

    def _first_byte(self, magnitude: Tensor, bits: int) -> Tensor:
        """The byte of the scale from which the encoder counts, float32 [..., 1]; it may be out of range for a byte."""
        if bits <= LARGEST_BY_RMS:
            scale = magnitude.square().mean(-1, keepdim=True).sqrt()
        else:
            scale = magnitude.amax(-1, keepdim=True) * self.inverse_largest[bits]
        return torch.round(torch.log2(scale.clamp(min=LEAST_SCALE / 2)) * SCALE_STEPS) + SCALE_OF_ONE

    def _nearest(self, magnitude: Tensor, byte: Tensor, bits: int) -> Tensor:
        """The indices, uint8, of the nearest centroids if the bytes of the scales are ``byte``, float32."""
        direction = magnitude * torch.exp2((SCALE_OF_ONE - byte) / SCALE_STEPS)
        index = torch.zeros_like(direction)  # floats, because Inductor does not vectorize sums of bytes
        for threshold in self.thresholds[bits]:
            index = index + torch.where(direction > threshold, 1.0, 0.0)
        return index.to(torch.uint8)

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        bits = self.bits_of_planes[plane]
        sign = 1 << bits - 1
        magnitude = _centroid(codes & (sign - 1), bits)
        return torch.where(codes.float() >= sign, -magnitude, magnitude)  # Inductor is slow on comparisons of bytes

    def metadata_of(self, section: Tensor) -> Tensor:
        return scale_of_byte(section)


def scale_of_byte(byte: Tensor) -> Tensor:
    """The scales, float32 [...], of their bytes, uint8 [...]."""
    scale = torch.exp2((byte.float() - SCALE_OF_ONE) / SCALE_STEPS)
    return torch.where(byte == 0, 0.0, torch.where(byte == SCALE_OF_NAN, torch.nan, scale))


def _centroid(index: Tensor, bits: int) -> Tensor:
    """The positive centroids, float32 [...], from indices uint8 [...]."""
    a, b, c, d = COEFFICIENTS[bits]
    u = index.float() + 0.5
    square = u * u
    return u * (a + square * (b + square * (c + square * d)))


def _magnitudes(bits: int) -> Tensor:
    """The positive centroids, float32 [2**(bits - 1)], ascending."""
    return _centroid(torch.arange(1 << bits - 1), bits)


def _thresholds(bits: int) -> list[float]:
    """The numbers half way between two neighbouring positive centroids."""
    levels = _magnitudes(bits)
    return ((levels[1:] + levels[:-1]) / 2).tolist()
