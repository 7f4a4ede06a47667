"""``fp8_e4m3`` and ``fp8_e5m2``: 8-bit floats, with one scale per token and head, or one for a whole cache.

A code is the byte of ``x / scale``, rounded to nearest even. The scale is ``max|x| / largest`` in float32, so that the
largest channel becomes the largest finite value of the format, 448 or 57344.

The formats ``*_unit`` have a scale of 1. ``fp8_e4m3_scale0.0123`` has the static scale in its name, for the keys or the
values of one layer; it comes from a calibration, or from ``k_scale`` and ``v_scale`` of a checkpoint. A static scale
takes no bytes. It costs no time either, because attention applies it to queries or outputs. Channels beyond
``scale * largest`` saturate; ``x`` is multiplied by the inverse scale, rounded to float32.

Byte patterns of infinity and NaN are never written. Every byte nevertheless has a finite level. The NaN patterns of
e4m3 read as +-480. (GPUs that convert e4m3 themselves read both patterns as 480.) The infinity patterns of e5m2 read as
+-57344, and its NaN patterns as 57344.

Source: FP8 Formats for Deep Learning, arXiv:2209.05433.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import Format, divided, float32
from kvcompile.kernels.formats.bit_planes import Packing
from kvcompile.kernels.formats.codec import Codec
from kvcompile.kernels.lang.rounding import converts_fp8, quotient
from kvcompile.kernels.lang.tiles import round_to_integer
from kvcompile.kernels.lang.triton import jit, tl

SIGN_EXPONENT_MANTISSA = 0x87F00000 - (1 << 32)  # the mask of an e4m3 byte shifted into a float32, as an int32


# Moved to the top of an fp16 pattern, a byte has the exponent bias 15 instead of 7. This is the level times 2**-8, for
# subnormal numbers too.
SHIFT_E4M3_PTX = """{
    .reg .b32 low, high, low_bits, high_bits, gain;
    mov.b32 gain, 0x5c005c00;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shr.u32 low_bits, low, 1;
    shr.u32 high_bits, high, 1;
    and.b32 low_bits, low_bits, 0x3f803f80;
    and.b32 high_bits, high_bits, 0x3f803f80;
    lop3.b32 low, low, 0x80008000, low_bits, 0xea;
    lop3.b32 high, high, 0x80008000, high_bits, 0xea;
    mul.rn.f16x2 $0, low, gain;
    mul.rn.f16x2 $1, high, gain;
    }"""

# NaN patterns become 480, because min returns the other operand if one is NaN.
CONVERT_E4M3_PTX = """{
    .reg .b16 low, high;
    .reg .b32 first, second, most;
    mov.b32 most, 0x5f805f80;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    min.f16x2 $0, first, most;
    min.f16x2 $1, second, most;
    }"""


# A byte is the upper half of its fp16 pattern. NaN patterns disappear, because min and max return the other operand.
SHIFT_E5M2_PTX = """{
    .reg .b32 low, high, least, most;
    mov.b32 most, 0x7b007b00;
    mov.b32 least, 0xfb00fb00;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    min.f16x2 low, low, most;
    min.f16x2 high, high, most;
    max.f16x2 $0, low, least;
    max.f16x2 $1, high, least;
    }"""


@jit
def _levels_e4m3(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    bits = codes.to(tl.int16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@jit
def _levels_e5m2(codes, PLANE: tl.constexpr, OPERAND: tl.constexpr):
    bits = codes.to(tl.int32)
    magnitude = tl.minimum(bits & 0x7F, 0x7B)
    sign = tl.where((bits & 0x7F) > 0x7C, 0, bits & 0x80)
    return ((sign | magnitude) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _encode(x, in_vector, OPERAND: tl.constexpr):
    largest = OPERAND.codec.constants.largest
    scale = tl.div_rn(tl.max(tl.abs(x), 1), largest)
    level = x
    if OPERAND.has_scale:
        level = quotient(x, tl.where(scale > 0, scale, 1.0), 0.0)
    level = tl.clamp(level, -largest, largest)
    codes = _converted(level, OPERAND) if converts_fp8() else _rounded(level, OPERAND)
    return codes, scale, scale


@jit
def _converted(level, OPERAND: tl.constexpr):
    """The bytes of float32 levels, converted by an instruction of the GPU."""
    DTYPE: tl.constexpr = tl.float8e4nv if OPERAND.codec.constants.mantissa_bits == 3 else tl.float8e5
    return level.to(DTYPE).to(tl.uint8, bitcast=True)


@jit
def _rounded(level, OPERAND: tl.constexpr):
    """The bytes of float32 levels, computed by integer arithmetic."""
    magnitude = tl.abs(level)
    # Round the float32 pattern to the mantissa bits, ties to even, and rebase the exponent. Levels below the smallest
    # normal level are multiples of one step. A number that rounds up to the smallest normal level gets its code,
    # because the code after the largest subnormal code is the smallest normal code.
    DROPPED: tl.constexpr = 23 - OPERAND.codec.constants.mantissa_bits
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - OPERAND.codec.constants.bias) << OPERAND.codec.constants.mantissa_bits)
    subnormal = round_to_integer(magnitude * OPERAND.codec.constants.steps_per_unit).to(tl.int32)
    sign = (level.to(tl.int32, bitcast=True) >> 24) & 0x80
    return sign | tl.where(magnitude < OPERAND.codec.constants.smallest_normal, subnormal, normal)


class Fp8(Format):
    """An fp8 format with float32 scales per token and head, or without scales."""

    packing = Packing()

    def __init__(self, name: str, dtype: torch.dtype, *, has_scale: bool) -> None:
        self.name = self.unit_name = name
        self.takes_static_scale = not has_scale
        self.dtype = dtype
        self.scale_dtype = torch.float32 if has_scale else None
        info = torch.finfo(dtype)
        self.largest = info.max
        mantissa_bits, bias = (3, 7) if dtype is torch.float8_e4m3fn else (2, 15)
        constants = SimpleNamespace(
            largest=info.max, mantissa_bits=mantissa_bits, bias=bias, smallest_normal=info.smallest_normal,
            steps_per_unit=2.0 ** (bias - 1 + mantissa_bits),
        )  # fmt: skip
        if dtype is torch.float8_e4m3fn:
            self.codec = Codec(
                _encode, _levels_e4m3, {0: (SHIFT_E4M3_PTX,), 9: (CONVERT_E4M3_PTX,)}, constants=constants
            )
        else:
            self.codec = Codec(_encode, _levels_e5m2, {0: (SHIFT_E5M2_PTX,)}, constants=constants)

    def with_static_scale(self, scale: float) -> Fp8:
        """This format with the static scale ``scale``, rounded to float32; the format must store no scales.

        Raises:
            ValueError: the scale is not between 2**-40 and 2**40. Scales of real caches are far from both.
        """
        scaled = copy.copy(self)
        scaled.static_scale = float32(min(scale, 2.0**41))
        if not 2.0**-40 <= scaled.static_scale <= 2.0**40:
            raise ValueError(f"a static scale must be a number between 2**-40 and 2**40, but is {scale!r}")
        if scaled.static_scale != 1.0:
            scaled.name = f"{self.unit_name.removesuffix('_unit')}_scale{_shortest(scaled.static_scale)}"
        return scaled

    @property
    def kernel_name(self) -> str:
        return self.unit_name

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor | None, None]:
        scale = None
        if self.scale_dtype is not None:
            scale = divided(x.abs().amax(-1, keepdim=True), self.largest)
            x = x / torch.where(scale > 0, scale, 1.0)
        return x.clamp(-self.largest, self.largest).to(self.dtype).view(torch.uint8), scale, None

    def levels(self, codes: Tensor, plane: int = 0) -> Tensor:
        if self.dtype is torch.float8_e4m3fn:
            # Moved to the top of a float32 pattern, a byte has the exponent bias 127 instead of 7. This is its value
            # times 2**-120, for subnormal numbers too, in 4 vector instructions; a conversion from float8_e4m3fn takes
            # 12.
            bits = (codes.view(torch.int8).to(torch.int32) << 20) & SIGN_EXPONENT_MANTISSA
            return bits.view(torch.float32) * 2.0**120
        # The same for 5 exponent bits and the bias 15. Patterns above the largest number saturate.
        magnitude = codes & 0x7F
        sign = torch.where(magnitude > 0x7C, 0, codes & 0x80)
        bits = (sign.to(torch.int32) << 24) | (magnitude.clamp(max=0x7B).to(torch.int32) << 21)
        return bits.view(torch.float32) * 2.0**112


def _shortest(x: float) -> str:
    """The shortest decimal number that rounds to the float32 ``x``."""
    return next(text for digits in range(1, 10) if float32(float(text := f"{x:.{digits}g}")) == x)


FP8_FORMATS = [
    Fp8("fp8_e4m3", torch.float8_e4m3fn, has_scale=True),
    Fp8("fp8_e5m2", torch.float8_e5m2, has_scale=True),
    Fp8("fp8_e4m3_unit", torch.float8_e4m3fn, has_scale=False),
    Fp8("fp8_e5m2_unit", torch.float8_e5m2, has_scale=False),
]
