"""Rounding of tiles: bit for bit as the specification rounds, in few instructions."""

from __future__ import annotations

from kvcompile.compat.triton_names import target_info
from kvcompile.kernels.lang.triton import INTERPRETED, constexpr_function, jit, tl


@constexpr_function
def has_fma():
    """Whether ``tl.fma`` rounds only once. Triton's interpreter also rounds the product."""
    return not INTERPRETED


@constexpr_function
def has_ptx():
    """Whether kernels are compiled to PTX."""
    return not INTERPRETED and target_info.is_cuda()


@constexpr_function
def converts_fp8():
    """Whether the GPU that a kernel is compiled for converts float32 to both kinds of fp8."""
    return has_ptx() and target_info.cuda_capability_geq(8, 9)


@jit
def quotient(x, divisor, SMALLEST: tl.constexpr):
    """``x / divisor[:, None]``, exact enough to be rounded to 8 bits.

    The result may differ from the correctly rounded quotient in its last bit. But both lie on the same side of every
    number ``n * 2**k`` with odd ``n`` below 256, or both are equal to it. Rounded to an 8-bit integer or to few
    mantissa bits, both give the same number. (Checked around all these numbers, for every mantissa of the divisor.)

    The method is a product with the reciprocal and one correction, in a quarter of the instructions of a division.

    Args:
        x: float32 [rows, columns]; quotients are less than 2**17 in magnitude.
        divisor: float32 [rows], positive.
        SMALLEST: a lower bound of the divisors, or 0. Reciprocal and correction must be normal numbers. Divisors below
            2**-64 and their ``x`` are therefore scaled up first.
    """
    if has_fma():
        if SMALLEST < 2.0**-64:
            factor = tl.where(divisor < 2.0**-64, 2.0**64, 1.0)
            x = x * factor[:, None]
            divisor = divisor * factor
        inverse = tl.div_rn(1.0, divisor)
        estimate = x * inverse[:, None]
        # The signs are chosen so that a zero keeps its sign. (Triton computes -x as 0 - x.)
        excess = tl.fma(estimate, tl.broadcast_to(divisor[:, None], x.shape), x * -1.0)
        result = tl.fma(excess, tl.broadcast_to((inverse * -1.0)[:, None], x.shape), estimate)
    else:
        result = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    return result


@jit
def round_to_byte(x, OFFSET: tl.constexpr):
    """float32 ``x`` rounded to integers, ties to even, plus OFFSET, in the lowest byte of int32.

    OFFSET is even, and results are from -128 to 255. Adding 1.5 * 2**23 leaves no fraction bits in the float32 pattern;
    its upper three bytes are meaningless here.
    """
    return (x + (12582912.0 + OFFSET)).to(tl.int32, bitcast=True)


@jit
def finite_at(ptr, x):
    """float32 ``x`` for a store at ``ptr``: for fp16, finite numbers are clamped to the range of fp16."""
    if ptr.dtype.element_ty == tl.float16:
        x = tl.where(tl.abs(x) < float("inf"), tl.clamp(x, -65504.0, 65504.0), x)
    return x
