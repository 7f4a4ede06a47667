"""``int8_*``: symmetric 8-bit integers.

As in vLLM's ``int8_per_token_head``: ``scale = max|x| / 127``, and codes are ``round(x / scale)``. Codes are stored
with an offset of 128: a byte then unpacks to a float with a single byte permute. ``int8_per_token_head`` has a float32
scale per token and head, ``int8_per_channel`` a float32 scale per channel of a block of tokens. ``int8_per_group_32``
(64, 128) has fp16 scales for groups of channels, rounded up so that no code saturates; channels saturate at +-65280.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, Granularity, divided
from kvcompile.kernels.formats.bit_planes import Packing
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.formats.half import SATURATION, half_above, half_above_tile
from kvcompile.kernels.lang.rounding import quotient, round_to_byte
from kvcompile.kernels.lang.triton import jit, tl

# 0x6400 | byte is 1024 + byte in fp16; 0xe480 is -1152.
UNPACK_PTX = """{
    .reg .b32 low, high, center;
    mov.b32 center, 0xe480e480;
    prmt.b32 low, $2, 0x64646464, 0x4140;
    prmt.b32 high, $2, 0x64646464, 0x4342;
    add.rn.f16x2 $0, low, center;
    add.rn.f16x2 $1, high, center;
    }"""


@jit
def _levels(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    return codes.to(tl.float32) - 128.0


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    if OPERAND.scale_dtype == tl.float16:
        x = tl.clamp(x, -OPERAND.codec.constants.saturation, OPERAND.codec.constants.saturation)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
    if OPERAND.scale_dtype == tl.float16:
        scale = half_above_tile(scale)
    SMALLEST: tl.constexpr = 2.0**-24 if OPERAND.scale_dtype == tl.float16 else 0.0
    level = quotient(x, tl.where(scale > 0, scale, 1.0), SMALLEST)
    if OPERAND.scale_dtype != tl.float16:
        level = tl.clamp(level, -127.0, 127.0)  # a subnormal scale may be much too small after rounding
    return round_to_byte(level, 128), scale, scale


class Int8(Format):
    """An int8 format; ``group_size`` channels share a scale if ``granularity`` is ``group``."""

    packing = Packing()
    codec = Codec(_encode, _levels, {0: (UNPACK_PTX,)}, constants=SimpleNamespace(saturation=SATURATION))

    def __init__(self, name: str, granularity: Granularity, group_size: int = 0) -> None:
        self.name = name
        self.granularity = granularity
        self.group_size = group_size
        self.scale_dtype = torch.float16 if granularity == "group" else torch.float32

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        if self.scale_dtype is torch.float16:
            x = x.clamp(-SATURATION, SATURATION)
        scale = divided(x.abs().amax(-1, keepdim=True), 127)
        if self.scale_dtype is torch.float16:
            scale = half_above(scale)
        codes = torch.round(x / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127) + 128
        return codes.to(torch.uint8), scale.to(self.scale_dtype), None

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        return codes.float() - 128


INT8_FORMATS = [
    Int8("int8_per_token_head", "token"),
    Int8("int8_per_channel", "channel"),
    *(Int8(f"int8_per_group_{size}", "group", size) for size in (32, 64, 128)),
]
