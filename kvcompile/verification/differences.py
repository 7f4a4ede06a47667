"""Comparison of tensors of the rewritten graph and of the original, up to the rounding of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.layout.axes import BLOCK_AXES
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.packed.pool import PackedPool, packed_of, slots_of
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""The largest allowed difference of a vector, divided by the length of the vector, by dtype.

Packed attention sums in another order and with more bits than the original. Vectors of keys, values and outputs average
this rounding. In contrast, one additional or missing key changes an output of n visible tokens by about sqrt(2 / n).
"""

LOSSY = 0.3
"""The limit for lossy formats without a lossless replacement."""


def difference(value: object, expected: object, is_lossy: bool = False, share_scales: bool = False) -> str | None:
    """How ``value`` differs from ``expected``, in one line; None if it does not.

    Args:
        value: a tensor, or another output of a graph.
        expected: the expected value.
        is_lossy: whether vectors may differ by the error of a lossy format.
        share_scales: whether vectors share scales, so that the error of each vector depends on the longest vector.
    """
    if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
        same = isinstance(value, Tensor) == isinstance(expected, Tensor) and value == expected
        return None if same else f"{value!r}, expected {expected!r}"
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return f"{_kind(value)}, expected {_kind(expected)}"
    if torch.equal(value, expected):
        return None
    if not (value.is_floating_point() or value.is_complex()):
        return _first(value != expected, value, expected)
    tolerance = LOSSY if is_lossy else TOLERANCES.get(value.dtype, TOLERANCES[torch.bfloat16])
    one, other = _real(value), _real(expected)
    special = ~(one.isfinite() & other.isfinite())
    unequal = special & (one != other) & ~(one.isnan() & other.isnan())
    if bool(unequal.any()):
        return _first(unequal, one, other)
    one, other = one.masked_fill(special, 0), other.masked_fill(special, 0)
    lengths = other.norm(dim=-1)
    typical = lengths.square().mean().sqrt()
    lengths = lengths.max().expand_as(lengths) if share_scales else lengths
    apart = (one - other).norm(dim=-1)
    wrong = apart > tolerance * (lengths + 0.05 * typical) + torch.finfo(torch.float32).tiny
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    share = float(apart[place] / lengths[place].clamp_min(torch.finfo(torch.float32).tiny))
    count = f"{int(wrong.sum())} of {wrong.numel()} vectors differ"
    return f"{count}, the first at {list(place)} by {share:.1e} of its length"


def stored_difference(cache: object, expected: Tensor) -> str | None:
    """How a packed cache differs from the plain cache ``expected``, quantized in its format; None if it does not.

    The bytes of a vector with its own scales do not depend on when it is written. Other caches may differ by the error
    of a lossy format, because exact blocks and shared scales depend on the order of the writes, and a rotation rounds
    differently for other numbers of vectors.
    """
    if isinstance(cache, PackedStack):
        parts = zip(cache.parts, cache.unstacked(expected), strict=True)
        return next(filter(None, (stored_difference(own, part) for own, part in parts)), None)
    if not isinstance(cache, (PackedTensor, PackedPool)):
        return difference(cache, expected)
    slots = slots_of(cache)
    layout = slots.packed_layout
    axes = BLOCK_AXES[cache.heads_first] if isinstance(cache, PackedPool) else slots.axes
    again = packed_of(expected, layout, axes)
    shares = layout.residual is not None
    return difference(cache.dequantize(), again.dequantize(), shares or layout.format.rotated, shares)


def _real(x: Tensor) -> Tensor:
    """``x`` [..., vector] as real numbers of at least 32 bits."""
    x = torch.view_as_real(x).flatten(-2) if x.is_complex() else x
    x = x if x.dtype == torch.float64 else x.float()
    return x if x.dim() else x[None]


def _kind(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)} {list(x.shape)}"


def _first(wrong: Tensor, value: Tensor, expected: Tensor) -> str | None:
    if not bool(wrong.any()):
        return None
    place = tuple(wrong.nonzero()[0].tolist())
    count = f"{int(wrong.sum())} of {wrong.numel()} numbers differ"
    return f"{count}, the first at {list(place)}: {value[place]}, expected {expected[place]}"
