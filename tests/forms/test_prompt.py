"""A prompt attends to its own tokens in full precision, whatever format stores them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decode_steps import growing_step
from hand_written_decoder import HEAD_DIM, WRITES, Decoder, Write, index_copy, positions

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

COARSE = "turboquant_2bit"
"""A format whose rounding changes every result."""

pytestmark = pytest.mark.usefixtures("without_code_generation")


def compiled(model: Any, policy: Any = COARSE, **how: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="kvquant", options={"policy": policy, "on_unsupported": "error"}, **how)


def decoder(write: Write = index_copy) -> Decoder:
    torch.manual_seed(0)
    return Decoder(write, batch=2).eval()


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("q_len", [17, 63, 64, 65, 130])
@torch.no_grad()
def test_a_first_prompt_gives_the_results_of_the_plain_model(q_len: int) -> None:
    model, plain = decoder(), decoder()
    ids = torch.randint(0, 97, (2, q_len))
    logits = compiled(model)(ids, 0)
    assert isinstance(model.keys, PackedTensor)
    assert difference(logits, plain(ids, 0)) < 1e-5


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_new_tokens_are_known_in_every_form_of_write(write: Write) -> None:
    model, plain = decoder(write), decoder(write)
    ids = torch.randint(0, 97, (2, 40))
    assert difference(compiled(model)(ids, 0), plain(ids, 0)) < 1e-5


@pytest.mark.parametrize(
    ("write", "q_len"),
    [
        pytest.param(write, q_len, marks=() if q_len == (1, 16)[at % 2] else pytest.mark.slow)
        for at, write in enumerate(WRITES)
        for q_len in (1, 16)
    ],
)
@torch.no_grad()
def test_few_queries_read_their_own_tokens_packed(write: Write, q_len: int) -> None:
    model, plain = decoder(write), decoder(write)
    ids = torch.randint(0, 97, (2, q_len))
    assert difference(compiled(model)(ids, 0), plain(ids, 0)) > 1e-2


@torch.no_grad()
def test_a_later_call_reads_the_earlier_tokens_packed() -> None:
    model, plain = decoder(), decoder()
    ids = torch.randint(0, 97, (2, 80))
    step = compiled(model)
    step(ids[:, :40], 0)
    plain(ids[:, :40], 0)
    plain.keys, plain.values = (cache.dequantize() for cache in (model.keys, model.values))
    assert difference(step(ids[:, 40:], 40), plain(ids[:, 40:], 40)) < 1e-5


@torch.no_grad()
def test_a_policy_may_read_prompts_packed() -> None:
    model, plain = decoder(), decoder()
    ids = torch.randint(0, 97, (2, 40))
    policy = {"version": 1, "default": {"dtype": COARSE}, "prefill": "packed"}
    logits = compiled(model, policy)(ids, 0)
    assert difference(logits, plain(ids, 0)) > 1e-2
    packed = copy.deepcopy(plain)
    packed.keys, packed.values = (
        PackedTensor.zeros(x.shape, x.dtype, cache.packed_layout)
        for x, cache in ((plain.keys, model.keys), (plain.values, model.values))
    )
    assert difference(logits, packed(ids, 0)) < 1e-5


@torch.no_grad()
def test_a_graph_for_prompts_of_any_length_is_exact_for_many_queries_only() -> None:
    model, plain = decoder(), decoder()
    step = compiled(model, dynamic=True)
    step(torch.randint(0, 97, (2, 30)), 100)
    for q_len in (5, 40):  # the second prompt overwrites the first
        ids = torch.randint(0, 97, (2, q_len))
        is_exact = difference(step(ids, 0), plain(ids, 0)) < 1e-5
        assert is_exact == (q_len > 16)


class Growing(torch.nn.Module):
    """Attention to a cache that grows by ``cat``, perhaps with a window."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: Any) -> Any:
        k, v = k * 2, v * 2
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if self.window is not None:
            k, v = k[:, :, -self.window :], v[:, :, -self.window :]
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True), (k, v)


