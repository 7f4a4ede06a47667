"""C++ code of Inductor computes the last elements of a loop that Inductor could split (pytorch/pytorch#195582)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.utils import fresh_cache

from kvcompile.compat.loop_tails import complete_loops
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@torch.no_grad()
def test_a_length_that_is_no_multiple_of_a_divisor_is_computed_to_its_end() -> None:
    cache = PackedTensor.from_dense(torch.randn(1, 2, 64, 32), PackedLayout("int4_per_token_head", "key", 32))

    def read(cache: Tensor, rows: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
        scaled = [rows[:n] * scales[torch.arange(n) // 32] for n in (7, 33, 50, 64, 200)]
        return cache.flatten()[:50] * 1, *scaled

    rows, scales = torch.randn(2, 200)
    with fresh_cache():
        results = torch.compile(read, backend="kvquant")(cache, rows, scales)
    torch.testing.assert_close(results, read(cache, rows, scales))


@torch.no_grad()
def test_a_loop_without_a_remainder_is_still_split(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    split = CppScheduling.try_loop_split

    def spy(self: CppScheduling, nodes: list[object]) -> list[object]:
        seen.append(len(nodes))
        return split(self, nodes)

    monkeypatch.setattr(CppScheduling, "try_loop_split", spy)
    rows, scales = torch.randn(2, 64)
    with fresh_cache(), complete_loops():
        for n in (64, 50):
            torch.compile(lambda x, y, n=n: x[:n] * y[torch.arange(n) // 32])(rows, scales)
    assert len(seen) == 1
    assert CppScheduling.try_loop_split is spy
