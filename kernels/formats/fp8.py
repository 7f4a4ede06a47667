"""``fp8_e4m3``: 8-bit floats (4 exponent and 3 mantissa bits, no infinities) with one scale per token and head.

``scale = max|x| / 448`` in float32, so that the largest channel lands on the largest finite e4m3 value; a code is the
byte of ``x / scale`` rounded to nearest even. The byte patterns 0x7f and 0xff (NaN in e4m3fn) are never written; as
levels they read as +-480, so that no byte has a level that is not finite.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.codec import Codec, jit, round_to_integer, tl
from kvcompile.kernels.formats.base import Format

E4M3_MAX = 448.0
SIGN_EXPONENT_MANTISSA = 0x87F00000 - (1 << 32)  # where they are in a float32, as an int32


@jit
def _unpack(packed, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    # The byte moved to the top of a fp16 pattern has the exponent bias 15 instead of 7: the level times 2**-8,
    # subnormals included, and finite for the NaN patterns 0x7f and 0xff.
    if OPERAND.fast:
        level = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, low_bits, high_bits;
            prmt.b32 low, $2, 0, 0x1404;
            prmt.b32 high, $2, 0, 0x3424;
            shr.u32 low_bits, low, 1;
            shr.u32 high_bits, high, 1;
            and.b32 low_bits, low_bits, 0x3f803f80;
            and.b32 high_bits, high_bits, 0x3f803f80;
            lop3.b32 $0, low, 0x80008000, low_bits, 0xea;
            lop3.b32 $1, high, 0x80008000, high_bits, 0xea;
            }""",
            "=r,=r,r",
            [packed],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        bits = packed.to(tl.int16)
        level = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(DTYPE)
    return level


@jit
def _encode(x, in_head, OPERAND: tl.constexpr):
    scale = tl.div_rn(tl.max(tl.abs(x), 1), OPERAND.codec.constants.largest)
    level = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
    magnitude = tl.minimum(tl.abs(level), OPERAND.codec.constants.largest)
    # Round the float32 pattern to 3 mantissa bits, ties to even, and rebase the exponent from 127 to 7. Levels below
    # 2**-6 are multiples of 2**-9; one that rounds up to 2**-6 gets the code 8, which is the pattern of 2**-6.
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    subnormal = round_to_integer(magnitude * 512.0).to(tl.int32)
    sign = (level.to(tl.int32, bitcast=True) >> 24) & 0x80
    return sign | tl.where(magnitude < 0.015625, subnormal, normal), scale, scale


class Fp8E4M3(Format):
    name = "fp8_e4m3"
    bits = 8
    codec = Codec(_unpack, _encode, gain=256.0, constants=SimpleNamespace(largest=E4M3_MAX))

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / E4M3_MAX
        level = (x / torch.where(scale > 0, scale, 1.0)).clamp(-E4M3_MAX, E4M3_MAX)
        return {"codes": level.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}

    def levels(self, codes: Tensor) -> Tensor:
        # A byte moved to the top of a float32 pattern gets the exponent bias 127 instead of 7: its value times 2**-120,
        # subnormals included. That is four vector instructions; converting from float8_e4m3fn takes a dozen.
        bits = (codes.view(torch.int8).to(torch.int32) << 20) & SIGN_EXPONENT_MANTISSA
        return bits.view(torch.float32) * 2.0**120
