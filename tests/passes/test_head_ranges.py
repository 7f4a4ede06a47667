"""Attention may read some heads of a cache, and combine keys of some heads with values of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile.compilation.rewriter
from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import Pass

BATCH, NUM_HEADS, NUM_KV_HEADS, MAX_LEN, HEAD_DIM = 2, 12, 6, 70, 32
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def attend(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)


def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two attentions over all keys: with the values of the first half of the heads, and of the second half."""
    first, second = (half.repeat(1, 2, 1, 1) for half in v.chunk(2, dim=1))
    return attend(q, k, first) - 0.3 * attend(q, k, second)


def differential_written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.repeat_interleave(2, 1)
    halves = (half.repeat(1, 2, 1, 1).repeat_interleave(2, 1) for half in v.split([3, 3], 1))
    first, second = (torch.softmax(q @ k.mT * 0.2, -1) @ half for half in halves)
    return first - 0.3 * second


def some_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q[:, :6], k[:, 1:4], v[:, -3:])


def one_head_of_keys_for_all_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k[:, 2:3].expand(-1, NUM_KV_HEADS, -1, -1), v)


def heads_in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k[:, 1:3].repeat(1, 2, 1, 1), v[:, 3:5].repeat(1, 2, 1, 1))


def ranges_that_divide_neither(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k[:, :4].repeat(1, 3, 1, 1), v.repeat(1, 2, 1, 1))


def with_a_bias_of_every_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.linspace(-1, 1, NUM_HEADS, device=q.device)[:, None, None] * torch.arange(MAX_LEN, device=q.device)
    return attend(q, k, v[:, :3].repeat(1, 2, 1, 1), attn_mask=bias)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sinks = torch.linspace(-1, 1, NUM_HEADS, device=q.device)[None, :, None, None].expand(BATCH, -1, q.shape[2], 1)
    k, v = k.repeat_interleave(2, 1), v[:, 3:].repeat(1, 2, 1, 1).repeat_interleave(2, 1)
    return torch.cat([q @ k.mT * 0.2, sinks], -1).softmax(-1)[..., :-1] @ v


READS: dict[Attend, int] = {
    differential: 4,
    differential_written_out: 4,
    some_heads: 1,
    one_head_of_keys_for_all_values: 6,
    heads_in_turn: 1,
    ranges_that_divide_neither: 6,
    with_a_bias_of_every_head: 2,
    with_sinks: 2,
}
"""Attention that reads some heads of its caches, each with the expected ranges of heads."""


def caches(format_name: str = "int8_per_token_head", device: str = "cpu") -> list[Tensor]:
    shape = BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM
    layouts = (PackedLayout.parse(format_name, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(torch.randn(shape, device=device), layout) for layout in layouts]


def step_of(fn: Attend) -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        positions = torch.tensor([5, 66], device=q.device)
        return fn(q, keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v))

    return step


def compiled(step: Callable[..., Tensor], on_unsupported: str = "error") -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(step, backend="kvquant", options={"on_unsupported": on_unsupported})


def rows(device: str = "cpu") -> list[Tensor]:
    return [torch.randn(BATCH, heads, 2, HEAD_DIM, device=device) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def check(fn: Attend, packed: list[Tensor], rtol: float = 1e-5) -> None:
    """Compiled attention on packed caches equals the same attention on the dequantized caches."""
    new = rows(str(packed[0].device))
    expected = step_of(fn)(*new, *(cache.clone() for cache in packed))
    out = compiled(step_of(fn))(*new, *packed)
    assert (out - expected).norm() <= rtol * expected.norm()


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", READS, ids=lambda fn: fn.__name__)
def test_each_range_of_heads_is_a_separate_attention(fn: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    run = kvcompile.compilation.rewriter.run

    def count(packing: Packing) -> Iterator[Pass]:
        yield from run(packing)
        nodes = packing.gm.graph.find_nodes(op="call_function", target=torch.ops.kvcompile.attention.default)
        counts.append(len(nodes))

    monkeypatch.setattr(kvcompile.compilation.rewriter, "run", count)
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)
    check(fn, caches())
    assert counts == [READS[fn]]


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("format_name", ["turboquant_4bit", "int4_per_token_head[recent=1,sinks=1,float32]"])
def test_heads_of_any_format_are_read_apart(format_name: str) -> None:
    check(some_heads, caches(format_name))


@pytest.mark.usefixtures("without_code_generation")
def test_numbers_of_heads_may_be_symbols() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, *past: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return differential(q, keys, values), keys, values

    (q, *caches), (_, k, v) = rows(), rows()
    run = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"}, dynamic=True)
    out, *packed = run(q, k, v, *caches)
    torch.testing.assert_close(out, differential(q, *(cache.dequantize() for cache in packed)), rtol=1e-4, atol=1e-5)
    assert [type(cache) for cache in packed] == [PackedTensor] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("format_name", ["int8_per_token_head", "turboquant_4bit"])
@pytest.mark.parametrize("fn", [differential, some_heads])
def test_kernels_read_heads_apart(fn: Attend, format_name: str) -> None:
    check(fn, caches(format_name, "cuda"), 1e-3)


def every_other_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k[:, ::2], v[:, ::2])


def other_tokens_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.split([10, 60], 2)[1], v.split([60, 10], 2)[0])


def last_channels_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, v[..., 16:])


def more_values_than_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k.repeat_interleave(2, 1), v.repeat(1, 2, 1, 1))


def halves_exchanged(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, k, torch.cat([v[:, 3:], v[:, :3]], 1))


REFUSED: dict[Attend, str] = {
    every_other_head: "unknown_read",
    other_tokens_of_values: "unknown_read",
    last_channels_of_values: "unknown_read",
    more_values_than_keys: "unknown_read",
    halves_exchanged: "computed_from_cache",
}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_heads_that_form_no_ranges_are_refused_with_a_reason(fn: Attend) -> None:
    plain = [cache.dequantize() for cache in caches()]
    new, expected_plain = rows(), [cache.clone() for cache in plain]
    out = compiled(step_of(fn), on_unsupported="ignore")(*new, *plain)
    torch.testing.assert_close(out, step_of(fn)(*new, *expected_plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, expected_plain, rtol=0, atol=0)
    assert {site.reason_code for site in last_report().sites} == {REFUSED[fn]}
