"""Quantize and dequantize tokens of the DeepSeek-V4 K cache in registers.

Caches of latents use these functions, too. A tile is [tokens, scale blocks, channels]. Kernels see bfloat16 as int16
patterns, because Triton's interpreter converts bfloat16 inexactly: it truncates, and loses subnormal numbers.
:mod:`kvcompile.kernels.formats.ds_mla_rows` is the specification.
"""

from __future__ import annotations

import torch

from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang.triton import constant, jit, tl

NOPE_DIM = constant(spec.NOPE_DIM)
ROPE_DIM = constant(spec.ROPE_DIM)
QUANT_BLOCK = constant(spec.QUANT_BLOCK)
NUM_SCALES = constant(spec.NUM_SCALES)
DATA_BYTES = constant(spec.DATA_BYTES)
SCALE_BYTES = constant(spec.SCALE_BYTES)
E4M3_NAN = constant(spec.E4M3_NAN)
E8M0_NAN = constant(spec.E8M0_NAN)
E4M3_MAX_EXPONENT = constant(spec.E4M3_MAX_EXPONENT)
MANTISSA_CARRY = constant(spec.MANTISSA_CARRY)
MIN_AMAX_BITS = constant(torch.tensor(spec.MIN_AMAX, device="cpu").view(torch.int32).item())
BFLOAT16_NAN = constant(0x7FC0)


@jit
def e4m3_of_float32(x, HARDWARE_FP8: tl.constexpr):
    """e4m3 bytes from float32 ``x``, rounded to nearest even; ``|x| <= 448`` or NaN."""
    if HARDWARE_FP8:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # Multiplied by 2**-120, a float32 has the exponent bias of e4m3, and the same numbers are subnormal.
        bits = (x * 2.0**-120).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        codes = tl.where(x == x, rounded | ((bits >> 24) & 0x80), E4M3_NAN).to(tl.uint8)
    return codes


@jit
def bfloat16_bits_of_e4m3(codes, scale, HARDWARE_FP8: tl.constexpr):
    """bfloat16 patterns of e4m3 bytes times float32 powers of two, rounded to nearest even."""
    if HARDWARE_FP8:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
        bits = value.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        code = codes.to(tl.int8, bitcast=True).to(tl.int32)
        sign_exponent_mantissa = 0x87F00000 - (1 << 32)  # a mask; the masked float32 is the value times 2**-120
        value = ((code << 20) & sign_exponent_mantissa).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where((code & E4M3_NAN) == E4M3_NAN, float("nan"), value) * scale
        pattern = value.to(tl.int32, bitcast=True)
        rounded = (pattern + 0x7FFF + ((pattern >> 16) & 1)) >> 16
        bits = tl.where(value == value, rounded, BFLOAT16_NAN).to(tl.int16)
    return bits


@jit
def bfloat16_patterns(x):
    """bfloat16 patterns in the upper half of int32, which are the float32 patterns of the same numbers.

    ``x`` holds int16 patterns of bfloat16, or other floats, which are rounded to nearest even.
    """
    if x.dtype == tl.int16:
        pattern = x.to(tl.int32) << 16
    else:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        pattern = tl.where(x == x, rounded, BFLOAT16_NAN << 16)
    return pattern


@jit
def scales_of(scale_word, block):
    """float32 scales of scale blocks, from the 8 scale bytes of tokens as int64.

    The exponent field of a float32 holds 2**(s - 127), except that s = 0 is the subnormal 2**-127.
    """
    scale = ((scale_word >> (8 * block)).to(tl.int32) & 0xFF) << 23
    return tl.maximum(scale, 1 << 22).to(tl.float32, bitcast=True)


@jit
def insert_tokens(data_ptrs, scale_ptrs, x_ptrs, stride_channel, inserted, HARDWARE_FP8: tl.constexpr):
    """Quantize vectors and write the bytes of their tokens. Pointers and ``inserted`` are [tokens, 1, 1].

    Args:
        data_ptrs: pointers to the DATA_BYTES of each token.
        scale_ptrs: pointers to the SCALE_BYTES of each token.
        x_ptrs: pointers to the HEAD_DIM channels of each token, int16 patterns of bfloat16 or other floats.
        stride_channel: stride of the channels.
        inserted: bool: False for tokens that are neither read nor written.
    """
    block = tl.arange(0, SCALE_BYTES)[None, :, None]
    channel = (block * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]).to(tl.int64)
    rope_channel = tl.arange(0, ROPE_DIM)[None, None, :].to(tl.int64)
    is_nope = inserted & (block < NUM_SCALES)
    pattern = bfloat16_patterns(tl.load(x_ptrs + channel * stride_channel, mask=is_nope, other=0))
    rope = bfloat16_patterns(tl.load(x_ptrs + (NOPE_DIM + rope_channel) * stride_channel, mask=inserted, other=0))

    # Patterns of magnitudes have the same order as the magnitudes; infinity is above all numbers, and NaN above
    # infinity.
    amax = tl.max(pattern & 0x7FFFFFFF, 2, keep_dims=True)
    finite = amax < 0x7F800000
    scale = ((tl.maximum(amax, MIN_AMAX_BITS) + MANTISSA_CARRY) >> 23) - E4M3_MAX_EXPONENT
    inverse = tl.where(finite, ((254 - scale) << 23).to(tl.float32, bitcast=True), float("nan"))
    codes = e4m3_of_float32(pattern.to(tl.float32, bitcast=True) * inverse, HARDWARE_FP8)
    scale = tl.where(block < NUM_SCALES, tl.where(finite, scale, E8M0_NAN), 0)
    scale_word = tl.sum(scale.to(tl.int64) << (8 * block), 1, keep_dims=True)

    tl.store(data_ptrs + channel, codes, mask=is_nope)
    rope_ptrs = (data_ptrs + NOPE_DIM).to(tl.pointer_type(tl.int16)) + rope_channel
    tl.store(rope_ptrs, (rope >> 16).to(tl.int16), mask=inserted)
    tl.store(scale_ptrs.to(tl.pointer_type(tl.int64)), scale_word, mask=inserted)
