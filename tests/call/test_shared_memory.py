"""Packed inputs of a compiled graph may share memory, unless the graph writes the shared part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.call.shared_memory import check_distinct, shares_plain_part
from kvcompile.errors import AliasedCacheError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, HEAD_DIM = 2, 2, 64
Views = Callable[[Tensor], tuple[Tensor, Tensor]]

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def packed(
    role: str = "key", tokens: int = 192, name: str = "int8_per_token_head", *, growing: bool = False
) -> PackedTensor:
    x = torch.randn(BATCH, HEADS, tokens, HEAD_DIM)
    return PackedTensor.from_dense(x, PackedLayout.parse(name, role, HEAD_DIM), growing=growing)


DISJOINT: dict[str, Views] = {
    "two caches": lambda cache: (cache, cache.clone()),
    "sequences": lambda cache: (cache[:1], cache[1:]),
    "heads": lambda cache: (cache[:, :1], cache[:, 1:]),
    "blocks of tokens": lambda cache: (cache[:, :, :64], cache[:, :, 64:]),
    "tokens of one block": lambda cache: (cache[:, :, :70], cache[:, :, 70:]),
    "heads in another order of dimensions": lambda cache: (cache[:, 0], cache.transpose(1, 2)[:, :, 1:]),
    "no tokens": lambda cache: (cache, cache[:, :, 5:5]),
}
OVERLAPPING: dict[str, Views] = {
    "a cache and itself": lambda cache: (cache, cache.view(cache.shape)),
    "a cache and its first tokens": lambda cache: (cache, cache[:, :, :10]),
    "a cache and its last tokens": lambda cache: (cache, cache[:, :, -10:]),
    "tokens that both views have": lambda cache: (cache[:, :, :128], cache[:, :, 64:]),
    "a head and a sequence": lambda cache: (cache[:, 0], cache[1]),
    "every second head and the first": lambda cache: (cache[:, ::2], cache[:, :1]),
}


def both_ways(one: Tensor, other: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    return [([one], [other]), ([other], [one]), ([one, other], [])]


@pytest.mark.parametrize("views", DISJOINT.values(), ids=DISJOINT.keys())
def test_disjoint_views_of_one_cache_may_be_written(views: Views) -> None:
    for written, read in both_ways(*views(packed())):
        check_distinct(written, read)


@pytest.mark.parametrize("views", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_overlapping_views_may_be_read_and_not_written(views: Views) -> None:
    one, other = views(packed())
    check_distinct([], [one, other])
    for written, read in both_ways(one, other):
        with pytest.raises(AliasedCacheError, match="share their storage"):
            check_distinct(written, read)


def test_tokens_that_share_a_residual_are_not_disjoint() -> None:
    cache = packed(name="int8_per_token_head[recent=1,sinks=0,float32]")
    with pytest.raises(AliasedCacheError):
        check_distinct([cache[:, :, :64]], [cache[:, :, 64:]])
    check_distinct([cache[:1]], [cache[1:]])


def test_a_growing_cache_that_is_written_leaves_the_storage_of_the_caches_that_it_continues() -> None:
    cache = packed(tokens=70, growing=True)
    longer = torch.cat([cache, torch.randn(BATCH, HEADS, 1, HEAD_DIM)], 2)
    check_distinct([cache], [longer])
    with pytest.raises(AliasedCacheError):
        check_distinct([cache], [cache[:, :, :5]])


def compiled(step: Callable[..., Any]) -> Any:
    options = {"policy": "int8_per_token_head", "on_unsupported": "ignore"}
    return torch.compile(step, backend="kvquant", options=options)


def attend(q: Tensor, x: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, x)
    values.index_copy_(2, pos, x)
    return F.scaled_dot_product_attention(q, keys, values)


def attend_and_write_what_is_viewed(
    cache: Tensor, view: Tensor, q: Tensor, x: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> tuple[Tensor, Tensor]:
    """No attention reads ``cache``, so the graph takes the dequantized values of the cache and of its view."""
    cache.index_copy_(2, pos, x)
    read = view.sum(-1)
    return attend(q, x, keys, values, pos), read


def arguments() -> list[Tensor]:
    q, x = torch.randn(2, BATCH, HEADS, 1, HEAD_DIM).unbind()
    return [q, x, packed(), packed("value"), torch.tensor([5])]


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_whose_values_a_graph_takes_may_not_be_written_beside_a_view_of_it() -> None:
    cache = packed()
    with pytest.raises(AliasedCacheError, match="share their storage"):
        compiled(attend_and_write_what_is_viewed)(cache, cache[:, :, :10], *arguments())


@pytest.mark.usefixtures("without_code_generation")
def test_a_cache_whose_values_a_graph_takes_may_be_written_beside_other_tokens_of_it() -> None:
    cache = packed()
    expected, args = cache.clone(), arguments()
    _, expected_read = attend_and_write_what_is_viewed(expected[:, :, :70], expected[:, :, 70:], *copy.deepcopy(args))
    _, read = compiled(attend_and_write_what_is_viewed)(cache[:, :, :70], cache[:, :, 70:], *args)
    assert [site.reason_code for site in last_report().sites] == [None]
    torch.testing.assert_close(read, expected_read)
    assert torch.equal(cache.packed, expected.packed)


@pytest.mark.usefixtures("without_code_generation")
def test_views_that_both_are_written_may_not_overlap() -> None:
    def step(q: Tensor, x: Tensor, keys: Tensor, values: Tensor, other: Tensor, more: Tensor, pos: Tensor) -> Any:
        return attend(q, x, keys, values, pos), attend(q, 2 * x, other, more, pos)

    q, x, keys, values, pos = arguments()
    run = compiled(step)
    with pytest.raises(AliasedCacheError, match="share their storage"):
        run(q, x, keys[:, :, :128], values[:, :, :128], keys[:, :, 64:], values[:, :, 64:], pos)
    run(q, x, keys[:, :, :128], values[:, :, :128], packed(tokens=128), packed("value", 128), pos)
    assert [site.reason_code for site in last_report().sites] == [None, None]


class TestPlainPartsOfAStack:
    """A stack of two layers, of which the first stays plain. AOTAutograd sees the stack as one tensor."""

    @staticmethod
    def policy() -> dict[str, Any]:
        return {"rules": [{"match": {"layers": "0"}, "dtype": "auto"}], "default": {"dtype": "float32"}}

    @staticmethod
    def step(cache: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        for layer in range(2):
            cache[layer, 0, :, :, pos] = k * (layer + 1)
            cache[layer, 1, :, :, pos] = v
            mask = torch.arange(cache.shape[4]) <= pos[:, None]
            q = q + F.scaled_dot_product_attention(q, cache[layer, 0], cache[layer, 1], attn_mask=mask)
        return q

    def around(self, cache: Tensor, other: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        before = other.sum(-1)
        return self.step(cache, *args), before, other.sum(-1)

    def without_attention(self, cache: Tensor, other: Tensor, *args: Tensor) -> tuple[Tensor, ...]:
        return self.around(cache, other, *args)[1:]

    @staticmethod
    def arguments(pos: int) -> list[Tensor]:
        return [*(torch.randn(1, HEADS, 1, HEAD_DIM) for _ in range(3)), torch.tensor([pos])]

    def packed_stack(self) -> Tensor:
        cache = torch.zeros(2, 2, 1, HEADS, 64, HEAD_DIM)
        torch.compile(self.step, backend="kvquant", options={"policy": self.policy()})(cache, *self.arguments(0))
        assert isinstance(cache, PackedStack)
        return cache

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        options = {"policy": self.policy(), "on_unsupported": "ignore"}
        return torch.compile(function, backend="kvquant", options=options)

    @pytest.mark.parametrize("view", [lambda c: c[0, 0], lambda c: c[0]], ids=["a tensor", "a stack"])
    def test_a_graph_that_writes_a_part_does_not_take_it_twice(self, view: Callable[[Tensor], Tensor]) -> None:
        cache = self.packed_stack()
        with pytest.raises(AliasedCacheError, match="share their storage"):
            self.compiled(self.around)(cache, view(cache), *self.arguments(1))

    @pytest.mark.parametrize("view", [lambda c: c[0, 0], lambda c: c[0]], ids=["a tensor", "a stack"])
    def test_a_graph_that_packs_nothing_runs_rightly(self, view: Callable[[Tensor], Tensor]) -> None:
        cache, compiled = self.packed_stack(), self.compiled(self.without_attention)
        for pos in (1, 2):
            args = self.arguments(pos)
            other = view(cache)
            before, after = compiled(cache, other, *args)
            torch.testing.assert_close(after, other.sum(-1))
            assert not torch.equal(before, after)

    def test_only_an_argument_that_shares_a_plain_part_makes_a_call_run_eagerly(self) -> None:
        cache, qkv = self.packed_stack(), torch.randn(3, 1, HEADS, 1, HEAD_DIM)
        assert not shares_plain_part([cache, *qkv, torch.empty(0), torch.empty(0), 5])
        assert not shares_plain_part([cache, cache[1]])  # a packed layer
        for other in (cache[0, 0], cache[0], cache[0, 1][..., :3]):
            assert shares_plain_part([cache, other])

    def test_a_copy_of_a_part_is_no_part(self) -> None:
        cache, args = self.packed_stack(), self.arguments(1)
        copied = cache[0, 0].clone()
        expected = self.around(cache.clone().dequantize(), copied, *args)
        torch.testing.assert_close(self.compiled(self.around)(cache, copied, *args), expected)
