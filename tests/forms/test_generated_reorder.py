"""Generated code that stores tokens and then moves tokens or sequences reads each byte before it is overwritten."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "attention_as_operator")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_beams_are_read_before_they_are_overwritten(device: str) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, pos: Tensor, beams: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, keys)
        keys.copy_(keys[beams])
        return out

    plain = torch.randn(3, 2, 70, 32, device=device)
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", 32))
    new, pos, beams = torch.randn(2, 3, 2, 1, 32), torch.tensor([5]), torch.tensor([2, 0, 0])
    q, k, pos, beams = (given.to(device) for given in (*new, pos, beams))
    run = torch.compile(step, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    result = run(q, k, cache, pos, beams)
    torch.testing.assert_close(result, step(q, k, plain, pos, beams), rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.dequantize(), plain)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_that_move_after_a_write_are_read_before_they_are_overwritten(device: str) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        keys.copy_(keys.roll(-1, 2))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, keys)

    plain = torch.randn(3, 2, 140, 32, device=device)
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", 32))
    (q, k), pos = torch.randn(2, 3, 2, 1, 32, device=device), torch.tensor([63], device=device)
    run = torch.compile(step, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    result = run(q, k, cache, pos)
    torch.testing.assert_close(result, step(q, k, plain, pos), rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.dequantize(), plain)


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_that_a_mask_leaves_out_keep_their_tokens(device: str) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        new = keys.index_copy(2, pos, k)
        keys.copy_(torch.where(active[:, None, None, None], new, keys))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, keys)

    plain = torch.randn(3, 2, 70, 32, device=device)
    cache = PackedTensor.from_dense(plain, PackedLayout("float32", "key", 32))
    (q, k), pos = torch.randn(2, 3, 2, 1, 32, device=device), torch.tensor([63], device=device)
    active = torch.tensor([True, False, True], device=device)
    run = torch.compile(step, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    result = run(q, k, cache, pos, active)
    torch.testing.assert_close(result, step(q, k, plain, pos, active), rtol=1e-4, atol=1e-5)
    assert torch.equal(cache.dequantize(), plain)
