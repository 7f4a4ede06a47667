"""``turboquant_*bit``: Hadamard rotation, norm and direction split, Lloyd-Max codebook for the direction.

After the rotation the coordinates of any unit vector are close to N(0, 1 / head_dim), so that one fixed codebook serves
all vectors (TurboQuant, arXiv:2504.19874). The stored scale carries the norm correction: it is the norm of the vector
over the norm of its *decoded* direction. Decoding then restores the norm exactly (up to fp16).

The centroids, :data:`CENTROIDS`, are odd multiples of half a ``STEP``, in units of the root mean square of a vector. A
GPU can look up four of them at once as 8-bit integers, and multiply the integers. Their distortion on N(0, 1) is at
most 0.06 % above the distortion of Lloyd-Max centroids. The highest bit of a code is the sign; the other bits are an
index that counts up from the smallest centroid. Where there are no tables, a polynomial of ``u = index + 0.5`` gives
the level:

    level(u) = STEP * (floor(u * (a + b * u**2 + c * u**4)) + 0.5)

To encode a channel, its magnitude over STEP is rounded to fp16 and compared with the numbers half way between two
centroids. fp16 holds these numbers exactly, and a GPU compares two fp16 numbers at once.

A format with a fractional number of bits (2.5, 3.5) spends one bit more on the first half of the rotated channels,
which are the first two of four planes.

A seed puts random signs before the Hadamard matrix, as the paper does (``turboquant_4bit_seed7``; in a policy
``rotation_seed: 7``). Caches with different seeds have independent errors. Without a seed there are no signs.

The scale is close to the root mean square of the channels. It is fp16: it saturates at 65504, has full precision down
to 6e-5 and is zero below 3e-8.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, float32
from kvcompile.kernels.formats.bit_planes import PACKINGS
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.lookup_ptx import lookup_halves, lookup_halves_of_unequal_planes, lookup_integers
from kvcompile.kernels.formats.nearest_ptx import last_below, nearest_pair, thresholds
from kvcompile.kernels.lang.planes import channels_of, planes_in_pieces
from kvcompile.kernels.lang.rounding import has_ptx
from kvcompile.kernels.lang.triton import jit, tl

HALF_MAX = 65504.0

STEPS = 42.0
"""The root mean square of a vector in units of STEP. A centroid is less than 34 STEPs from its channel, or nearer to
zero. The squares of twice the centroids of 512 channels therefore add up to less than 512 * (2 * 76)**2 < 2**24: their
sum is exact in float32 in any order."""
STEP = float32(1 / STEPS)
"""The unit of centroids, which are odd multiples of half a STEP; a direction has unit variance."""

CENTROIDS = {
    1: (33.5,),
    2: (19.5, 63.5),
    3: (10.5, 31.5, 56.5, 90.5),
    4: (5.5, 16.5, 27.5, 39.5, 52.5, 67.5, 86.5, 114.5),
}
"""The positive centroids over STEP, by bits per code."""

COEFFICIENTS = {
    1: (67.0, 0.0, 0.0),
    2: (38.5833333, 1.6666667, 0.0),
    3: (20.6106771, 0.1770833, 0.0208333),
    4: (11.1431655, -0.00695999, 0.00141065831),
}
"""``(a, b, c)`` of the polynomial, by bits per code."""


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    SIGN: tl.constexpr = OPERAND.codec.constants.sign[PLANE]
    codes = codes.to(tl.int32)
    magnitude = _magnitude(codes & (SIGN - 1), PLANE, OPERAND)
    return tl.where((codes & SIGN) != 0, 0.0 - magnitude, magnitude)


@jit
def _magnitude(index, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    A: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][0]
    B: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][1]
    C: tl.constexpr = OPERAND.codec.constants.coefficients[PLANE][2]
    u = index.to(tl.float32) + 0.5
    square = u * u
    return tl.floor(u * (A + square * (B + square * C))) + 0.5


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    HEAD_DIM: tl.constexpr = float(OPERAND.head_dim)
    rms = tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 1), HEAD_DIM))
    planes = planes_in_pieces(x, OPERAND)
    # Not a correctly rounded division: the order of sums in the rotation makes larger errors in x.
    inverse = tl.div_rn(OPERAND.codec.constants.steps, tl.where(rms > 0, rms, 1.0))
    inverse = tl.broadcast_to(inverse[:, None], planes[0].shape)
    _, in_plane = channels_of(tl.arange(0, planes[0].shape[1])[None, :], OPERAND)
    squares = tl.zeros(planes[0].shape, tl.int32)
    pairs = ()
    NUM_PAIRS: tl.constexpr = OPERAND.num_planes // 2
    for i in tl.static_range(NUM_PAIRS):
        pair, squares_of_pair = _nearest_pair(planes[2 * i], planes[2 * i + 1], inverse, 2 * i, OPERAND)
        pairs = pairs + (pair,)  # noqa: RUF005
        squares += tl.where(in_plane, squares_of_pair, 0)
    sum_of_squares = tl.sum(squares, 1).to(tl.float32) / 4  # exact (STEPS)
    decoded_rms = tl.sqrt_rn(tl.div_rn(sum_of_squares, HEAD_DIM)) * OPERAND.gain
    scale = tl.minimum(tl.div_rn(rms, decoded_rms), OPERAND.codec.constants.half_max)
    return pairs, scale, scale


@jit
def _nearest_pair(first, second, inverse, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    """Encode two neighbouring planes, multiplied by ``inverse``.

    Args:
        first, second: float32 [vectors, channels], the planes PLANE and PLANE + 1.
        inverse: float32, of the same shape.

    Returns:
        The codes, as a pair, and int32: the sums of the squares of twice the two centroids.
    """
    PTX: tl.constexpr = OPERAND.codec.constants.nearest_ptx[PLANE]
    if has_ptx():
        pair, squares = tl.inline_asm_elementwise(
            PTX, "=r,=r,f,f,f", [first, second, inverse], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        low, low_squares = _nearest(first, inverse, PLANE, OPERAND)
        high, high_squares = _nearest(second, inverse, PLANE, OPERAND)
        pair, squares = low | (high << 16), low_squares + high_squares
    return pair, squares


@jit
def _nearest(x, inverse, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    SIGN: tl.constexpr = OPERAND.codec.constants.sign[PLANE]
    NUM_THRESHOLDS: tl.constexpr = len(OPERAND.codec.constants.thresholds[PLANE])
    index = tl.zeros(x.shape, tl.int32)
    for i in tl.static_range(NUM_THRESHOLDS):
        index += (tl.abs(x) * inverse > OPERAND.codec.constants.thresholds[PLANE][i]).to(tl.int32)
    doubled = (2 * _magnitude(index, PLANE, OPERAND)).to(tl.int32)
    return tl.where(x < 0, index + SIGN, index), doubled * doubled


class TurboQuant(Format):
    """A TurboQuant codebook format.

    Args:
        bits: average bits per code: 2, 2.5, 3, 3.5 or 4.
    """

    rotated = True
    scale_dtype = torch.float16
    gain = STEP

    def __init__(self, bits: Fraction) -> None:
        self.name = f"turboquant_{float(bits):g}bit"
        self.packing = PACKINGS[bits]
        self.plane_bits = [self.packing.plane_bits(i) for i in range(self.packing.num_planes)]
        self.thresholds = {bits: [last_below(x) for x in thresholds(CENTROIDS[bits])] for bits in self.plane_bits}
        constants = SimpleNamespace(
            coefficients=tuple(COEFFICIENTS[bits] for bits in self.plane_bits),
            sign=tuple(2 ** (bits - 1) for bits in self.plane_bits),
            thresholds=tuple(tuple(self.thresholds[bits]) for bits in self.plane_bits),
            half_max=HALF_MAX,
            steps=STEPS,
            nearest_ptx=tuple(nearest_pair(CENTROIDS[bits]) for bits in self.plane_bits),
        )
        if not self.packing.has_equal_planes:
            levels_of_planes = [codebook(bits) for bits in self.plane_bits]
            unpack_ptx = lookup_halves_of_unequal_planes(self.packing, levels_of_planes)
            self.codec = Codec(_encode, _levels, {0: (unpack_ptx,)}, paired=True, constants=constants)
            return
        levels, tiles = codebook(int(bits)), self.packing.pieces_of_tiles
        self.codec = Codec(
            _encode, _levels, {0: tuple(lookup_halves(levels, pieces) for pieces in tiles)},
            integers_ptx=tuple(lookup_integers(levels, pieces) for pieces in tiles),
            integer_offset=0.5, interleaved=True, paired=True, constants=constants,
        )  # fmt: skip

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        rms = x.square().mean(-1, keepdim=True).sqrt()
        direction = x / torch.where(rms > 0, rms, 1.0) * STEPS
        halves = direction.chunk(2, dim=-1) if len(self.thresholds) > 1 else (direction,)
        bits = [self.plane_bits[0], self.plane_bits[-1]]
        indices = [self._nearest(half.abs(), bits[i]) for i, half in enumerate(halves)]
        magnitudes = [_centroid(index, bits[i]) for i, index in enumerate(indices)]
        codes = [
            index + ((half < 0).byte() << bits[i] - 1)
            for i, (index, half) in enumerate(zip(indices, halves, strict=True))
        ]
        decoded_rms = torch.cat(magnitudes, dim=-1).square().mean(-1, keepdim=True).sqrt() * STEP
        return torch.cat(codes, dim=-1), (rms / decoded_rms).clamp(max=HALF_MAX).half(), None

    def _nearest(self, magnitude: Tensor, bits: int) -> Tensor:
        index = torch.zeros_like(magnitude)  # floats, because Inductor does not vectorize sums of bytes
        for threshold in self.thresholds[bits]:
            index = index + torch.where(magnitude > threshold, 1.0, 0.0)
        return index.to(torch.uint8)

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        bits = self.plane_bits[plane]
        sign = 2 ** (bits - 1)
        magnitude = _centroid(codes & (sign - 1), bits) * STEP
        return torch.where(codes.float() >= sign, -magnitude, magnitude)  # Inductor is slow on comparisons of bytes


def codebook(bits: int) -> tuple[float, ...]:
    """The centroids over STEP, in the order of the codes 0, 1, ..."""
    return (*CENTROIDS[bits], *(-level for level in CENTROIDS[bits]))


def _centroid(index: Tensor, bits: int) -> Tensor:
    """The positive centroids over STEP, float32 [...], from indices uint8 [...].

    A polynomial and not a table: on a CPU Inductor vectorizes arithmetic, but not indexing.
    """
    a, b, c = COEFFICIENTS[bits]
    u = index.float() + 0.5
    square = u * u
    return torch.floor(u * (a + square * (b + square * c))) + 0.5


TURBOQUANT_FORMATS = [TurboQuant(Fraction(bits)) for bits in ("2", "2.5", "3", "3.5", "4")]
