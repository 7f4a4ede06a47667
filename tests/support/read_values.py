"""Comparisons of what the dequantize kernel reads with what the specification reads."""

from __future__ import annotations

import torch
from packed_bytes import empty_packed

from kvcompile.kernels import launch
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import read_tokens, to_cache_dtype, write_tokens_


def packed_cache(spec, head_dim, num_tokens, capacity, role="key", batch=2, heads=3):
    """Packed data of ``capacity`` tokens on the CPU; the first ``num_tokens`` are random."""
    layout = PackedLayout.parse(spec, role, head_dim)
    data = empty_packed(layout, capacity, batch, heads, torch.device("cpu"))
    write_tokens_(data, layout, torch.randn(batch, heads, num_tokens, head_dim), torch.arange(num_tokens))
    return layout, data


def assert_reads_like_the_specification(layout, data, num_tokens, dtype, device, view=lambda data: data):
    expected = to_cache_dtype(read_tokens(view(data), layout, num_tokens), dtype)
    actual = launch.dequantize(
        view(data.to(device)), num_tokens, dtype, layout.spec, layout.role, layout.head_dim
    ).cpu()
    assert actual.is_contiguous()
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
