"""``turboquant_*bit``: Hadamard rotation, norm and direction split, Lloyd-Max codebook for the direction.

After the rotation the coordinates of a unit vector are close to N(0, 1 / head_dim), whatever the vector, so one fixed
codebook serves all (TurboQuant, arXiv:2504.19874). The stored scale carries the norm correction: it is the norm of the
vector over the norm of its *decoded* direction, so that decoding restores the norm exactly (up to fp16).

The centroids (for unit variance) are an odd polynomial of the centred code ``u = code - (2**bits - 1) / 2``:

    level(u) = u * (a + b * u**2 + c * u**4)

so that decoding needs no table. Its distortion on N(0, 1) is that of Lloyd-Max at 1 and 2 bits, and 0.22 % and 0.17 %
above it at 3 and 4 bits (``c`` is 0 up to 3 bits, where a better polynomial would cost an instruction). Rates between
two integers give the first half of the (rotated) channels, which are the first two planes of four, one bit more.

A seed puts random signs before the Hadamard matrix (``turboquant_4bit_seed7``; in a policy ``rotation_seed: 7``), as
the paper does: caches with different seeds have independent errors. Without one there are no signs.

The scale, close to the root mean square of the channels, is fp16: it saturates at 65504, has full precision down to
6e-5 and is zero below 3e-8.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.bit_planes import PACKINGS
from kvcompile.kernels.codec import Codec, bytes_to_four_planes, bytes_to_half_pairs, jit, tl
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.ptx import half_pair, unpack_four_planes

HALF_MAX = 65504.0

COEFFICIENTS = {
    1: (1.5957691216, 0.0, 0.0),
    2: (0.89281553, 0.05071032, 0.0),
    3: (0.471464502, 0.011584004, 0.0),
    4: (0.262655001, 1.29166721e-4, 2.95824209e-5),
}
"""``(a, b, c)`` of the polynomial, by bits."""


@jit
def _unpack_4bit(packed, OPERAND: tl.constexpr):
    PTX: tl.constexpr = OPERAND.codec.constants.unpack_ptx
    return bytes_to_half_pairs(packed[0], PTX)


@jit
def _unpack_four_planes(packed, OPERAND: tl.constexpr):
    PTX: tl.constexpr = OPERAND.codec.constants.unpack_ptx
    return bytes_to_four_planes(packed, OPERAND.num_high > 0, PTX)


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    return _polynomial(codes, PLANE, OPERAND) / OPERAND.gain


@jit
def _polynomial(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    A: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][0]
    B: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][1]
    C: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][2]
    u = codes.to(tl.float32) - OPERAND.codec.constants.middle[PLANE]
    square = u * u
    return u * (A + square * (B + square * C))


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    head_dim = tl.sum(in_vector.to(tl.float32), 1)
    rms = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), head_dim))
    direction = tl.div_rn(x, tl.where(rms > 0, rms, 1.0)[:, None])
    codes, levels = _nearest(direction, 0, OPERAND)
    LAST: tl.constexpr = OPERAND.num_planes - 1
    if OPERAND.codec.constants.coefficients[0] != OPERAND.codec.constants.coefficients[LAST]:
        # Half of the channels have a bit less.
        other_codes, other_levels = _nearest(direction, LAST, OPERAND)
        first_half = tl.arange(0, x.shape[1])[None, :] < OPERAND.head_dim // 2
        codes = tl.where(first_half, codes, other_codes)
        levels = tl.where(first_half, levels, other_levels)
    levels = tl.where(in_vector, levels, 0.0)
    decoded_rms = tl.sqrt_rn(tl.div_rn(tl.sum(levels * levels, 1), head_dim))
    scale = tl.minimum(tl.div_rn(rms, decoded_rms), OPERAND.codec.constants.half_max)
    return codes, scale, scale


@jit
def _nearest(direction, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """Codes of the nearest centroids of a plane's codebook, and those centroids."""
    # The codebook is odd: the thresholds above zero tell how far a code is from the middle.
    distance = tl.zeros(direction.shape, tl.int32)
    NUM_POSITIVE: tl.constexpr = OPERAND.codec.constants.num_thresholds[PLANE] // 2
    for i in tl.static_range(NUM_POSITIVE):
        distance += (tl.abs(direction) > OPERAND.codec.constants.thresholds[PLANE][NUM_POSITIVE + 1 + i]).to(tl.int32)
    codes = tl.where(direction > 0, NUM_POSITIVE + 1 + distance, NUM_POSITIVE - distance)
    return codes, _polynomial(codes, PLANE, OPERAND)


def _cubic_ptx(bits: int) -> tuple[str, float]:
    """PTX that unpacks a format of 2 or 3 bits, and the gain of its levels.

    With ``v = u / 8`` and the cubic ``a * u + b * u**3``, ``level = gain * v * (v**2 + gamma)`` has terms near 1.
    """
    a, b, _ = COEFFICIENTS[bits]
    gain = 8**3 * b
    level = "fma.rn.f16x2 t, v, v, gamma;\nmul.rn.f16x2 {out}, t, v;"
    return unpack_four_planes(bits == 3, 1 / 8, (2**bits - 1) / 16, level, 8 * a / gain), gain


