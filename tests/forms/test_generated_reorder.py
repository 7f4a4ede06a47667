"""Generated code that stores tokens and then moves tokens or sequences reads each byte before it is overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def test_beams_are_read_before_they_are_overwritten() -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, pos: Tensor, beams: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, keys)
        keys.copy_(keys[beams])
        return out

    plain = torch.randn(3, 2, 70, 32)
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", 32))
    given = (*torch.randn(2, 3, 2, 1, 32),), torch.tensor([5]), torch.tensor([2, 0, 0])
    run = torch.compile(step, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    torch.testing.assert_close(run(*given[0], cache, *given[1:]), step(*given[0], plain, *given[1:]))
    assert torch.equal(cache.dequantize(), plain)


def test_tokens_that_move_after_a_write_are_read_before_they_are_overwritten() -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        keys.copy_(keys.roll(-1, 2))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, keys)

    plain = torch.randn(3, 2, 140, 32)
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", 32))
    q, k = torch.randn(2, 3, 2, 1, 32)
    run = torch.compile(step, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    result = run(q, k, cache, torch.tensor([63]))
    torch.testing.assert_close(result, step(q, k, plain, torch.tensor([63])), rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.dequantize(), plain)
