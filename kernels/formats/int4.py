"""``int4_*``, ``int3_*`` and ``int2_*``: asymmetric integers of few bits, with a scale and a zero point.

``x = scale * code + zero`` with codes 0 to ``2**bits - 1``. ``zero`` is the smallest channel, and ``scale`` is the
range of the channels divided by the largest code. Both are fp16, rounded outwards, so that the stored grid covers every
channel. Codes are computed against the stored values, so rounding ``scale`` and ``zero`` adds no error of its own. With
``m = 2**bits - 1`` the error of a channel is at most

    (max - min) / (2 * m) * (1 + 2**-10) + |min| * 2**-14 + 2**-24.

Metadata is fp16 and not bf16 because keys often lie far from zero. Rounding outwards widens the grid by up to
``|min| * 2**-10``. With the 8 bits of bf16 it would be ``|min| * 2**-7``: a whole step of the grid for a vector whose
distance from zero is eight times its range. The price is a smaller range of numbers. Channels saturate at +-65280 (in
the stored basis), and vectors whose range is below about 1e-6 are coarse (the term ``2**-24``).

``int4_per_token_head`` is rotated by a Hadamard matrix first, as in vLLM's format of that name (QuaRot,
arXiv:2404.00456). ``int4_unrotated`` is the uniform quantizer of the values in TurboQuant's presets. In
``int4_per_channel`` the tokens of a block share the scale and zero point of a channel, which suits keys with outlier
channels (KIVI, arXiv:2402.02750). In ``int4_per_group_32`` (64, 128) groups of 32 (64, 128) channels of a token share
them.
"""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, Granularity, computed_once, divided
from kvcompile.kernels.formats.bit_planes import PACKINGS
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.codes_ptx import halves_of_codes, integers_of_codes, planes_above
from kvcompile.kernels.formats.half import SATURATION, half_above, half_above_tile
from kvcompile.kernels.lang.rounding import quotient, round_to_byte
from kvcompile.kernels.lang.triton import jit, tl


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    return codes.to(tl.float32)


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    x = tl.clamp(x, -OPERAND.codec.constants.saturation, OPERAND.codec.constants.saturation)
    smallest = tl.min(tl.where(in_vector, x, float("inf")), 1)
    largest = tl.max(tl.where(in_vector, x, float("-inf")), 1)
    zero = 0.0 - half_above_tile(0.0 - smallest)  # never -0, as in the specification
    scale = half_above_tile(tl.div_rn(largest - zero, OPERAND.codec.constants.max_code))
    # Both were rounded outwards, so codes need no clamp.
    level = quotient(x - zero[:, None], tl.where(scale > 0, scale, 1.0), 2.0**-24)
    return round_to_byte(level, 0), scale, zero


class AsymmetricInt(Format):
    """An asymmetric integer format with 2, 3 or 4 ``bits`` per code."""

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
        constants = SimpleNamespace(max_code=float(self.max_code), saturation=SATURATION)
        tiles = self.packing.pieces_of_tiles
        unpack_ptx, (gains, *_) = zip(*(halves_of_codes(bits, pieces) for pieces in tiles), strict=True)
        nested_ptx = tuple(halves_of_codes(bits, pieces, nested=True)[0] for pieces in tiles)
        integers_ptx = None if bits == 3 else (integers_of_codes(bits),)
        self.codec = Codec(
            _encode, _levels, {0: unpack_ptx}, gains, nested_ptx, planes_above(bits), integers_ptx, constants=constants
        )

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.clamp(-SATURATION, SATURATION)
        zero = computed_once(0.0 - half_above(0.0 - x.amin(-1, keepdim=True)))
        scale = computed_once(half_above(divided(x.amax(-1, keepdim=True) - zero, self.max_code)))
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
