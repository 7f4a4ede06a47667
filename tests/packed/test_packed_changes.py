"""The bytes of unwritten tokens stay unchanged when a graph takes a packed cache as plain values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import BY_TOKEN, in_turn
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.in_place import store_changes
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, TOKENS, HEAD_DIM = 2, 2, 140, 64
RESIDUALS = ["int4_per_channel[recent=1,sinks=0,float32]", "int8_per_token_head[recent=1,sinks=1,float32]"]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def layout(name: str, role: str = "key") -> PackedLayout:
    return PackedLayout.parse(name, role, HEAD_DIM)


def packed(name: str, role: str = "key", *, growing: bool = False) -> PackedTensor:
    x = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM)
    return PackedTensor.from_dense(x, layout(name, role), growing=growing)


def stack() -> PackedStack:
    """A stack of a packed cache and a plain cache."""
    x = torch.randn(2, BATCH, HEADS, TOKENS, HEAD_DIM)
    return PackedStack.from_dense(x, {(0,): (layout("int4_unrotated"), "bhtd")})


def pool(*, heads_first: bool) -> PackedPool:
    x = torch.randn(9, HEADS, 16, HEAD_DIM) if heads_first else torch.randn(9, 16, HEADS, HEAD_DIM)
    return PackedPool.from_dense(x, layout("int4_unrotated"), heads_first=heads_first)


def attend_beside_a_cache_that_no_pass_knows(
    cache: Tensor, keys: Tensor, values: Tensor, q: Tensor, x: Tensor, pos: Tensor
) -> Any:
    cache.index_copy_(2, pos, x)
    read = (q @ cache.mT).clamp(-5, 5)
    keys.index_copy_(2, pos, x)
    values.index_copy_(2, pos, x)
    return F.scaled_dot_product_attention(q, keys, values), read


def compiled(step: Callable[..., Any], policy: str = "int8_per_token_head") -> Any:
    return torch.compile(step, backend="kvquant", options={"policy": policy, "on_unsupported": "ignore"})


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(("name", "growing"), in_turn(["int4_unrotated", *RESIDUALS], [False, True]))
def test_after_many_steps_a_cache_equals_the_cache_of_eager_code(name: str, growing: bool) -> None:
    cache = packed(name, growing=growing)
    expected = copy.deepcopy(cache)
    keys, values = packed("int8_per_token_head"), packed("int8_per_token_head", "value")
    step = compiled(attend_beside_a_cache_that_no_pass_knows)
    for position in range(58, 78):  # crosses the block boundary at 64
        q, x = torch.randn(2, BATCH, HEADS, 1, HEAD_DIM).unbind()
        step(cache, keys, values, q, x, torch.tensor([position]))
        expected.index_copy_(2, torch.tensor([position]), x)
    assert [site.reason_code for site in last_report().sites] == [None]
    assert torch.equal(cache.packed, expected.packed)


@pytest.mark.slow
def test_generated_code_leaves_unwritten_tokens_unchanged() -> None:
    cache = packed("int4_per_token_head")
    expected = copy.deepcopy(cache)
    keys, values = packed("int4_per_token_head"), packed("int4_per_token_head", "value")
    step = compiled(attend_beside_a_cache_that_no_pass_knows, "int4_per_token_head")
    for position in range(5):
        q, x = torch.randn(2, BATCH, HEADS, 1, HEAD_DIM).unbind()
        step(cache, keys, values, q, x, torch.tensor([position]))
    assert torch.equal(cache[:, :, 5:].dequantize(), expected[:, :, 5:].dequantize())


CACHES: dict[str, Callable[[], Any]] = {
    "a cache": lambda: packed("int4_unrotated"),
    "a cache in half precision": lambda: PackedTensor.from_dense(
        torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM).half(), layout("int4_unrotated")
    ),
    "a view from within a block": lambda: packed("int4_unrotated")[:, :, 70:],
    "another order of dimensions": lambda: packed("int4_unrotated").transpose(1, 2),
    "one head": lambda: packed("int4_unrotated")[:, 1],
    "recent tokens in full precision": lambda: packed(RESIDUALS[0]),
    "a pool": lambda: pool(heads_first=False),
    "a pool with heads first": lambda: pool(heads_first=True),
    "a stack": stack,
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES.keys())


def bytes_of(cache: Any) -> list[Tensor]:
    """Copies of all bytes of a cache."""
    if isinstance(cache, PackedStack):
        return [data for part in cache.parts for data in bytes_of(part)]
    if isinstance(cache, PackedPool):
        return bytes_of(cache.slots)
    return [cache.packed.clone() if isinstance(cache, PackedTensor) else cache.clone()]


@pytest.mark.parametrize("name", BY_TOKEN)
def test_unwritten_tokens_of_every_format_keep_their_bytes(name: str) -> None:
    cache = packed(name)
    expected = cache.clone()
    for position in range(5):
        values = cache.dequantize()
        values[:, :, position] = expected[:, :, position] = torch.randn(BATCH, HEADS, HEAD_DIM)
        store_changes(cache, values)
    assert torch.equal(cache[:, :, 64:].packed, expected[:, :, 64:].packed)
    assert torch.equal(cache.dequantize()[:, :, 5:], expected.dequantize()[:, :, 5:])
    if not cache.packed_layout.format.rotated:  # a rotation sums in an order that depends on the shape
        assert torch.equal(cache.packed, expected.packed)


@every_cache
def test_unchanged_values_change_no_byte(make: Callable[[], Any]) -> None:
    cache = make()
    before = bytes_of(cache)
    store_changes(cache, cache.dequantize().contiguous())
    assert all(map(torch.equal, bytes_of(cache), before))


@every_cache
def test_changed_vectors_are_stored_as_eager_code_stores_them(make: Callable[[], Any]) -> None:
    cache = make()
    expected, values = copy.deepcopy(cache), cache.dequantize().contiguous()
    x = torch.randn_like(values[1])
    values[1] = x
    expected[1] = x
    store_changes(cache, values)
    assert all(map(torch.equal, bytes_of(cache), bytes_of(expected)))


def test_a_nan_that_stays_is_no_change_and_one_that_comes_is() -> None:
    cache = PackedTensor.zeros((BATCH, HEADS, TOKENS, HEAD_DIM), torch.float32, layout("bfloat16"))
    cache[:, :, 3] = torch.full((BATCH, HEADS, HEAD_DIM), torch.nan)
    before, values = bytes_of(cache), cache.dequantize()
    store_changes(cache, values)
    assert all(map(torch.equal, bytes_of(cache), before))
    values[0, 0, 5] = torch.nan
    store_changes(cache, values)
    assert cache.isnan().nonzero()[:, 2].unique().tolist() == [3, 5]
    assert cache[:, :, 5].isnan().sum() == HEAD_DIM
