"""Kernels that get references read and write the data to which these refer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kvcompile.kernels import launch
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.layout.references import References

KEY, VALUE = "int4_per_channel[recent=1,sinks=1,bfloat16]", "turboquant_4bit"


def written(device: torch.device, seed: int, use_references: References | None) -> list[torch.Tensor]:
    """Packed keys and values: 70 tokens are written at once, then 3."""
    generator = torch.Generator().manual_seed(seed)
    layouts = PackedLayout.parse(KEY, "key", 64), PackedLayout.parse(VALUE, "value", 64)
    data = [torch.zeros(layout.shape(80, 1, 1), dtype=torch.uint8, device=device) for layout in layouts]
    passed = data if use_references is None else use_references.refer(data)
    for first, count in ((0, 70), (70, 3)):
        positions = torch.arange(first, first + count, device=device)
        for tensor, layout in zip(passed, layouts, strict=True):
            x = torch.randn(1, 1, count, 64, generator=generator).to(device)
            launch.store(tensor, x, positions, None, layout.spec, layout.role)
    return data


def attended(data: list[torch.Tensor], device: torch.device, use_references: References | None) -> torch.Tensor:
    query = torch.randn(1, 2, 1, 64, generator=torch.Generator().manual_seed(9)).to(device)
    passed = data if use_references is None else use_references.refer(data)
    return launch.attention(query, *passed, None, None, 73, False, 0.2, 0.0, KEY, VALUE, 64)


def test_references_stand_for_the_data_to_which_they_refer_last(device):
    references = References(2, device)
    caches = [written(device, seed, references) for seed in (0, 1)]
    expected = [written(device, seed, None) for seed in (0, 1)]
    for cache, other in zip(caches, expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(cache, other, strict=True))
    for cache, other in zip(caches, expected, strict=True):
        assert torch.equal(attended(cache, device, references), attended(other, device, None))


def test_references_keep_their_address():
    references = References(2, torch.device("cpu"))
    first, second = ([torch.zeros(3, 1, 1, 64, dtype=torch.uint8) for _ in range(2)] for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in references.refer(first)]
    assert [tensor.data_ptr() for tensor in references.refer(second)] == addresses
    assert all(address % 16 == 0 for address in addresses)


def test_data_that_is_not_contiguous_has_no_reference():
    data = torch.zeros(3, 2, 1, 64, dtype=torch.uint8)[:, :1]
    with pytest.raises(ValueError, match="must be contiguous"):
        References(1, torch.device("cpu")).refer([data])
