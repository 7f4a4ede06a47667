"""Describe caches of latents at compile time, and load their tokens to registers, in Triton.

:mod:`kvcompile.kernels.formats.fp8_ds_mla` is their format.

The scales of 64 channels cannot be taken out of the products of attention, and both products use the same latent. Its
channels are therefore dequantized once, to bfloat16, which holds them exactly, or to float32.
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
"""The widths of the slices into which the quantized channels are cut. The width of a tile must be a power of two."""

assert sum(NOPE_WIDTHS) == spec.NOPE_DIM


@dataclass(frozen=True, eq=False, repr=False)
class LatentOperand:
    """The compile-time description of a packed cache of latents.

    :func:`latent_operand` makes the instances, one for each list of its arguments. They compare by identity.

    Attributes:
        dtype: Triton dtype of the operands of products, to which latents are converted: bfloat16 or float32.
        head_dim: channels of a latent.
        block_tokens: tokens of a block.
        num_slices: number of slices into which the channels are cut. Each is a tile; the last one holds the rotary
            embedding.
        slice_starts: the first channel of each slice.
        slice_widths: the number of channels of each slice.
        hardware_fp8: whether the GPU has instructions that convert e4m3.
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
        """Triton uses it in the names of compiled functions."""
        flags = ("_fp8" if self.hardware_fp8 else "") + ("_reference" if self.by_reference else "")
        return f"latents_{self.dtype}{flags}"

    @functools.cached_property
    def cache_key(self) -> str:
        """The key of this constant in Triton's cache on disk."""
        return str(vars(self))


@functools.cache
def latent_operand(float32: bool, hardware_fp8: bool, by_reference: bool) -> LatentOperand:
    """The compile-time description of a packed cache of latents.

    Args:
        float32: whether products are computed in float32.
        hardware_fp8: whether the GPU has instructions that convert e4m3.
        by_reference: whether the data is a reference.
    """
    widths = (*NOPE_WIDTHS, spec.ROPE_DIM)
    return LatentOperand(
        dtype=tl.float32 if float32 or INTERPRETED else tl.bfloat16,  # the interpreter multiplies bit patterns
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
    """Load latents of a block: a tuple with a tile [tokens, width] of LATENT.dtype for each slice.

    Args:
        block_ptr: the first byte of the block.
        row: int32 [tokens], rows of the block.
        exists: bool [tokens]. Bytes of other tokens are not read, and their channels are 0.
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
    """Load a slice of the quantized channels, [tokens, width]."""
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
    """int16 patterns of bfloat16, converted to the dtype of the products."""
    if LATENT.dtype == tl.float32:
        x = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = bits.to(tl.bfloat16, bitcast=True)
    return x