def _quintic_ptx(a: float, b: float, c: float) -> tuple[str, float]:
    """PTX that turns four packed bytes into eight levels of a 4-bit format, and the gain of those levels.

    ``0x6400 | 16 * code`` is 1024 + 16 * code in fp16, from which ``v = u / 8`` follows exactly. Completing the square,

        level = gain * v * ((v**2 + beta)**2 + gamma),

    takes one instruction less than the polynomial as it stands, and all its terms are near 1.
    """
    gain = 8**5 * c
    beta = 8**3 * b / gain / 2
    gamma = 8 * a / gain - beta**2

    level = """
        fma.rn.f16x2 v, {bits}, eighth, center;
        fma.rn.f16x2 t, v, v, beta;
        fma.rn.f16x2 t, t, t, gamma;
        mul.rn.f16x2 {out}, t, v;"""
    outputs = [level.format(bits=bits, out=f"${i}") for i, bits in enumerate(("low0", "low1", "high0", "high1"))]
    asm = f"""{{
        .reg .b32 first, second, low0, low1, high0, high1, eighth, center, beta, gamma, v, t;
        mov.b32 eighth, {half_pair(1 / 128)};
        mov.b32 center, {half_pair(-8 - 15 / 16)};
        mov.b32 beta, {half_pair(beta)};
        mov.b32 gamma, {half_pair(gamma)};
        prmt.b32 first, $4, 0x64646464, 0x4140;
        prmt.b32 second, $4, 0x64646464, 0x4342;
        and.b32 high0, first, 0xfff0fff0;
        and.b32 high1, second, 0xfff0fff0;
        shl.b32 low0, first, 4;
        shl.b32 low1, second, 4;
        lop3.b32 low0, low0, 0x00f000f0, 0x64006400, 0xea;
        lop3.b32 low1, low1, 0x00f000f0, 0x64006400, 0xea;
        {"".join(outputs)}
        }}"""
    return asm, gain


class TurboQuant(Format):
    """A TurboQuant codebook format.

    Args:
        bits: bits per code, on average: 2, 2.5, 3, 3.5 or 4.
    """

    rotated = True
    scale_dtype = torch.float16

    def __init__(self, bits: Fraction) -> None:
        self.name = f"turboquant_{float(bits):g}bit"
        self.packing = PACKINGS[bits]
        self.plane_bits = [self.packing.plane_bits(i) for i in range(self.packing.num_planes)]
        self.thresholds = {bits: self._thresholds(bits) for bits in self.plane_bits}
        unpack, unpack_ptx = None, ""
        if bits == 4:
            unpack, (unpack_ptx, self.gain) = _unpack_4bit, _quintic_ptx(*COEFFICIENTS[4])
        elif bits in (2, 3):
            unpack, (unpack_ptx, self.gain) = _unpack_four_planes, _cubic_ptx(int(bits))
        constants = SimpleNamespace(
            coefficients=tuple(COEFFICIENTS[bits] for bits in self.plane_bits),
            middle=tuple((2**bits - 1) / 2 for bits in self.plane_bits),
            thresholds=tuple(tuple(self.thresholds[bits]) for bits in self.plane_bits),
            num_thresholds=tuple(len(self.thresholds[bits]) for bits in self.plane_bits),
            half_max=HALF_MAX,
            unpack_ptx=unpack_ptx,
        )
        self.codec = Codec(_encode, _levels, unpack, constants=constants)

    @classmethod
    def _thresholds(cls, bits: int) -> list[float]:
        centroids = centroid(torch.arange(2**bits, dtype=torch.uint8), bits).tolist()
        return [(low + high) / 2 for low, high in itertools.pairwise(centroids)]

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        rms = x.square().mean(-1, keepdim=True).sqrt()
        direction = x / torch.where(rms > 0, rms, 1.0)
        halves = direction.chunk(2, dim=-1) if len(self.thresholds) > 1 else (direction,)
        bits = [self.plane_bits[0], self.plane_bits[-1]]
        codes = [self._nearest(half, bits[i]) for i, half in enumerate(halves)]
        levels = [centroid(half, bits[i]) for i, half in enumerate(codes)]
        decoded_rms = torch.cat(levels, dim=-1).square().mean(-1, keepdim=True).sqrt()
        return torch.cat(codes, dim=-1), (rms / decoded_rms).clamp(max=HALF_MAX).half(), None

    def _nearest(self, direction: Tensor, bits: int) -> Tensor:
        codes = torch.zeros_like(direction, dtype=torch.uint8)
        for threshold in self.thresholds[bits]:
            codes = codes + (direction > threshold)
        return codes

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        return centroid(codes, self.plane_bits[plane])


def centroid(codes: Tensor, bits: int) -> Tensor:
    """The centroids of codes uint8 [...] for N(0, 1) at ``bits`` bits: float32 [...]."""
    a, b, c = COEFFICIENTS[bits]
    u = codes.float() - (2**bits - 1) / 2
    square = u * u
    return u * (a + square * (b + square * c))


TURBOQUANT_FORMATS = [TurboQuant(Fraction(bits)) for bits in ("2", "2.5", "3", "3.5", "4")]
