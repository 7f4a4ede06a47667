"""Keys that a model caches transposed, [batch, heads, head_dim, tokens], as GPT-2, MPT and Bloom do, are packed.

Compiled steps equal plain code in a lossless format, and eager code on packed caches in a lossy one. Graphs run node
by node.
"""

from __future__ import annotations

from collections.abc import Callable
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
LOSSLESS, LOSSY = "float32", "int8_per_token_head"

Write = Callable[[Tensor, Tensor, Tensor], object]
"""Writes keys [B, KV, D, n] at positions of a cache [B, KV, D, S]."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def assign_positions(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[..., pos] = new


def per_sequence(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[torch.arange(B), :, :, pos[:1] + torch.arange(B)] = new[..., 0]


def in_a_mask(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    here = torch.arange(S) == (pos[0] + torch.arange(B))[:, None, None, None]
    cache.copy_(torch.where(here, new[..., :1], cache))


def rolled(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache.copy_(cache.roll(-2, 3))
    cache[..., -2:] = new


WRITES: dict[str, Write] = {
    "index_copy": lambda cache, new, pos: cache.index_copy_(3, pos, new),
    "positions": assign_positions,
    "slice": lambda cache, new, pos: cache[..., 5:7].copy_(new),
    "one token": lambda cache, new, pos: cache.select(3, 5).copy_(new[..., 0]),
    "per sequence": per_sequence,
    "scatter": lambda cache, new, pos: cache.scatter_(3, pos.expand(B, KV, D, 2), new),
    "some sequences": lambda cache, new, pos: cache[1:].index_copy_(3, pos, new[1:]),
    "through a view": lambda cache, new, pos: cache.mT.index_copy_(2, pos, new.mT),
    "where": in_a_mask,
    "rolled": rolled,
}


def dense(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedTensor) else x


@pytest.mark.parametrize("policy", [pytest.param(LOSSLESS, marks=pytest.mark.slow), LOSSY])
def test_every_form_of_write_to_transposed_keys_is_packed(policy: str) -> None:
    def step(q: Tensor, new: Tensor, v: Tensor, pos: Tensor, keys: list[Tensor], values: Tensor) -> list[Tensor]:
        values.index_copy_(2, pos, v)
        for cache, write in zip(keys, WRITES.values(), strict=True):
            write(cache, new, pos)
        return [F.scaled_dot_product_attention(q, cache.mT, values, enable_gqa=True) for cache in keys]

    q, new, v, pos = torch.randn(B, H, 2, D), torch.randn(B, KV, D, 2), torch.randn(B, KV, 2, D), torch.tensor([63, 64])
    keys, values = [torch.randn(B, KV, D, S) for _ in WRITES], torch.randn(B, KV, S, D)
    expected_keys, expected_values = [x.clone() for x in keys], values.clone()
    if policy == LOSSY:
        layouts = [PackedLayout(LOSSY, role, D) for role in ("key", "value")]
        expected_keys = [PackedTensor.from_dense(x, layouts[0], "bhdt") for x in expected_keys]
        expected_values = PackedTensor.from_dense(expected_values, layouts[1])
    run = torch.compile(step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error"})
    expected = step(q, new, v, pos, expected_keys, expected_values)
    torch.testing.assert_close(run(q, new, v, pos, keys, values), expected, rtol=1e-4, atol=1e-5)
    for name, cache, other in zip(WRITES, keys, expected_keys, strict=True):
        assert isinstance(cache, PackedTensor), name
        assert cache.axes == "bhdt"
        assert torch.equal(cache.dequantize(), dense(other)), name


def test_tokens_that_move_within_a_view_of_their_cache_leave_it_plain() -> None:
    def step(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for view in (keys.mT, values.mT):
            view[:, :, :-5] = view[:, :, 5:].clone()
        return F.scaled_dot_product_attention(q, keys.mT, values.mT, enable_gqa=True)

    q, caches = torch.randn(B, H, 1, D), [torch.randn(B, KV, D, S) for _ in range(2)]
    expected_caches = [x.clone() for x in caches]
    run = torch.compile(step, backend="kvquant", options={"policy": LOSSLESS})
    with kvcompile.collect_reports() as report:
        out = run(q, *caches)
    torch.testing.assert_close(out, step(q, *expected_caches), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(x, y) for x, y in zip(caches, expected_caches, strict=True))
    assert [site.reason is not None for site in report.sites] == [True]


def bloom(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, ...], start: int) -> tuple[Tensor, ...]:
    """Keys [B * H, D, S] and values [B * H, S, D] that grow by ``cat``, under ALiBi's biases."""
    n = q.shape[2]
    q, k, v = q.reshape(B * H, n, D), k.mT.reshape(B * H, D, n) + 1, v.reshape(B * H, n, D) + 1
    if past:
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 1)
    kv_len = k.shape[2]
    slopes = torch.linspace(0.1, 0.5, H).repeat(B)[:, None, None]
    scores = (slopes * torch.arange(kv_len)).baddbmm(q, k, beta=1.0, alpha=D**-0.5).view(B, H, n, kv_len)
    visible = torch.arange(kv_len) <= torch.arange(start, start + n)[:, None]
    weights = scores.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(-1).view(B * H, n, kv_len)
    return torch.bmm(weights, v).view(B, H, n, D), k, v


