"""Writes that name all heads by an index are packed, in every order of the indices and of the cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_steps import check_step, compiled_lossless
from torch import Tensor

from kvcompile import last_report

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

S, D = 70, 64

Write = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the tokens ``x`` [B, H, n, D] at ``pos`` [n] of a cache."""


def sequences(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def heads(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def all_indices(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[sequences(x)[:, None, None], heads(x)[:, None], pos] = x


def positions_of_each_sequence(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    places = pos + 2 * sequences(x)[:, None, None]
    cache[sequences(x)[:, None, None], heads(x)[:, None], places] = x


def positions_before_heads(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[sequences(x)[:, None, None], heads(x), pos[:, None]] = x.transpose(1, 2)


def heads_before_sequences(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[sequences(x)[:, None], heads(x)[:, None, None], pos] = x.transpose(0, 1)


def a_grid(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[torch.meshgrid(sequences(x), heads(x), pos, indexing="ij")] = x


def expanded_indices(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    size = x.shape[:3]
    cache[sequences(x)[:, None, None].expand(size), heads(x)[None, :, None].expand(size), pos.expand(size)] = x


def heads_and_positions(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, heads(x)[:, None], pos] = x


def a_value_that_broadcasts(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, heads(x)[:, None], pos] = x[:1, :, :, :1]


def the_same_position_of_all(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, heads(x), pos[:1]] = x[:, :, 0]


def one_position_of_each_sequence(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[sequences(x)[:, None], heads(x), pos[:1] + sequences(x)[:, None]] = x[:, :, 0]


def some_values_put_back(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    at = sequences(x)[:, None, None], heads(x)[:, None], pos
    cache[at] = torch.where((pos % 2 == 0)[:, None], x, cache[at])


def tokens_first(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, pos[:, None], heads(x)] = x.transpose(1, 2)


def tokens_first_and_sequences(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[sequences(x)[:, None, None], pos[:, None], heads(x)] = x.transpose(1, 2)


HEADS_FIRST = [
    all_indices,
    positions_of_each_sequence,
    positions_before_heads,
    heads_before_sequences,
    a_grid,
    expanded_indices,
    heads_and_positions,
    a_value_that_broadcasts,
    the_same_position_of_all,
    one_position_of_each_sequence,
    some_values_put_back,
]
TOKENS_FIRST = [tokens_first, tokens_first_and_sequences]


def check(write: Write, batch: int, num_heads: int, *, by_tokens: bool) -> None:
    """Two steps, the second of which begins with packed caches, compute what eager code computes on plain ones."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        write(keys, pos, k), write(values, pos, v)
        if by_tokens:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(S) <= pos[:, None])

    compiled = compiled_lossless(step)
    shape = (batch, S, num_heads, D) if by_tokens else (batch, num_heads, S, D)
    plain = [torch.randn(*shape) for _ in range(2)]
    packed = [cache.clone() for cache in plain]
    for first, n in ((9, 3), (12, 1)):
        new, pos = [torch.randn(batch, num_heads, n, D) for _ in range(3)], torch.arange(first, first + n)
        check_step(compiled, step, new, packed, plain, pos)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", [(2, 3), (1, 3), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("write", HEADS_FIRST)
def test_an_index_of_all_heads_is_a_slice(write: Write, size: tuple[int, int]) -> None:
    check(write, *size, by_tokens=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [(2, 3), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("write", TOKENS_FIRST)
def test_an_index_of_all_heads_may_follow_positions(write: Write, size: tuple[int, int]) -> None:
    check(write, *size, by_tokens=True)


def heads_in_another_order(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, torch.arange(x.shape[1]).flip(0)[:, None], pos] = x


def positions_of_each_head(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, heads(x)[:, None], pos + heads(x)[:, None]] = x


def some_heads(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, torch.arange(2)[:, None], pos] = x[:, :2]


def repeated_heads(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    twice = torch.arange(3)[:, None].expand(3, 2).reshape(6)[:3]  # 0, 0, 1
    cache[:, twice[:, None], pos] = x[:, twice]


def some_channels(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    channels = torch.arange(0, D, 2)
    cache[:, :, pos[:, None], channels] = x[..., channels]


def tokens_of_a_mask(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, :, torch.arange(S) == 9] = x[:, :, :1]


def head_by_head(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    for sequence in range(x.shape[0]):
        for head in range(x.shape[1]):
            cache[sequence, head, pos] = x[sequence, head]


def a_slice_of_heads(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, :2, 9:11] = x[:, :2]


def every_second_token(cache: Tensor, pos: Tensor, x: Tensor) -> None:
    cache[:, :, 9:13:2] = x


NOT_ALL_HEADS = "the index of heads does not count all of them in order"
REFUSED: dict[Write, str] = {
    heads_in_another_order: NOT_ALL_HEADS,
    some_heads: NOT_ALL_HEADS,
    repeated_heads: NOT_ALL_HEADS,
    positions_of_each_head: "the index of tokens varies with the index of heads",
    some_channels: "it indexes channels",
    tokens_of_a_mask: "the index of tokens is a mask",
    head_by_head: "it writes one of the heads",
    a_slice_of_heads: "it writes some of the heads",
    every_second_token: "it writes tokens that are not neighbours",
}


@pytest.mark.parametrize(("write", "reason"), REFUSED.items())
def test_the_reason_of_a_refused_index_names_its_dimension(write: Write, reason: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        write(keys, pos, k), write(values, pos, v)
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(S) <= pos[:, None])

    new, plain = [torch.randn(2, 3, 2, D) for _ in range(3)], [torch.randn(2, 3, S, D) for _ in range(2)]
    caches, pos = [cache.clone() for cache in plain], torch.arange(9, 11)
    out = torch.compile(step, backend="kvquant")(*new, *caches, pos)
    torch.testing.assert_close(out, step(*new, *plain, pos))
    assert reason in last_report().sites[0].reason
