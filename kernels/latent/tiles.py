"""Caches of latents (:mod:`kvcompile.kernels.formats.fp8_ds_mla`) in Triton: what kernels know about one at compile
time, and its tokens in registers.

The scales of 64 channels cannot be taken out of the products of attention, and a latent takes part in both: so its
channels are dequantized once, to bfloat16, which holds them exactly, or to float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from kvcompile.kernels.deepseek_v4.tiles import (
    DATA_BYTES,
    NOPE_DIM,
    QUANT_BLOCK,
    ROPE_DIM,
    SCALE_BYTES,
    bfloat16_bits_of_e4m3,
    scales_of,
)
from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang.triton import INTERPRETED, jit, tl
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS

NOPE_WIDTHS = (256, 128, 64)
"""Tiles are as wide as a power of two: this is how the quantized channels are cut into such."""

assert sum(NOPE_WIDTHS) == spec.NOPE_DIM


@dataclass(frozen=True, eq=False, repr=False)
class LatentOperand:
    """What a kernel knows at compile time about a packed cache of latents. Instances come from :func:`latent_operand`,
    one an argument list, so they compare by identity.

    Attributes:
        dtype: of the products that latents take part in: bfloat16 or float32.
        head_dim: channels of a latent.
        block_tokens: tokens of a block.
        num_slices: slices into which the channels are cut, each of them a tile; the last has the rotary embedding.
        slice_starts: where they begin.
        slice_widths: how wide they are.
        hardware_fp8: whether the GPU converts e4m3.
        by_reference: whether kernels get references, see :mod:`kvcompile.kernels.layout.references`.
    """

    dtype: Any
    head_dim: int
    block_tokens: int
    num_slices: int
    slice_starts: tuple[int, ...]
    slice_widths: tuple[int, ...]
    hardware_fp8: bool
    by_reference: bool

    def __repr__(self) -> str:
        """Triton makes it part of the names of functions."""
        flags = ("_fp8" if self.hardware_fp8 else "") + ("_reference" if self.by_reference else "")
        return f"latents_{self.dtype}{flags}"

    @functools.cached_property
    def cache_key(self) -> str:
        """Triton's key of this constant in its cache on disk."""
        return str(vars(self))


@functools.cache
def latent_operand(float32: bool, hardware_fp8: bool, by_reference: bool) -> LatentOperand:
    """The compile-time description of a packed cache of latents.

    ``float32`` asks for products in float32, ``hardware_fp8`` says whether the GPU converts e4m3, ``by_reference``
    whether the data is a reference.
    """
    widths = (*NOPE_WIDTHS, spec.ROPE_DIM)
    return LatentOperand(
        dtype=tl.float32 if float32 or INTERPRETED else tl.bfloat16,  # the interpreter multiplies bits of bfloat16
        head_dim=spec.HEAD_DIM,
        block_tokens=BLOCK_TOKENS,
        num_slices=len(widths),
        slice_starts=tuple(sum(widths[:i]) for i in range(len(widths))),
        slice_widths=widths,
        hardware_fp8=hardware_fp8,
        by_reference=by_reference,
    )


@jit
def load_latents(block_ptr, row, exists, LATENT: tl.constexpr):
    """Latents of a block as a tuple of tiles [tokens, width] of LATENT.dtype, one a slice; 0 where ``exists`` is false.

    Args:
        block_ptr: the first byte of the block.
        row: int32 [tokens], places in the block.
        exists: bool [tokens]; bytes of other tokens are not read.
    """
    data_ptrs = block_ptr + row * DATA_BYTES
    scale_ptrs = block_ptr + LATENT.block_tokens * DATA_BYTES + row * SCALE_BYTES
    scale_word = tl.load(scale_ptrs.to(tl.pointer_type(tl.int64)), mask=exists, other=0)
    slices = ()
    NOPE_SLICES: tl.constexpr = LATENT.num_slices - 1
    for i in tl.static_range(NOPE_SLICES):
        slices = slices + (_load_nope(data_ptrs, scale_word, exists, i, LATENT),)  # noqa: RUF005
    rope_ptrs = (data_ptrs + NOPE_DIM).to(tl.pointer_type(tl.int16))[:, None] + tl.arange(0, ROPE_DIM)[None, :]
    rope = tl.load(rope_ptrs, mask=exists[:, None], other=0)
    return slices + (_products_of_bits(rope, LATENT),)  # noqa: RUF005


@jit
def _load_nope(data_ptrs, scale_word, exists, SLICE: tl.constexpr, LATENT: tl.constexpr):
    """A slice of the quantized channels, [tokens, width]."""
    WIDTH: tl.constexpr = LATENT.slice_widths[SLICE]
    START: tl.constexpr = LATENT.slice_starts[SLICE]
    block = START // QUANT_BLOCK + tl.arange(0, WIDTH // QUANT_BLOCK)[None, :, None]
    channel = block * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]
    codes = tl.load(data_ptrs[:, None, None] + channel, mask=exists[:, None, None], other=0)
    bits = bfloat16_bits_of_e4m3(codes, scales_of(scale_word[:, None, None], block), LATENT.hardware_fp8)
    return _products_of_bits(tl.reshape(bits, [codes.shape[0], WIDTH]), LATENT)


@jit
def channels_of(SLICE: tl.constexpr, LATENT: tl.constexpr):
    """The channels of a slice, int32 [width]."""
    WIDTH: tl.constexpr = LATENT.slice_widths[SLICE]
    return LATENT.slice_starts[SLICE] + tl.arange(0, WIDTH)


@jit
def _products_of_bits(bits, LATENT: tl.constexpr):
    """int16 patterns of bfloat16 as the dtype of the products."""
    if LATENT.dtype == tl.float32:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = bits.to(tl.bfloat16, bitcast=True)
    return x
