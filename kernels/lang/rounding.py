"""Rounding of tiles as the specification rounds them, in few instructions."""

from __future__ import annotations

from kvcompile.kernels.lang.triton import INTERPRETED, constexpr_function, jit, tl, triton


@constexpr_function
def has_fma():
    """Whether ``tl.fma`` rounds once. Triton's interpreter rounds the product, too."""
    return not INTERPRETED


@constexpr_function
def has_ptx():
    """Whether kernels are compiled to PTX."""
    return not INTERPRETED and triton.language.target_info.is_cuda()


@constexpr_function
def converts_fp8():
    """Whether the GPU that a kernel is compiled for converts float32 to both kinds of fp8."""
    return has_ptx() and triton.language.target_info.cuda_capability_geq(8, 9)


@jit
def quotient(x, divisor, SMALLEST: tl.constexpr):
    """``x / divisor[:, None]``, as its comparisons with ``n * 2**k`` come out, ``n`` odd and below 256: rounded to an
    integer of 8 bits, or to few mantissa bits, it is what a correctly rounded division is rounded to.

    A product with the reciprocal, corrected once, takes a quarter of the instructions of a division. Near all such
    numbers it has been compared with a division for every mantissa of the divisor. Reciprocal and excess must be
    normal numbers: divisors below 2**-64 are scaled up with ``x``, unless the caller knows a SMALLEST above that.
    Divisors are positive, and quotients less than 2**17 in magnitude.
    """
    if has_fma():
        if SMALLEST < 2.0**-64:
            factor = tl.where(divisor < 2.0**-64, 2.0**64, 1.0)
            x = x * factor[:, None]
            divisor = divisor * factor
        inverse = tl.div_rn(1.0, divisor)
        estimate = x * inverse[:, None]
        # Signs are such that a zero keeps its own. (Triton computes -x as 0 - x.)
        excess = tl.fma(estimate, tl.broadcast_to(divisor[:, None], x.shape), x * -1.0)
        result = tl.fma(excess, tl.broadcast_to((inverse * -1.0)[:, None], x.shape), estimate)
    else:
        result = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    return result


@jit
def round_to_byte(x, OFFSET: tl.constexpr):
    """The integers nearest to float32 ``x``, ties to even, plus OFFSET, an even integer: the lowest byte of an int32.

    They are from -128 to 255. Adding 1.5 * 2**23 leaves no fraction bits; the other bytes are those of that number.
    """
    return (x + (12582912.0 + OFFSET)).to(tl.int32, bitcast=True)
