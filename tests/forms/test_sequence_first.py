"""Caches [tokens, batch, num_kv_heads, head_dim], with tokens before sequences as in Megatron-LM, are packed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import cases_by_device
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 4, 2, 64, 140
POLICIES = ["int8_per_token_head", "int4", "turboquant_4bit_nc"]

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(step: Callable[..., Any], policy: str) -> Callable[..., Any]:
    return torch.compile(step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error"})


def layouts(policy: str) -> list[PackedLayout]:
    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    return [formats.layout(role, HEAD_DIM, torch.float32) for role in ("key", "value")]


def new_tokens(n: int, batch: int, device: str) -> list[Tensor]:
    """Query, keys and values of ``n`` tokens, [n, batch, heads, head_dim]."""
    return [torch.randn(n, batch, heads, HEAD_DIM, device=device) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def by_products(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention as batched products of all sequences and heads; the result is [n, batch, num_heads * head_dim]."""
    n, batch, _, _ = q.shape
    keys, values = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 2).flatten(1, 2) for x in (keys, values))
    scores = torch.bmm(q.flatten(1, 2).transpose(0, 1) * HEAD_DIM**-0.5, keys.permute(1, 2, 0))
    scores = scores.view(batch, NUM_HEADS, n, -1).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).view(batch * NUM_HEADS, n, -1)
    out = torch.bmm(weights, values.transpose(0, 1)).view(batch, NUM_HEADS, n, HEAD_DIM)
    return out.permute(2, 0, 1, 3).flatten(2)


def by_sdpa(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    q, keys, values = (x.permute(1, 2, 0, 3) for x in (q, keys, values))
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def causal(n: int, kv_len: int, start: int, device: torch.device) -> Tensor:
    return torch.arange(kv_len, device=device) <= torch.arange(start, start + n, device=device)[:, None]


READS = [(by_products, 2), (by_sdpa, 2), (by_sdpa, 1)]


@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize(
    ("attend", "batch", "policy", "device"),
    cases_by_device(
        on_gpu=[(*read, policy) for read, policy in itertools.product(READS, POLICIES)],
        on_cpu=[(by_products, 2, "int8_per_token_head"), (by_sdpa, 1, "turboquant_4bit_nc")],
        generated_on_cpu=[(by_products, 2, "int8_per_token_head"), (by_sdpa, 1, "int4")],
    ),
)
def test_a_static_cache_is_packed_and_read_up_to_its_last_token(
    attend: Callable[..., Tensor], batch: int, policy: str, device: str
) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        end = start + k.shape[0]
        keys[start:end], values[start:end] = k, v
        return attend(q, keys[:end], values[:end], causal(len(q), end, start, q.device))

    caches = [torch.zeros(MAX_LEN, batch, NUM_KV_HEADS, HEAD_DIM, device=device) for _ in range(2)]
    expected = [PackedTensor.from_dense(x, how, "tbhd") for x, how in zip(caches, layouts(policy), strict=True)]
    run = compiled(step, policy)
    lengths = (70, 1) if attend is by_products else (70, 5)  # each length takes a graph
    start = 0
    for n in (70, 1, 5) if device == "cuda" else lengths:
        new = new_tokens(n, batch, device)
        torch.testing.assert_close(run(*new, *caches, start), step(*new, *expected, start), rtol=1e-3, atol=1e-3)
        start += n
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert cache.axes == "tbhd"
        torch.testing.assert_close(cache.dequantize(), other.dequantize(), rtol=0, atol=0)
    assert {cache.kind for cache in last_report().sites[0].caches} == {"static"}


@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize(
    ("batch", "policy", "device"),
    cases_by_device(
        on_gpu=itertools.product((1, 2), POLICIES),
        on_cpu=[(1, "turboquant_4bit_nc"), (2, "int4")],
        generated_on_cpu=[(2, "int8_per_token_head")],
    ),
)
def test_a_cache_grows_at_its_first_dimension_from_the_prompt_on(batch: int, policy: str, device: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Any]:
        k, v = k + 1, v + 1  # stands for projections; PyTorch may drop a product with 1
        start = 0
        if past is not None:
            start = past[0].shape[0]
            k, v = torch.cat([past[0], k]), torch.cat([past[1], v])
        return by_sdpa(q, k, v, causal(len(q), len(k), start, q.device)), (k, v)

    run = compiled(step, policy)
    past = expected = None
    for n in (70, 1, 1, 5) if batch == 1 else (70, 1, 1):  # each length takes a graph
        new = new_tokens(n, batch, device)
        if expected is None:
            expected = tuple(
                PackedTensor.from_dense(x + 1, how, "tbhd", growing=True)
                for x, how in zip(new[1:], layouts(policy), strict=True)
            )
            _, past = run(*new, None)
        else:
            out, past = run(*new, past)
            other, expected = step(*new, expected)
            torch.testing.assert_close(out, other, rtol=1e-3, atol=1e-3)
    assert past is not None
    for cache, other in zip(past, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert cache.axes == "tbhd"
        assert cache.growing
        torch.testing.assert_close(cache.dequantize(), other.dequantize(), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("without_code_generation")
def test_one_tensor_may_hold_keys_and_values_of_every_token() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, positions: Tensor) -> Tensor:
        kv[0, positions], kv[1, positions] = k, v
        visible = torch.arange(MAX_LEN) <= positions[:, None]
        return by_sdpa(q, kv[0], kv[1], visible)

    kv = torch.randn(2, MAX_LEN, 2, NUM_KV_HEADS, HEAD_DIM)
    parts = {(role,): (layout, "tbhd") for role, layout in enumerate(layouts(POLICIES[0]))}
    expected = PackedStack.from_dense(kv, parts)
    run = compiled(step, POLICIES[0])
    for start, n in ((3, 1), (63, 5)):
        new, positions = new_tokens(n, 2, "cpu"), torch.arange(start, start + n)
        torch.testing.assert_close(run(*new, kv, positions), step(*new, expected, positions), rtol=1e-4, atol=1e-5)
    assert isinstance(kv, PackedStack)
    assert torch.equal(kv.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("without_code_generation")
def test_beams_are_reordered_and_tokens_dropped_packed() -> None:
    def step(q: Tensor, keys: Tensor, values: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([keys, k]), torch.cat([values, v])
        return by_sdpa(q, keys, values, causal(len(q), len(keys), len(keys) - len(q), q.device)), keys, values

    plain = [torch.randn(70, 3, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)]
    caches = [
        PackedTensor.from_dense(x, how, "tbhd", growing=True) for x, how in zip(plain, layouts("fp8_e4m3"), strict=True)
    ]
    values = [cache.dequantize() for cache in caches]
    beams = torch.tensor([2, 0, 0])
    caches = [cache.index_select(1, beams)[:66] for cache in caches]
    values = [x.index_select(1, beams)[:66] for x in values]
    q, k, v = new_tokens(1, 3, "cpu")
    out, *longer = compiled(step, "fp8_e4m3")(q, *caches, k, v)
    expected = [PackedTensor.from_dense(x, how, "tbhd") for x, how in zip((k, v), layouts("fp8_e4m3"), strict=True)]
    values = [torch.cat([x, new.dequantize()]) for x, new in zip(values, expected, strict=True)]
    torch.testing.assert_close(out, by_sdpa(q, *values, torch.ones(1, 67, dtype=torch.bool)), rtol=1e-4, atol=1e-5)
    for cache, x in zip(longer, values, strict=True):
        assert isinstance(cache, PackedTensor)
        torch.testing.assert_close(cache.dequantize(), x, rtol=0, atol=0)
