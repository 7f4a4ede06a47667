"""A write past the end of a cache of fixed size says how many tokens the cache has, and what to do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.prove.positions import wrapped

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, k), values.index_copy_(2, position, v)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=torch.arange(9)[None] <= position)


def packed(role: str) -> PackedTensor:
    return PackedTensor.from_dense(torch.randn(1, 2, 9, 16), PackedLayout("int8_per_token_head", role, 16))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_the_error_names_the_tokens_of_the_cache_and_the_remedy(is_compiled: bool) -> None:
    run = torch.compile(step, backend=kvcompile.kvquant(policy="int8_per_token_head")) if is_compiled else step
    arguments = (*torch.randn(3, 1, 2, 1, 16).unbind(), packed("key"), packed("value"))
    run(*arguments, torch.tensor([8]))
    with pytest.raises(IndexError, match=r"of 9 tokens.* out of bounds|out of bounds.* of 9 tokens") as raised:
        run(*arguments, torch.tensor([9]))
    assert "make a cache with room for more tokens" in str(raised.value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 1024])
def test_no_rank_has_room_for_a_position_past_the_end(size: int) -> None:
    for num_tokens in (1, 9, 63, 64, 65, 128, 192, 320, 1000):
        outside = torch.tensor([num_tokens, num_tokens + 70, -num_tokens - 1])
        for rank in {0, 1, size // 2, size - 1} & {*range(size)}:
            shard = ContextShard(rank, size, "group")
            for position in wrapped(outside, num_tokens):
                _, local, is_own = shard.owned(torch.zeros(1, 1, 1, 16), position[None], None)
                assert not is_own or local >= shard.num_tokens(num_tokens)
