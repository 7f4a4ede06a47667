"""``int8_per_token_head``: symmetric 8-bit integers with one scale per token and head.

As in vLLM's format of that name: ``scale = max|x| / 127``, codes are ``round(x / scale)``, stored here with an offset
of 128 so that a byte unpacks to a float with a single byte permute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.codec import Codec, jit, round_to_integer, tl
from kvcompile.kernels.formats.base import Format


@jit
def _unpack(packed, DTYPE: tl.constexpr, OPERAND: tl.constexpr):
    if OPERAND.fast:
        # 0x6400 | byte is 1024 + byte in fp16; 0xe480 is -1152.
        level = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, center;
            mov.b32 center, 0xe480e480;
            prmt.b32 low, $2, 0x64646464, 0x4140;
            prmt.b32 high, $2, 0x64646464, 0x4342;
            add.rn.f16x2 $0, low, center;
            add.rn.f16x2 $1, high, center;
            }""",
            "=r,=r,r",
            [packed],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        level = (packed.to(tl.float32) - 128.0).to(DTYPE)
    return level


@jit
def _encode(x, in_head, OPERAND: tl.constexpr):
    scale = tl.div_rn(tl.max(tl.abs(x), 1), 127.0)
    code = round_to_integer(tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None]))
    return tl.clamp(code, -127.0, 127.0).to(tl.int32) + 128, scale, scale


class Int8PerTokenHead(Format):
    name = "int8_per_token_head"
    bits = 8
    codec = Codec(_unpack, _encode)

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(x / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127) + 128
        return {"codes": codes.to(torch.uint8), "scale": scale}

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float() - 128