@pytest.mark.parametrize(
    ("window", "dynamic"), [(None, False), (90, False), (50, False), pytest.param(64, True, marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_new_tokens_of_growing_caches_are_known(window: int | None, dynamic: bool) -> None:
    """A window of 50 drops some of the new tokens, too."""
    step, plain, past, plain_past = compiled(Growing(window), dynamic=dynamic), Growing(window), None, None
    for n in (40, 60):
        q, k, v = (torch.randn(1, heads, n, HEAD_DIM) for heads in (4, 2, 2))
        out, past = step(q, k, v, past)
        expected, plain_past = plain(q, k, v, plain_past)
        assert difference(out, expected) < 1e-5
        plain_past = tuple(cache.dequantize() for cache in past)
    assert isinstance(past[0], PackedTensor)


@torch.no_grad()
def test_a_cache_that_begins_with_given_rows_does_not_change_with_them() -> None:
    """Since PyTorch 2.15 the graph of ``k * 1`` returns ``k`` itself."""
    q, k, v = (torch.randn(1, heads, 40, HEAD_DIM) for heads in (4, 2, 2))
    _, past = compiled(Growing(None))(q, k, v, None)
    rows = past[0].dequantize()
    k.zero_()
    assert isinstance(past[0], PackedTensor)
    assert torch.equal(past[0].dequantize(), rows)


@pytest.mark.parametrize(("q_len", "exact"), [(16, False), (17, True), (65, True)])
@torch.no_grad()
def test_a_prompt_into_an_empty_growing_cache_is_a_prompt(q_len: int, exact: bool) -> None:
    """Inductor turns the concatenation with no tokens into a copy of the new tokens."""
    empty = [
        PackedTensor.zeros((1, 2, 0, 32), torch.float32, PackedLayout(COARSE, role, 32), growing=True)
        for role in ("key", "value")
    ]
    q, k, v = torch.randn(3, 1, 2, q_len, 32).unbind()
    out, *caches = compiled(growing_step)(q, k, v, *empty)
    keys, values = (cache.dequantize() for cache in caches)
    read = (k, v) if exact else (keys, values)
    assert [type(cache) for cache in caches] == [PackedTensor, PackedTensor]
    assert difference(out, F.scaled_dot_product_attention(q, *read)) < 1e-5


@torch.no_grad()
def test_keys_that_the_model_returns_unchanged_stay_plain() -> None:
    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        k, v = k.contiguous(), v.to(q)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), k, v

    q, k, v = (torch.randn(1, heads, 40, HEAD_DIM) for heads in (4, 2, 2))
    options = {"policy": "int8_per_token_head", "on_unsupported": "ignore"}
    out, same_k, same_v = torch.compile(fn, backend="kvquant", options=options)(q, k, v)
    assert same_k is k
    assert same_v is v
    assert difference(out, fn(q, k, v)[0]) < 1e-5


def several_writes(cache: torch.Tensor, x: torch.Tensor, start: int) -> None:
    """The second write overwrites a part of the first."""
    cache.index_copy_(2, positions(x, start), x * 2)
    cache.index_copy_(2, positions(x[:, :, 10:], start + 10), x[:, :, 10:])


@torch.no_grad()
def test_only_the_tokens_of_the_last_write_are_exact() -> None:
    model, plain = decoder(several_writes), decoder(several_writes)
    ids = torch.randint(0, 97, (2, 40))
    logits = compiled(model)(ids, 0)
    plain(ids, 0)
    keys, values = (cache.dequantize() for cache in (model.keys, model.values))
    plain.keys[:, :, :10], plain.values[:, :, :10] = keys[:, :, :10], values[:, :, :10]
    plain.write = lambda cache, x, start: None
    assert difference(logits, plain(ids, 0)) < 1e-5