def static(axes: str) -> Callable[..., tuple[Tensor, ...]]:
    """Attention of four heads, or of the one head or sequence that a cache of three dimensions has."""

    def step(q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, ...], start: int) -> tuple[Tensor, ...]:
        keys, values = past
        positions = torch.arange(start, start + q.shape[2])
        values.index_copy_(2, positions, v)
        if len(axes) == 3:
            k = k[:, 0] if "h" not in axes else k[0]
        keys[..., positions] = (k.transpose(0, 1) if axes[0] == "h" and len(axes) == 4 else k).mT
        read = {"bhdt": keys, "hbdt": keys.transpose(0, 1), "bdt": keys[:, None], "hdt": keys[None]}[axes]
        visible = torch.arange(S) <= positions[:, None]
        return F.scaled_dot_product_attention(q, read.mT, values, visible, enable_gqa=True), keys, values

    return step


STEPS = [
    ("growing", LOSSLESS, (66, 1, 1)),
    ("growing", LOSSY, (66, 1, 1, 2)),
    ("bhdt", LOSSLESS, (66, 1)),
    ("bhdt", LOSSY, (66, 2)),
    ("hbdt", LOSSY, (66, 1)),
    ("bdt", LOSSY, (66, 1)),
    ("hdt", LOSSY, (66, 1)),
]
"""The order of dimensions, the policy, and the number of tokens in each step. Each number takes a graph."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("axes", "policy", "lengths"),
    [
        *STEPS,
        *(
            pytest.param(axes, policy, (66, 1, 1, 2), marks=pytest.mark.slow)
            for axes in ("bhdt", "hbdt", "bdt", "hdt")
            for policy in (LOSSLESS, LOSSY)
        ),
    ],
)
def test_a_step_on_transposed_keys_equals_plain_and_eager_packed_code(
    axes: str, policy: str, lengths: tuple[int, ...]
) -> None:
    batch, heads = 1 if axes == "hdt" else B, {"growing": H, "bdt": 1}.get(axes, KV)
    sizes = {"b": batch, "h": heads, "t": S, "d": D}
    step: Any = bloom if axes == "growing" else static(axes)
    past: tuple[Tensor, ...] = ()
    if axes != "growing":
        past = torch.zeros([sizes[axis] for axis in axes]), torch.zeros(batch, heads, S, D)
    expected = tuple(x.clone() for x in past)
    run = torch.compile(step, backend="kvquant", options={"policy": reading_packed(policy), "on_unsupported": "error"})
    start = 0
    with kvcompile.collect_reports() as report:
        for n in lengths:
            q, k, v = (torch.randn(batch, count, n, D) for count in (H, heads, heads))
            if policy == LOSSY and past and not isinstance(expected[0], PackedTensor):
                layouts = [PackedLayout(LOSSY, role, D) for role in ("key", "value")]
                orders = ("bdt", "btd") if axes == "growing" else (axes, "bhtd")
                expected = tuple(
                    PackedTensor.from_dense(x, layout, order, growing=axes == "growing")
                    for x, layout, order in zip(expected, layouts, orders, strict=True)
                )
            out, *past = run(q, k, v, past, start)
            result, *expected = step(q, k, v, expected, start)
            if policy == LOSSLESS or isinstance(expected[0], PackedTensor):  # a first prompt reads unquantized new keys
                torch.testing.assert_close(out, result, rtol=1e-4, atol=1e-5)
            start += n
    assert {site.reason_code for site in report.sites} == {None}
    assert all(isinstance(cache, PackedTensor) for cache in past)
    for cache, other in zip(past, expected, strict=True):
        assert torch.equal(dense(cache), dense(other))


def channels_before_heads(keys: Tensor, new: Tensor) -> Tensor:
    keys = keys.view(B, D, KV, S)
    keys[..., 3:4] = new.transpose(1, 2)
    return keys.permute(0, 2, 3, 1)


def some_channels(keys: Tensor, new: Tensor) -> Tensor:
    keys[..., 3:4] = new
    return keys[:, :, : D // 2].mT


def tokens_and_channels_regrouped(keys: Tensor, new: Tensor) -> Tensor:
    keys[..., 3:4] = new
    return keys.reshape(B, KV, S, D)


@pytest.mark.parametrize(
    ("read", "code"),
    [
        (channels_before_heads, "channels_not_last"),
        (some_channels, "unknown_read"),
        (tokens_and_channels_regrouped, "unknown_read"),
    ],
)
def test_other_orders_and_parts_of_channels_are_refused_and_stay_right(
    read: Callable[[Tensor, Tensor], Tensor], code: str
) -> None:
    def step(q: Tensor, new: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        values[:, :, 3:4] = new.mT
        k = read(keys, new)
        return F.scaled_dot_product_attention(q[..., : k.shape[-1]], k, values, enable_gqa=True)

    q, new = torch.randn(B, H, 1, D), torch.randn(B, KV, D, 1)
    shape = (B, D, KV, S) if read is channels_before_heads else (B, KV, D, S)
    caches = [torch.randn(shape), torch.randn(B, KV, S, D)]
    expected = step(q, new, *(x.clone() for x in caches))
    out = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})(q, new, *caches)
    assert torch.equal(out, expected)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == code, site.reason
