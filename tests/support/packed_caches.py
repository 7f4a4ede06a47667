"""Shared by tests of packed caches: layouts of every format, and the plain tensor that a packed cache must equal."""

from __future__ import annotations

import pytest
import torch
from formats_of_every_kind import BY_TOKEN_AT_16
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

HEAD_DIM = (
    16  # its rotation matrix has entries of 1/4: with `values` below, rotating is exact in any order of summation
)
LAYOUTS = [PackedLayout(name, role, HEAD_DIM) for name in BY_TOKEN_AT_16 for role in ("key", "value")]
INT8 = PackedLayout("int8_per_token_head", "key", HEAD_DIM)

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.format_name}-{layout.role}")
# One byte and two codes a byte, with and without zero point and rotation, row-major and column-major codes.
varied_layouts = pytest.mark.parametrize(
    "layout",
    [INT8, PackedLayout("int4_per_token_head", "value", HEAD_DIM), PackedLayout("turboquant_4bit", "key", HEAD_DIM)],
    ids=lambda layout: f"{layout.format_name}-{layout.role}",
)
every_order = pytest.mark.parametrize("axes", ["bhtd", "bthd", "tbhd"])


def values(*shape: int, generator: torch.Generator | None = None) -> Tensor:
    """Random multiples of 1/64 in (-4, 4)."""
    return (torch.randn(shape, generator=generator).clamp(-3.98, 3.98) * 64).round() / 64


def quantized(x: Tensor, layout: PackedLayout) -> Tensor:
    """The values that a cache returns after ``x`` was written: dequantize(quantize(x)), in the dtype of ``x``."""
    return layout.format.decode(layout.format.encode(x)).to(x.dtype)


def shape_of(axes: str, tokens: int, batch: int = 2, heads: int = 3) -> tuple[int, ...]:
    sizes = {"b": batch, "h": heads, "t": tokens, "d": HEAD_DIM}
    return tuple(sizes[axis] for axis in axes)


def pair(
    layout: PackedLayout,
    axes: str = "bhtd",
    tokens: int = 70,
    *,
    growing: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[PackedTensor, Tensor]:
    """A packed cache of random values, and the plain cache that it must equal in every operation."""
    x = values(*shape_of(axes, tokens)).to(dtype)
    return PackedTensor.from_dense(x, layout, axes, growing=growing), quantized(x, layout)


def assert_same(cache: Tensor, plain: Tensor) -> None:
    """Assert equality; for rotated formats up to rounding, because the order of their sums depends on the shape."""
    assert isinstance(cache, PackedTensor)
    assert cache.shape == plain.shape
    assert cache.dtype == plain.dtype
    tolerance = 4 * torch.finfo(plain.dtype).eps if cache.packed_layout.format.rotated else 0
    torch.testing.assert_close(cache.dequantize(), plain, rtol=tolerance, atol=tolerance)
