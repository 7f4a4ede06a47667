"""A step may write a cache twice alike: once where attention reads it, and once for the output.

Compiled steps equal eager code on packed caches. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_caches import assert_same
from policies import reading_packed
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 32, 70
FORMAT = "int8_per_token_head"

Step = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def rows(n: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(BATCH, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    return q, k, v


def caches(tokens: int) -> list[Tensor]:
    return [torch.randn(BATCH, NUM_KV_HEADS, tokens, HEAD_DIM) for _ in range(2)]


def packed(plain: list[Tensor], growing: bool = False) -> list[PackedTensor]:
    layouts = (PackedLayout(FORMAT, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(x, own, growing=growing) for x, own in zip(plain, layouts, strict=True)]


def compiled(step: Step, **options: Any) -> Step:
    packing = {"policy": reading_packed(FORMAT), "on_unsupported": "error"}
    result: Step = torch.compile(step, backend="kvquant", options=packing, **options)
    return result


def rotated(x: Tensor, pos: Tensor) -> Tensor:
    """RoPE by a division of the channels into two lists of one tensor."""
    angles = pos[:, None] / 100 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)


def grown_twice(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    out = attend(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
    return out, torch.cat([keys, k], 2), torch.cat([values, v], -2)


def rotated_twice(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    out = attend(rotated(q, pos), torch.cat([keys, rotated(k, pos)], 2), torch.cat([values, v], 2))
    return out, torch.cat([keys, rotated(k, pos)], 2), torch.cat([values, v], 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("step", [grown_twice, rotated_twice])
def test_a_cache_that_grows_twice_alike_equals_the_packed_cache_of_eager_code_over_70_steps(
    step: Step, dynamic: bool | None
) -> None:
    counters.clear()
    run, given = compiled(step, dynamic=dynamic), caches(20)
    expected = packed(given, growing=True)
    for position in range(20, 90):  # over the end of the first block of 64 tokens
        q, k, v = rows()
        pos = torch.tensor([position])
        out, *given = run(q, k, v, *given, pos)
        result, *expected = step(q, k, v, *expected, pos)
        torch.testing.assert_close(out, result, rtol=1e-4, atol=1e-5)
        for cache, other in zip(given, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            assert_same(cache, other.dequantize())
    assert counters["stats"]["unique_graphs"] <= 3  # of a plain cache, and of packed caches of one and of any length


def index_copied(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    return cache.index_copy(2, pos, x)


def scattered(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    return cache.scatter(2, pos.view(1, 1, -1, 1).expand(x.shape), x)


def slice_scattered(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    return cache.slice_scatter(x, 2, 3, 4)


def select_scattered(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    return cache.select_scatter(x.select(2, 0), 2, 3)


WRITES = (index_copied, scattered, slice_scattered, select_scattered)


@pytest.mark.parametrize("write", WRITES)
def test_a_cache_of_fixed_size_that_is_written_twice_alike_is_packed(write: Step) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
        out = attend(q, write(keys, k, pos), write(values, v, pos), torch.arange(MAX_LEN) <= pos[:, None])
        return out, write(keys, k, pos), write(values, v, pos)

    (q, k, v), given, pos = rows(), caches(MAX_LEN), torch.tensor([3])
    expected = step(q, k, v, *packed(given), pos)
    out, *found = compiled(step)(q, k, v, *given, pos)
    torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-5)
    for cache, other in zip(found, expected[1:], strict=True):
        assert isinstance(cache, PackedTensor)
        assert_same(cache, other.dequantize())


def test_attention_may_read_an_equal_copy_of_a_cache_that_the_step_writes_in_place() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        read = index_copied(keys, k, pos), index_copied(values, v, pos)
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        return attend(q, *read, torch.arange(MAX_LEN) <= pos[:, None])

    run, given = compiled(step), caches(MAX_LEN)
    expected = packed(given)
    for position in (0, 63, 64):
        q, k, v = rows()
        pos = torch.tensor([position])
        torch.testing.assert_close(run(q, k, v, *given, pos), step(q, k, v, *expected, pos), rtol=1e-4, atol=1e-5)
    for cache, other in zip(given, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert_same(cache, other.dequantize())


def test_a_returned_cache_is_independent_of_the_cache_that_was_passed_and_of_its_sibling() -> None:
    run, plain = compiled(grown_twice), caches(20)
    first = run(*rows(3), *plain, torch.arange(20, 23))[1:]
    held = [*plain, *first]
    before = [x.clone() for x in held]
    siblings = [run(*rows(), *first, torch.tensor([23]))[1:] for _ in range(2)]
    values_of = [cache.dequantize().clone() for cache in siblings[1]]
    for cache in siblings[0]:
        cache.zero_()
    for cache, other in zip([*siblings[1], *held], [*values_of, *before], strict=True):
        assert torch.equal(cache, other)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :, 1:], lambda x: x.mT], ids=["cache", "slice", "mT"])
def test_two_equal_caches_that_a_step_returns_are_two_tensors(view: Callable[[Tensor], Tensor]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        out = attend(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
        twice = [view(torch.cat([x, y], 2)) for x, y in ((keys, k), (values, v)) for _ in range(2)]
        return out, *twice

    (q, k, v), (keys, values) = rows(), caches(20)
    options = {"policy": FORMAT, "on_unsupported": "ignore"}
    with kvcompile.collect_reports() as report:
        found = torch.compile(step, backend="kvquant", options=options)(q, k, v, keys, values)[1:]
    for changed, equal in (found[:2], found[2:]):
        before = equal.clone()
        changed.zero_()
        assert torch.equal(equal, before)
    assert not any(site.rewritten for site in report.sites)


def test_a_write_of_other_tokens_is_not_an_equal_write() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        out = attend(q, torch.cat([keys, k], 2), torch.cat([values, v], 2))
        return out, torch.cat([keys, k * 2], 2), torch.cat([values, v], 2)

    (q, k, v), given = rows(), caches(20)
    options = {"policy": FORMAT, "on_unsupported": "ignore"}
    found = torch.compile(step, backend="kvquant", options=options)(q, k, v, *given)
    for one, other in zip(found, step(q, k, v, *given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_noise_in_both_writes_is_drawn_twice() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        read, returned = (torch.cat([keys, k + torch.rand_like(k)], 2) for _ in range(2))
        return attend(q, read, torch.cat([values, v], 2)), returned, (read - returned).abs().amax()

    (q, k, v), given = rows(), caches(20)
    options = {"policy": FORMAT, "on_unsupported": "ignore"}
    assert torch.compile(step, backend="kvquant", options=options)(q, k, v, *given)[2] > 0
