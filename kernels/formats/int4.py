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

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format

MAX_CODE = 15
SATURATION = 65472.0  # the largest float whose outward rounding is a finite fp16


class Int4PerTokenHead(Format):
    name = "int4_per_token_head"
    bits = 4
    rotated = True
    channels_per_byte = 2
    scale_dtype = torch.float16
    zero_dtype = torch.float16

    def encode_levels(self, x: Tensor) -> dict[str, Tensor]:
        x = x.clamp(-SATURATION, SATURATION)
        zero = (-_half_above(-x.amin(-1, keepdim=True))).float()
        scale = _half_above((x.amax(-1, keepdim=True) - zero) / MAX_CODE).float()
        codes = torch.round((x - zero) / torch.where(scale > 0, scale, 1.0)).clamp(0, MAX_CODE)
        return {"codes": self.pack(codes.to(torch.uint8)), "scale": scale.half(), "zero": zero.half()}

    def levels(self, codes: Tensor) -> Tensor:
        return codes.float()


class Int4Unrotated(Int4PerTokenHead):
    name = "int4_unrotated"
    rotated = False


def _half_above(x: Tensor) -> Tensor:
    """``x`` as a fp16 number that is not below it and at most two units in the last place away; exact zero stays zero.

    Half a unit in the last place is at most ``|x| * 2**-11`` (normal) or ``2**-25`` (subnormal): adding both before
    rounding to nearest makes up for what the rounding may take.
    """
    return (x + x.abs() * 2**-11 + 2**-25).half()
