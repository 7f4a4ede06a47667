"""``fp8_e4m3``: 8-bit floats (4 exponent and 3 mantissa bits, no infinities) with one scale per token and head.

``scale = max|x| / 448`` in float32, so that the largest channel lands on the largest finite e4m3 value; a code is the
byte of ``x / scale`` rounded to nearest even. The byte patterns 0x7f and 0xff (NaN) are never written.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format

E4M3_MAX = 448.0


class Fp8E4M3(Format):
    name = "fp8_e4m3"
    bits = 8

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / E4M3_MAX
        level = (x / torch.where(scale > 0, scale, 1.0)).clamp(-E4M3_MAX, E4M3_MAX)
        return {"codes": level.to(torch.float8_e4m3fn).view(torch.uint8), "scale": scale}

    def levels(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()
