"""``F.scaled_dot_product_attention`` on caches [batch * heads, tokens, head_dim] is packed, with any mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

N, S, D = 6, 70, 64


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
    keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
    return F.scaled_dot_product_attention(q, keys, values, mask)


@pytest.mark.parametrize("mask_shape", [None, (3, S), (1, 3, S), (N, 1, S)])
def test_caches_of_three_dimensions_are_packed(mask_shape: tuple[int, ...] | None) -> None:
    new = [torch.randn(N, 3, D) for _ in range(3)]
    caches = [torch.randn(N, S, D) for _ in range(2)]
    mask = None if mask_shape is None else (torch.rand(mask_shape) < 0.5) | (torch.arange(S) < 1)
    compiled = torch.compile(step, backend="kvquant", options={"policy": "int8_per_token_head"})
    expected = step(*new, *(cache.clone() for cache in caches), torch.arange(3), mask)
    out = compiled(*new, *caches, torch.arange(3), mask)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2


def test_query_heads_may_share_the_heads_of_one_sequence() -> None:
    new, caches = [torch.randn(n, 1, D) for n in (N, 2, 2)], [torch.randn(2, S, D) for _ in range(2)]

    def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    expected = grouped(*new, *(cache.clone() for cache in caches), torch.tensor([3]))
    compiled = torch.compile(grouped, backend="kvquant", options={"policy": "int8_per_token_head"})
    torch.testing.assert_close(compiled(*new, *caches, torch.tensor([3])), expected, rtol=0, atol=0.03)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2
