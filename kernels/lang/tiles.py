"""Operations on tiles that formats and kernels share."""

from __future__ import annotations

from kvcompile.kernels.lang.triton import jit, tl


@jit
def round_to_integer(x):
    """float32 -> the nearest integer, ties to even, for ``|x| < 2**22``: adding 1.5 * 2**23 leaves no fraction bits."""
    return (x + 12582912.0) - 12582912.0


@jit
def log2(x, FAST: tl.constexpr):
    """Base-2 logarithm of positive normal float32 numbers, with an error of at most 2**-22 when FAST."""
    if FAST:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(x)
    return y


@jit
def exp2_of_each(x, FAST: tl.constexpr):
    """2**x of float32 numbers, with an error of at most 2**-22 of the result when FAST.

    Triton 3.9 computes ``tl.exp2`` of a vector once for each number, and sends the results through shared memory to
    the threads that need them. With FAST each of these threads computes it.
    """
    if FAST:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


@jit
def normalise_rows(x, EXPONENT: tl.constexpr, DTYPE: tl.constexpr):
    """Scale each row of a float32 tile by a power of two, and convert it to DTYPE.

    The largest channel of a row comes to lie in ``[2**(EXPONENT - 1), 2**EXPONENT)``. With an EXPONENT of 7 a bf16 row
    is exact in fp16, except for channels below ``2**-23`` of the largest.

    Returns:
        The scaled tile, and float32 [rows]: the powers of two that undo the scaling.
    """
    # Exponents are biased as in float32: the pattern ``exponent << 23`` is the number 2**(exponent - 127).
    exponent = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 20), min(252 + EXPONENT, 254))
    x = (x * ((253 + EXPONENT - exponent) << 23).to(tl.float32, bitcast=True)[:, None]).to(DTYPE)
    return x, ((exponent + 1 - EXPONENT) << 23).to(tl.float32, bitcast=True)


@jit
def transposed(planes, OPERAND: tl.constexpr):
    """Planes [rows, padded_width] as [padded_width, rows]."""
    result = ()
    NUM: tl.constexpr = OPERAND.num_planes
    for i in tl.static_range(NUM):
        result = result + (tl.trans(planes[i]),)  # noqa: RUF005
    return result


@jit
def prefetch_lines(ptrs):
    """Prefetch the line of 128 bytes at each pointer to the L2 cache, by inline PTX."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )
