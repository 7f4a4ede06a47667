"""``int4_*``, ``int3_*`` and ``int2_*``: asymmetric integers of few bits, with a scale and a zero point.

``x = scale * code + zero`` with codes 0 to ``2**bits - 1``: ``zero`` is the smallest channel, ``scale`` the range over
the largest code, both fp16, both rounded outwards so that the stored grid covers every channel. Codes are computed
against the stored values, so rounding ``scale`` and ``zero`` adds no error of its own. With ``m = 2**bits - 1`` the
error of a channel is at most

    (max - min) / (2 * m) * (1 + 2**-10) + |min| * 2**-14 + 2**-24.

fp16 and not bf16: keys often sit far from zero, and the outward rounding widens the grid by up to ``|min| * 2**-10``;
with the 8 bits of bf16 that would be ``|min| * 2**-7``, a whole step of the grid for a vector eight times its range
away from zero. The price is range: channels saturate at +-65472 (in the stored basis), and vectors whose range is below
about 1e-6 are coarse (the term ``2**-24``).

``int4_per_token_head`` is rotated by a Hadamard matrix first, as in vLLM's format of that name (QuaRot,
arXiv:2404.00456); ``int4_unrotated`` is the uniform quantizer of the values in TurboQuant's presets. In
``int4_per_channel`` the tokens of a block share scale and zero point of a channel, which suits keys with outlier
channels (KIVI, arXiv:2402.02750); in ``int4_per_group_32`` (64, 128) that many channels of a token do.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.bit_planes import PACKINGS
from kvcompile.kernels.codec import Codec, jit, tl
from kvcompile.kernels.formats.base import Format, Granularity
from kvcompile.kernels.formats.half import SATURATION, half_above, half_above_tile
from kvcompile.kernels.formats.lookup_ptx import lookup_halves
from kvcompile.kernels.formats.ptx import half_pair
from kvcompile.kernels.tile_rounding import quotient, round_to_byte

# The nibbles themselves.
NIBBLES_PTX = """{
    .reg .b32 high;
    and.b32 $0, $2, 0x0f0f0f0f;
    shr.b32 high, $2, 4;
    and.b32 $1, high, 0x0f0f0f0f;
    }"""


def _nibbles_less(center: float) -> str:
    """PTX that makes fp16 of nibbles, less the center, so that the sums of attention cancel early and stay small.

    ``0x6400 | byte`` is 1024 + byte in fp16: 1024 + low nibble, or 1024 + 16 * high nibble.
    """
    return f"""{{
        .reg .b32 first, second, low0, low1, high0, high1, center, sixteenth, high_center;
        mov.b32 center, {half_pair(-1024.0 - center)};
        mov.b32 sixteenth, {half_pair(1 / 16)};
        mov.b32 high_center, {half_pair(-64.0 - center)};
        prmt.b32 first, $4, 0x64646464, 0x4140;
        prmt.b32 second, $4, 0x64646464, 0x4342;
        and.b32 low0, first, 0xff0fff0f;
        and.b32 low1, second, 0xff0fff0f;
        and.b32 high0, first, 0xfff0fff0;
        and.b32 high1, second, 0xfff0fff0;
        add.rn.f16x2 $0, low0, center;
        add.rn.f16x2 $1, low1, center;
        fma.rn.f16x2 $2, high0, sixteenth, high_center;
        fma.rn.f16x2 $3, high1, sixteenth, high_center;
        }}"""


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    return codes.to(tl.float32) - OPERAND.center


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    x = tl.clamp(x, -OPERAND.codec.constants.saturation, OPERAND.codec.constants.saturation)
    smallest = tl.min(tl.where(in_vector, x, float("inf")), 1)
    largest = tl.max(tl.where(in_vector, x, float("-inf")), 1)
    zero = 0.0 - half_above_tile(0.0 - smallest)  # never -0, as in the specification
    scale = half_above_tile(tl.div_rn(largest - zero, OPERAND.codec.constants.max_code))
    # Both were rounded outwards: codes are between 0 and the largest without a clamp.
    level = quotient(x - zero[:, None], tl.where(scale > 0, scale, 1.0), 2.0**-24)
    return round_to_byte(level, 0), scale, zero


class AsymmetricInt(Format):
    """An asymmetric integer format of ``bits`` 2, 3 or 4."""

    scale_dtype = torch.float16
    zero_dtype = torch.float16

    def __init__(
        self, name: str, bits: int, granularity: Granularity = "token", group_size: int = 0, *, rotated: bool = False
    ) -> None:
        self.name = name
        self.packing = PACKINGS[Fraction(bits)]
        self.granularity = granularity
        self.group_size = group_size
        self.rotated = rotated
        self.max_code = 2**bits - 1
        # Kernels add the center to zero points in float32; those of channels they multiply in fp16, as they are stored.
        center = 0.0 if granularity == "channel" else float(2 ** (bits - 1))
        constants = SimpleNamespace(max_code=float(self.max_code), saturation=SATURATION)
        if bits == 4:
            unpack_ptx = _nibbles_less(center)
        else:
            unpack_ptx = lookup_halves([code - center for code in range(2**bits)], has_high=bits == 3)
        integers_ptx = NIBBLES_PTX if bits == 4 else None
        self.codec = Codec(_encode, _levels, {0: unpack_ptx}, integers_ptx, center=center, constants=constants)

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.clamp(-SATURATION, SATURATION)
        zero = 0.0 - half_above(0.0 - x.amin(-1, keepdim=True))
        scale = half_above((x.amax(-1, keepdim=True) - zero) / self.max_code)
        codes = torch.round((x - zero) / torch.where(scale > 0, scale, 1.0)).clamp(0, self.max_code)
        return codes.to(torch.uint8), scale.half(), zero.half()

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        return codes.float()


ASYMMETRIC_INT_FORMATS = [
    AsymmetricInt("int4_per_token_head", 4, rotated=True),
    AsymmetricInt("int2_per_token_head", 2, rotated=True),
    *(AsymmetricInt(f"int{bits}_unrotated", bits) for bits in (4, 3, 2)),
    *(AsymmetricInt(f"int{bits}_per_channel", bits, "channel") for bits in (4, 2)),
    *(AsymmetricInt(f"int{bits}_per_group_{size}", bits, "group", size) for bits in (4, 2) for size in (32, 64, 128)),
]
