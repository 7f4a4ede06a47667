"""Attention to neighbouring tokens of a cache without the first ones: ``keys[:, :, begin:end]``, ``keys[:, :, -n:]``.

The whole cache stays packed. Compiled steps equal plain code in a lossless format. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 32, 140
LOSSLESS = {"default": {"dtype": "float32"}}

Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of queries to whole caches."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def attend(q: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True, **options)


def behind_a_block(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attend(q, keys[:, :, 64:], values[:, :, 64:])


def within_a_block(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attend(q, keys.narrow(2, 63, 2), values.narrow(2, 63, 2))


def the_last_tokens(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attend(q, keys[:, :, -9:], values[:, :, -9:])


def causally(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attend(q, keys[:, :, 60:70], values[:, :, 60:70], is_causal=True)


def with_a_bool_mask(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = torch.arange(65) <= torch.arange(q.shape[2])[:, None] + 3
    return attend(q, keys[:, :, 1:66], values[:, :, 1:66], attn_mask=mask)


def with_a_mask_that_hides_all_keys_of_a_row(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    mask = (torch.arange(q.shape[2]) > 0)[:, None]
    return attend(q, keys[:, :, 5:], values[:, :, 5:], attn_mask=mask)


def with_a_float_mask(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    return attend(q, keys[:, :, 7:100], values[:, :, 7:100], attn_mask=-slopes * torch.arange(93))


def written_out_on_repeated_heads(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (x[:, :, 7:100].repeat_interleave(2, 1) for x in (keys, values))
    return (q @ keys.mT * 0.2).softmax(-1) @ values


def no_token(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return attend(q, keys[:, :, 5:5], values[:, :, 5:5])


READS = (
    behind_a_block,
    within_a_block,
    the_last_tokens,
    causally,
    with_a_bool_mask,
    with_a_mask_that_hides_all_keys_of_a_row,
    with_a_float_mask,
    written_out_on_repeated_heads,
    no_token,
)


def rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    return q, k, v


def caches(tokens: int = MAX_LEN) -> list[Tensor]:
    return [torch.randn(BATCH, NUM_KV_HEADS, tokens, HEAD_DIM) for _ in range(2)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("read", READS, ids=lambda read: read.__name__)
def test_neighbouring_tokens_of_a_cache_of_fixed_size_are_read(read: Read) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return read(q, keys, values)

    given, (q, k, v), pos = caches(), rows(3), torch.tensor([64, 4, 139])
    expected = [x.clone() for x in given]
    options = {"policy": LOSSLESS, "on_unsupported": "error"}
    out = torch.compile(step, backend="kvquant", options=options)(q, k, v, *given, pos)
    torch.testing.assert_close(out, step(q, k, v, *expected, pos), rtol=1e-5, atol=1e-5)
    assert all(isinstance(cache, PackedTensor) for cache in given)


def test_the_last_tokens_of_a_growing_cache_are_read() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return attend(q, keys[:, :, -6:], values[:, :, -6:]), keys, values

    run = torch.compile(step, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "error"})
    given = expected = caches(4)
    for n in (1, 60, 1, 1):
        q, k, v = rows(n)
        out, *given = run(q, k, v, *given)
        result, *expected = step(q, k, v, *expected)
        torch.testing.assert_close(out, result, rtol=1e-5, atol=1e-5)
        for cache, other in zip(given, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            assert torch.equal(cache.dequantize(), other)


@pytest.mark.parametrize(("first", "other"), [(slice(1, 66), slice(2, 67)), (slice(0, 65), slice(1, 66))])
def test_keys_and_values_of_different_tokens_are_refused_and_stay_right(first: slice, other: slice) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return attend(q, keys[:, :, first], values[:, :, other])

    given, (q, k, v), pos = caches(), rows(3), torch.tensor([64, 4, 139])
    expected = [x.clone() for x in given]
    with kvcompile.collect_reports() as report:
        out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(q, k, v, *given, pos)
    assert [site.reason_code for site in report.sites] == ["unknown_read"]
    assert torch.equal(out, step(q, k, v, *expected, pos))
