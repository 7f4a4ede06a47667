"""A packed cache without data keeps what guards need: its class, its format and its shape."""

from __future__ import annotations

import pickle

import pytest
import torch
from calibrated_bases import based
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

KEYS = PackedLayout("int8_per_token_head", "key", 64)
VALUES = PackedLayout("int4_per_token_head", "value", 64)

CACHES = {
    "cache": lambda: PackedTensor.zeros((2, 3, 70, 64), torch.bfloat16, KEYS),
    "growing": lambda: PackedTensor.zeros((2, 3, 70, 64), torch.float32, KEYS, growing=True),
    "calibrated": lambda: PackedTensor.zeros(
        (2, 3, 70, 64), torch.float32, PackedLayout(based("int3_unrotated_mean", 3, 64).name, "key", 64)
    ),
    "pool": lambda: PackedPool.zeros((5, 16, 3, 64), torch.bfloat16, KEYS),
    "pool with heads first": lambda: PackedPool.zeros((5, 3, 16, 64), torch.bfloat16, VALUES, heads_first=True),
    "stack": lambda: PackedStack.from_dense(
        torch.zeros(2, 1, 3, 70, 64), {(0,): (KEYS, "bhtd"), (1,): (VALUES, "bhtd")}, (0,)
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_an_empty_cache_on_the_meta_device_is_packed_and_can_be_pickled(name: str) -> None:
    cache: Tensor = CACHES[name]()
    without_data = torch.empty_like(cache, device="meta")
    for found in (without_data, pickle.loads(pickle.dumps(without_data))):
        assert type(found) is type(cache)
        assert found.is_meta
        assert (found.shape, found.stride(), found.dtype) == (cache.shape, cache.stride(), cache.dtype)
        assert found.__tensor_flatten__()[1] == cache.__tensor_flatten__()[1]


def test_an_empty_tensor_like_a_cache_with_data_is_plain() -> None:
    cache = CACHES["cache"]()
    assert type(torch.empty_like(cache)) is Tensor
    assert type(torch.empty_like(cache, device="meta", dtype=torch.float32)) is Tensor
