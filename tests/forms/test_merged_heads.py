"""Caches with all heads of a token in one dimension, [batch, tokens, num_heads * head_dim], as in Whisper, are packed.

Each head of a token is quantized separately. Compiled steps equal plain code in a lossless format, and eager code on
packed caches in a lossy one. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

B, H, KV, S, D = 3, 4, 2, 70, 32
WIDTH = KV * D
LOSSLESS, LOSSY = "float32", "int8_per_token_head"

Write = Callable[[Tensor, Tensor, Tensor], object]
"""Writes vectors [B, n, WIDTH] at positions of a cache [B, S, WIDTH]."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def per_sequence(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[torch.arange(B), pos[:1] + torch.arange(B)] = new[:, 0]


def in_a_mask(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    here = torch.arange(S)[None, :, None] == (pos[0] + torch.arange(B))[:, None, None]
    cache.copy_(torch.where(here, new[:, :1], cache))


def rolled(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache.copy_(cache.roll(-2, 1))
    cache[:, -2:] = new


def one_number(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[:, 3:5] = 0.5
    cache.index_copy_(1, pos, new)


WRITES: dict[str, Write] = {
    "index_copy": lambda cache, new, pos: cache.index_copy_(1, pos, new),
    "slice": lambda cache, new, pos: cache[:, 5:7].copy_(new),
    "narrow": lambda cache, new, pos: cache.narrow(-2, 5, 2).copy_(new),
    "one token": lambda cache, new, pos: cache.select(1, 5).copy_(new[:, 0]),
    "per sequence": per_sequence,
    "some sequences": lambda cache, new, pos: cache[1:].index_copy_(1, pos, new[1:]),
    "where": in_a_mask,
    "rolled": rolled,
    "one number": one_number,
}


def divided(x: Tensor, heads: int = KV) -> Tensor:
    """[B, n, heads * D] -> [B, heads, n, D]."""
    return x.view(*x.shape[:-1], heads, D).transpose(1, 2)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, divided(keys), divided(values), mask, enable_gqa=True)


def packed(caches: Any, order: str = "btm", **options: Any) -> list[PackedTensor]:
    layouts = (PackedLayout(LOSSY, role, D) for role in ("key", "value"))
    return [PackedTensor.from_dense(x, layout, order, **options) for x, layout in zip(caches, layouts, strict=True)]


def dense(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedTensor) else x


def compiled(step: Any, policy: str, **options: Any) -> Any:
    return torch.compile(
        step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error", **options}
    )


def check_caches(caches: Any, expected: Any, order: str = "btm") -> None:
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert cache.axes == order
        assert cache.packed.shape[2] == KV
        assert torch.equal(cache.dequantize(), dense(other))


def with_policies(cases: Iterable[Any], lossless: Container[Any]) -> Any:
    """Each case with the lossy policy, and with the lossless one, which is slow except for the cases ``lossless``."""
    return [
        pytest.param(case, policy, marks=() if policy == LOSSY or case in lossless else pytest.mark.slow)
        for case in cases
        for policy in (LOSSLESS, LOSSY)
    ]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "policy"), with_policies(WRITES, ("index_copy", "where", "rolled")))
