"""``fp8_ds_mla``: the 584-byte K cache of DeepSeek-V4, for latents of 512 channels that serve as keys and values.

The first 448 channels of a latent are e4m3 floats with a power-of-two scale (UE8M0) per 64 channels. The last 64
channels, which carry the rotary embedding, are bfloat16. :mod:`kvcompile.kernels.formats.ds_mla_rows` is the
specification. A block of 64 tokens is a page of that layout: first the 576 bytes of each token, then 7 scale bytes and
a padding byte of each token. The packed data of a sequence are therefore pages with a block_size of 64, which
``kvcompile::dequantize_and_gather_k_cache`` and the vLLM kernels of that name can read.

A cache of latents is [batch, 1, tokens, 512] or [batch, tokens, 1, 512]. Attention reads it as keys, and all channels
or the first channels of it as values. On a GPU such a cache cannot have a residual, which would keep first or recent
tokens exactly.

Latents are rounded to bfloat16 first. If one of 64 channels with a common scale is not finite, only these 64 channels
decode to NaN. The last 64 channels keep their values. The format has no levels: its scales differ within a vector, so
attention dequantizes it first.
"""

from __future__ import annotations

import sympy
import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.formats.bit_planes import Packing, Section
from kvcompile.kernels.formats.ds_mla_rows import (
    DATA_BYTES,
    HEAD_DIM,
    NOPE_DIM,
    NUM_SCALES,
    SCALE_BYTES,
    TOKEN_BYTES,
    bfloat16_of_bytes,
    bytes_of_bfloat16,
    dequantize,
    quantize,
)


class Fp8DsMla(Format):
    """The format. Its sections are ``codes`` (e4m3, then bfloat16) and ``scale`` (UE8M0, then padding)."""

    name = "fp8_ds_mla"
    packing = Packing()
    scale_dtype = torch.uint8
    fixed_head_dim = HEAD_DIM
    has_levels = False

    def sections(self, head_dim: int) -> tuple[Section, ...]:
        return (Section("codes", torch.uint8, DATA_BYTES), Section("scale", torch.uint8, SCALE_BYTES))

    def bytes_per_token(self) -> sympy.Expr:
        return sympy.Integer(TOKEN_BYTES)

    def unsupported(self, head_dim: int, role: str) -> str | None:
        if role == "value":
            return "it is for latents, one tensor that serves as keys and values; give separate values another format"
        return super().unsupported(head_dim, role)

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        x = _rounded_to_bfloat16(x.float()).to(torch.bfloat16)
        codes, scales = quantize(x[..., :NOPE_DIM])
        rope = bytes_of_bfloat16(x[..., NOPE_DIM:].contiguous())
        padding = scales.new_zeros((*scales.shape[:-1], SCALE_BYTES - NUM_SCALES))
        return {"codes": torch.cat([codes, rope], -1), "scale": torch.cat([scales, padding], -1)}

    def decode_levels(self, sections: dict[str, Tensor]) -> Tensor:
        data, scales = sections["codes"], sections["scale"]
        nope = dequantize(data[..., :NOPE_DIM].contiguous(), scales[..., :NUM_SCALES].contiguous())
        return torch.cat([nope, bfloat16_of_bytes(data[..., NOPE_DIM:].contiguous())], -1).float()

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        raise TypeError(f"{self.name} has no levels; call encode() instead")

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        raise TypeError(f"{self.name} has no levels; call decode() instead")


def _rounded_to_bfloat16(x: Tensor) -> Tensor:
    """float32 ``x`` rounded to bfloat16, ties to even, without casts: Inductor drops their rounding in fused code."""
    bits = x.view(torch.int32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -(1 << 16)).view(torch.float32)
    return torch.where(x.isnan(), x, rounded)


FP8_DS_MLA = Fp8DsMla()
