"""``int8_per_token_head``: symmetric 8-bit integers with one scale per token and head.

As in vLLM's format of that name: ``scale = max|x| / 127``, codes are ``round(x / scale)``, stored here with an offset
of 128 so that a byte unpacks to a float with a single byte permute.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format


class Int8PerTokenHead(Format):
    name = "int8_per_token_head"
    bits = 8

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = torch.round(x / torch.where(scale > 0, scale, 1.0)).clamp(-127, 127) + 128
        return {"codes": codes.to(torch.uint8), "scale": scale}

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float() - 128