def test_every_form_of_write_is_packed(name: str, policy: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        WRITES[name](keys, k, pos), WRITES[name](values, v, pos)
        return attend(q, keys, values)

    q, k, v, pos = torch.randn(B, H, 2, D), *torch.randn(2, B, 2, WIDTH), torch.tensor([63, 64])
    caches = list(torch.randn(2, B, S, WIDTH).unbind())
    caches = [x.clone() for x in caches]
    expected: Any = [x.clone() for x in caches] if policy == LOSSLESS else packed(caches)
    result = step(q, k, v, pos, *expected)
    run = compiled(step, policy)
    torch.testing.assert_close(run(q, k, v, pos, *caches), result, rtol=1e-4, atol=1e-5)
    check_caches(caches, expected)
    result = step(q, k, v, pos - 9, *expected)  # and with caches that arrive packed
    torch.testing.assert_close(run(q, k, v, pos - 9, *caches), result, rtol=1e-4, atol=1e-5)
    check_caches(caches, expected)


def whisper(q: Tensor, k: Tensor, v: Tensor, past: Any, start: int) -> Any:
    """Keys and values grow by ``cat`` before they are divided into heads; queries and keys are both scaled."""
    n = q.shape[2]
    k, v = k + 1, v + 1
    if past:
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    keys = k.view(B, -1, KV, D).permute(0, 2, 3, 1).repeat_interleave(H // KV, 1) * D**-0.25
    values = v.view(B, -1, KV, D).permute(0, 2, 1, 3).repeat_interleave(H // KV, 1)
    hidden = torch.full((S, S), -torch.inf).triu_(1)[start : start + n, : k.shape[1]]
    weights = ((q * D**-0.25) @ keys + hidden).float().softmax(-1)
    return (weights @ values).transpose(1, 2).flatten(2), k, v


def functional(q: Tensor, k: Tensor, v: Tensor, past: Any, start: int) -> Any:
    pos = torch.arange(start, start + q.shape[2])
    keys, values = past[0].index_copy(1, pos, k), past[1].index_copy(1, pos, v)
    return attend(q, keys, values, torch.arange(S) <= pos[:, None]), keys, values


def tokens_first(q: Tensor, k: Tensor, v: Tensor, past: Any, start: int) -> Any:
    """[tokens, batch, num_heads * head_dim], written in place and returned."""
    n = q.shape[2]
    past[0][start : start + n], past[1][start : start + n] = k.transpose(0, 1), v.transpose(0, 1)
    keys, values = (x.view(S, B, KV, D).permute(1, 2, 0, 3) for x in past)
    visible = torch.arange(S) <= torch.arange(start, start + n)[:, None]
    return F.scaled_dot_product_attention(q, keys, values, visible, enable_gqa=True), *past


def window(q: Tensor, k: Tensor, v: Tensor, past: Any, start: int) -> Any:
    """A sliding window that grows to 8 tokens."""
    k, v = k + 1, v + 1
    if past:
        k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    return attend(q, k, v), k[:, -8:], v[:, -8:]


STEPS = {whisper: (65, 1, 1, 2), functional: (65, 1, 1, 2), tokens_first: (65, 1, 1, 2), window: (5, 1, 1, 2)}
"""The number of tokens in each step. Each number takes a graph."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "policy", "lengths"),
    [
        (whisper, LOSSLESS, (65, 1, 1)),
        (whisper, LOSSY, STEPS[whisper]),
        (functional, LOSSY, (65, 1)),
        (tokens_first, LOSSY, (65, 2)),
        (window, LOSSY, (5, 1)),
        *(
            pytest.param(step, policy, lengths, marks=pytest.mark.slow)
            for step, lengths in STEPS.items()
            for policy in (LOSSLESS, LOSSY)
            if (step, policy) != (whisper, LOSSY)
        ),
    ],
)
def test_steps_equal_plain_and_eager_packed_code(step: Any, policy: str, lengths: tuple[int, ...]) -> None:
    past: Any = ()
    if step in (functional, tokens_first):
        shape = (B, S, WIDTH) if step is functional else (S, B, WIDTH)
        past = torch.zeros(shape), torch.zeros(shape)
    order = "tbm" if step is tokens_first else "btm"
    expected: Any = [x.clone() for x in past] if policy == LOSSLESS else packed(past, order) if past else ()
    run = compiled(step, policy, verify=policy == LOSSLESS)
    start = 0
    with kvcompile.collect_reports() as report:
        for n in lengths:
            q, k, v = torch.randn(B, H, n, D), *torch.randn(2, B, n, WIDTH)
            is_first_prompt = not expected
            out, *past = run(q, k, v, past, start)
            result, *expected = step(q, k, v, expected, start)
            if (
                policy == LOSSY and is_first_prompt
            ):  # attention of the prompt reads quantized keys in compiled code only
                expected = packed(expected, order, growing=True)
            else:
                torch.testing.assert_close(out, result, rtol=1e-4, atol=1e-5)
            check_caches(past, expected, order)
            start += n
    assert {site.reason for site in report.sites} == {None}


def test_a_refused_site_beside_a_packed_one_sees_the_shapes_that_the_model_knows() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], pos: Tensor) -> Any:
        for cache, x in zip(caches, (k, v, k, v), strict=True):
            cache.index_copy_(1, pos, x)
        plain = attend(q, caches[2], caches[3]) + caches[2].sum() + caches[2].shape[-1]
        rows = k * 2, v * 2
        return attend(q, *caches[:2]), plain, attend(q, *rows), *rows, rows[0].shape[-1], caches[3]

    q, k, v, pos = torch.randn(B, H, 2, D), *torch.randn(2, B, 2, WIDTH), torch.tensor([63, 64])
    caches = [torch.randn(B, S, WIDTH) for _ in range(4)]
    other = [x.clone() for x in caches]
    expected = step(q, k, v, other, pos)
    run = torch.compile(step, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "ignore"})
    found = run(q, k, v, caches, pos)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(dense(one) if isinstance(one, Tensor) else one, two, rtol=1e-4, atol=1e-5)
    assert [type(cache) for cache in caches] == [PackedTensor, PackedTensor, Tensor, Tensor]
    assert [dense(cache).shape for cache in caches] == [(B, S, WIDTH)] * 4
    for cache, plain in zip(caches, other, strict=True):
        assert torch.equal(dense(cache), plain)
    assert [site.reason_code for site in kvcompile.last_report().sites] == ["escaping_view", None, None]


def two_widths(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    first = F.scaled_dot_product_attention(q, divided(keys), divided(values), enable_gqa=True)
    narrow = (x.view(B, S, 2 * KV, D // 2).transpose(1, 2) for x in (keys, values))
    return first.sum() + F.scaled_dot_product_attention(q[..., : D // 2], *narrow).sum()


def channels_before_heads(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (x.view(B, S, D, KV).permute(0, 3, 1, 2) for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def some_heads(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys, values = (divided(x[:, :, D:], KV - 1) for x in (keys, values))
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


def scaled_channels(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    keys[..., 3:5] *= 2
    return attend(q, keys, values)


@pytest.mark.parametrize("read", [two_widths, channels_before_heads, some_heads, scaled_channels])
def test_other_uses_are_refused_and_stay_right(read: Callable[..., Tensor]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, 3:5], values[:, 3:5] = k, v
        return read(q, keys, values)

    q, k, v = torch.randn(B, H, 2, D), *torch.randn(2, B, 2, WIDTH)
    caches = [torch.randn(B, S, WIDTH) for _ in range(2)]
    expected_caches = [x.clone() for x in caches]
    expected = step(q, k, v, *expected_caches)
    run = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})
    torch.testing.assert_close(run(q, k, v, *caches), expected)
    for cache, other in zip(caches, expected_caches, strict=True):
        assert type(cache) is Tensor
        assert torch.equal(cache, other)
    assert None not in [site.reason_code for site in kvcompile.last_report().sites]


def test_new_rows_that_are_returned_twice_keep_the_shape_that_the_model_knows() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        k, v = k + 1, v + 1
        copies = k.clone(), v.clone()
        return attend(q, k, v) + attend(q, *copies), k, v, *copies

    given = torch.randn(B, H, 6, D), *torch.randn(2, B, 6, WIDTH)
    out, *rows = compiled(step, LOSSLESS)(*given)
    expected, *others = step(*given)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for row, other in zip(rows, others, strict=True):
        assert torch.equal(dense(row), other)


@pytest.mark.parametrize("writes", [False, True])
def test_a_graph_that_divides_a_packed_cache_into_other_heads_reads_its_values(writes: bool) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys[:, 3:5], values[:, 3:5] = k, v
        return attend(q, keys, values)

    def other_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if writes:
            keys[:, 7:9], values[:, 7:9] = k, v
        keys, values = (x.view(B, S, 2 * KV, D // 2).transpose(1, 2) for x in (keys, values))
        return F.scaled_dot_product_attention(q[..., : D // 2], keys, values)

    caches = [torch.randn(B, S, WIDTH) for _ in range(2)]
    expected_caches = [x.clone() for x in caches]
    for fn in (step, other_step):
        run = torch.compile(fn, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "ignore"})
        given = torch.randn(B, H, 2, D), *torch.randn(2, B, 2, WIDTH)
        torch.testing.assert_close(run(*given, *caches), fn(*given, *expected_caches), rtol=1e-4, atol=1e-5)
    check_caches(caches, expected_caches)
    (site,) = kvcompile.last_report().sites
    assert "with heads of 32 channels instead of 16" in str(site.reason)
