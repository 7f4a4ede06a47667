"""``int4_per_token_head`` and ``int4_unrotated``: asymmetric 4-bit integers, scale and zero per token and head.

``x = scale * code + zero`` with codes 0 to 15: ``zero`` is the smallest channel, ``scale`` a fifteenth of the range,
both fp16, both rounded outwards so that the stored grid covers every channel. Codes are computed against the stored
values, so rounding ``scale`` and ``zero`` adds no error of its own. The error of a channel is at most

    (max - min) / 30 * (1 + 2**-10) + |min| * 2**-14 + 2**-24.

fp16 and not bf16: keys often sit far from zero, and the outward rounding widens the grid by up to ``|min| * 2**-10``;
with the 8 bits of bf16 that would be ``|min| * 2**-7``, a whole step of the grid for a vector eight times its range
away from zero. The price is range: channels saturate at +-65472 (in the stored basis), and vectors whose range is below
about 1e-6 are coarse (the term ``2**-24``).

``int4_per_token_head`` is rotated by a Hadamard matrix first, as in vLLM's format of that name (QuaRot,
arXiv:2404.00456). ``int4_unrotated`` is the uniform quantizer of the values in TurboQuant's presets.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.codec import Codec, jit, round_to_integer, tl
from kvcompile.kernels.formats.base import Format

MAX_CODE = 15
SATURATION = 65472.0  # the largest float whose outward rounding is a finite fp16


@jit
def _unpack(packed, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    """Levels less 8, so that the sums of attention cancel early and stay small."""
    if OPERAND.fast:
        # 0x6400 | byte is 1024 + byte in fp16: 1024 + low nibble, or 1024 + 16 * high nibble. 0xe408 is -1032, 0x2c00
        # is 1/16 and 0xd480 is -72.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 first, second, low0, low1, high0, high1, center, sixteenth, high_center;
            mov.b32 center, 0xe408e408;
            mov.b32 sixteenth, 0x2c002c00;
            mov.b32 high_center, 0xd480d480;
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
            }""",
            "=r,=r,=r,=r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        low = ((packed & 0xF).to(tl.float32) - 8.0).to(DTYPE)
        high = ((packed >> 4).to(tl.float32) - 8.0).to(DTYPE)
    return low, high


@jit
def _encode(x, in_head, OPERAND: tl.constexpr):
    x = tl.clamp(x, -OPERAND.codec.constants.saturation, OPERAND.codec.constants.saturation)
    smallest = tl.min(tl.where(in_head, x, float("inf")), 1)
    largest = tl.max(tl.where(in_head, x, float("-inf")), 1)
    zero = 0.0 - _half_above_tile(0.0 - smallest)  # never -0, as in the specification
    scale = _half_above_tile(tl.div_rn(largest - zero, OPERAND.codec.constants.max_code))
    code = round_to_integer(tl.div_rn(x - zero[:, None], tl.where(scale > 0, scale, 1.0)[:, None]))
    return tl.clamp(code, 0.0, OPERAND.codec.constants.max_code).to(tl.int32), scale, zero


@jit
def _half_above_tile(x):
    """``x`` rounded up to a fp16 number, as float32."""
    return (x + (tl.abs(x) * 0.00048828125 + 2.9802322387695312e-08)).to(tl.float16).to(tl.float32)


class Int4PerTokenHead(Format):
    name = "int4_per_token_head"
    bits = 4
    rotated = True
    channels_per_byte = 2
    scale_dtype = torch.float16
    zero_dtype = torch.float16
    codec = Codec(
        _unpack, _encode, center=8.0, constants=SimpleNamespace(max_code=float(MAX_CODE), saturation=SATURATION)
    )

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        x = x.clamp(-SATURATION, SATURATION)
        smallest = x.amin(-1, keepdim=True)
        zero = _nearest_half(smallest - _half_unit(smallest))
        step = (x.amax(-1, keepdim=True) - zero) / MAX_CODE
        scale = _nearest_half(step + _half_unit(step))
        codes = torch.round((x - zero) / torch.where(scale > 0, scale, 1.0)).clamp(0, MAX_CODE)
        return {"codes": self.pack(codes.to(torch.uint8)), "scale": scale.half(), "zero": zero.half()}

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float()


class Int4Unrotated(Int4PerTokenHead):
    name = "int4_unrotated"
    rotated = False


def _half_unit(x: Tensor) -> Tensor:
    """At least half of fp16's unit in the last place at ``x``, which is how far rounding to nearest may move ``x``."""
    return x.abs() * 2**-11 + 2**-25


def _nearest_half(x: Tensor) -> Tensor:
    """``x`` rounded to the nearest fp16 number, ties to even, as float32.

    The same as ``x.half().float()``, in arithmetic: compilers may drop a cast there and back, and Inductor does. Adding
    1.5 * 2**23 units in the last place of the result pushes all smaller bits out of a float32.
    """
    power_of_two = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = (power_of_two * 2.0**13).clamp(min=0.5) * 1.5
    return (x + shift) - shift
