"""KV heads may be repeated one by one, all in turn, or both. The packed cache is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM = 2, 3, 70, 16
Repeat = Callable[[Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


def repeated(x: Tensor) -> Tensor:
    return x.repeat(1, 2, 1, 1)


def expanded(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2)


def repeated_one_by_one_and_in_turn(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1).repeat(1, 2, 1, 1)


@pytest.fixture
def caches() -> list[Tensor]:
    return [
        PackedTensor.from_dense(
            torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM), PackedLayout("int8_per_token_head", role, HEAD_DIM)
        )
        for role in ("key", "value")
    ]


def rows(num_heads: int, q_len: int = 2) -> Tensor:
    return torch.randn(BATCH, num_heads, q_len, HEAD_DIM)


def write(cache: Tensor, x: Tensor) -> Tensor:
    return cache.index_copy_(2, torch.tensor([5, 6]), x)


def check(attend: Callable[..., Tensor], caches: list[Tensor], *queries: Tensor, dynamic: bool | None = None) -> None:
    """Compiled ``attend(queries, keys, values)`` equals the same function on the dequantized caches."""

    def step(k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, *queries: Tensor) -> Tensor:
        return attend(*queries, write(kc, k), write(vc, v))

    new = rows(NUM_KV_HEADS), rows(NUM_KV_HEADS)
    plain = [write(cache.clone(), x).dequantize() for cache, x in zip(caches, new, strict=True)]
    compiled: Any = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"}, dynamic=dynamic)
    out = compiled(*new, *caches, *queries)
    torch.testing.assert_close(out, attend(*queries, *plain), rtol=1e-5, atol=1e-5)
    assert [site.reason for site in last_report().sites] == [None]


@pytest.mark.parametrize("repeat", [repeated, expanded, repeated_one_by_one_and_in_turn])
def test_heads_may_be_repeated_in_turn(repeat: Repeat, caches: list[Tensor]) -> None:
    num_heads = repeat(caches[0].dequantize()).shape[1]
    bias = torch.randn(num_heads, 1, MAX_LEN)
    check(
        lambda q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=bias),
        caches,
        rows(num_heads),
    )


def test_how_often_heads_are_repeated_may_be_symbolic(caches: list[Tensor]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat(1, q.shape[1] // NUM_KV_HEADS, 1, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    check(attend, caches, rows(2 * NUM_KV_HEADS), dynamic=True)


def test_heads_repeated_in_turn_may_be_shared_by_neighbouring_queries_and_have_sinks(caches: list[Tensor]) -> None:
    sinks = torch.randn(4 * NUM_KV_HEADS)

    def attend(q: Tensor, sinks: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeated(x).repeat_interleave(2, 1) for x in (k, v))
        scores = torch.cat([q @ k.mT * 0.25, sinks[None, :, None, None].expand(BATCH, -1, q.shape[2], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v

    check(attend, caches, rows(4 * NUM_KV_HEADS), sinks)


def test_keys_and_values_whose_heads_are_repeated_in_different_orders_are_refused(caches: list[Tensor]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor) -> Tensor:
        keys, values = write(kc, k), write(vc, v)
        return F.scaled_dot_product_attention(q, repeated(keys), values.repeat_interleave(2, 1))

    args = rows(2 * NUM_KV_HEADS), rows(NUM_KV_HEADS), rows(NUM_KV_HEADS)
    plain = [cache.dequantize() for cache in caches]
    expected = step(*args, *(cache.clone() for cache in plain))
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(*args, *plain)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert [site.reason_code for site in last_report().sites] == ["unknown_read"]


def test_rows_that_an_index_takes_from_a_fused_projection_are_no_cache() -> None:
    def step(q: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = F.linear(x, weight).unflatten(2, (NUM_KV_HEADS, 3, HEAD_DIM))
        k, v = (qkv[:, :, :, [place]].flatten(2, 3).transpose(1, 2) for place in (-2, -1))
        return F.scaled_dot_product_attention(q, k, v), k, v

    args = rows(NUM_KV_HEADS), torch.randn(BATCH, 2, 8), torch.randn(NUM_KV_HEADS * 3 * HEAD_DIM, 8)
    _, keys, values = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})(*args)
    assert isinstance(keys, PackedTensor)
    assert isinstance(values, PackedTensor)
    torch.testing.assert_close(values.dequantize(), step(*args)[2], rtol=0, atol=0.05)
