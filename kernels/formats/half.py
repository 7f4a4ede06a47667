"""Rounding to fp16 by arithmetic, for scales and zero points: codes are computed against the rounded values."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.lang.triton import jit, tl

SATURATION = 65280.0
"""The magnitude at which channels saturate.

It leaves room below 65504, the largest fp16 number, because scale and zero point are rounded outwards. A scale may be
rounded up by 1.5 units in its last place, which moves the end of a grid of 16 steps by at most 180.
"""


def nearest_half(x: Tensor) -> Tensor:
    """``x`` rounded to the nearest fp16 number, ties to even, as float32.

    The result equals ``x.half().float()``. It is computed by arithmetic because Inductor drops a cast to fp16 and back.
    Adding 1.5 * 2**23 units in the last place of the result pushes all smaller bits out of a float32.
    """
    power_of_two = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    shift = (power_of_two * 2.0**13).clamp(min=0.5) * 1.5
    return (x + shift) - shift


def half_above(x: Tensor) -> Tensor:
    """``x`` rounded to an fp16 number that is not below it, as float32.

    The number that is added is at least half a unit in the last place of fp16. Rounding to nearest moves a number by
    no more than that.
    """
    return nearest_half(x + (x.abs() * 2**-11 + 2**-25))


@jit
def half_above_tile(x):
    """:func:`half_above` of a tile."""
    return (x + (tl.abs(x) * 0.00048828125 + 2.9802322387695312e-08)).to(tl.float16).to(tl.float32)
