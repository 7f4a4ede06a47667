"""The check of a rewrite draws integers that the graph allows, and accepts only rounding as a difference of tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.verification.differences import difference
from kvcompile.verification.drawing import CannotDraw, InputDraws, KnownInput
from kvcompile.verification.sizes import Sizes

CACHE = torch.zeros(2, 40, 8)


def draws(function: Callable[..., Any], *args: Tensor, weights: tuple[int, ...] = (), seed: int = 0) -> InputDraws:
    traced = make_fx(function, tracing_mode="fake")(*args)
    fakes = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    known = [KnownInput(arg, place in weights) for place, arg in enumerate(args)]
    return InputDraws(traced, fakes, known, Sizes(fakes), seed)


def all_of(drawn: InputDraws, place: int, count: int = 40) -> Tensor:
    return torch.stack([drawn.draw({}, {})[place] for _ in range(count)])


def write(cache: Tensor, pos: Tensor) -> Tensor:
    return torch.index_put(cache, (torch.arange(2)[:, None], pos), torch.ones(()))


def test_positions_are_within_the_cache_and_distinct_within_a_sequence() -> None:
    positions = all_of(draws(write, CACHE, torch.zeros(2, 3, dtype=torch.int64)), 1)
    assert positions.min() >= 0
    assert positions.max() < 40
    assert positions.max() > 20, "large positions occur, too"
    assert all(row.unique().numel() == 3 for row in positions.flatten(0, 1))


def test_numbers_computed_from_an_integer_are_within_bounds_too() -> None:
    def paged(pool: Tensor, table: Tensor, pos: Tensor) -> Tensor:
        slot = table.gather(1, pos // 8) * 8 + pos % 8
        return pool.index_select(0, slot.flatten())

    table, pos = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)
    drawn = draws(paged, torch.zeros(12 * 8, 4), table, pos)
    draws_of_both = [drawn.draw({}, {})[1:] for _ in range(40)]
    slots = torch.cat([table.gather(1, pos // 8) * 8 + pos % 8 for table, pos in draws_of_both])
    assert 0 <= slots.min() < 8
    assert 64 < slots.max() < 96
    assert max(int(pos.max()) for _, pos in draws_of_both) > 8, "other blocks than the first occur"


def test_weights_and_the_first_integers_come_from_the_call() -> None:
    pos = torch.tensor([[3, 4, 5], [7, 8, 9]])
    drawn = draws(write, CACHE, pos, weights=(0,))
    cache, first = drawn.draw({}, {}, as_given=True)
    assert cache is CACHE
    assert torch.equal(first, pos)
    assert not torch.equal(all_of(drawn, 1, 5)[1], all_of(drawn, 1, 5)[2])


def test_masks_show_the_first_token() -> None:
    masks = all_of(draws(lambda x, mask: x.masked_fill(mask, 0), torch.zeros(5, 9), torch.ones(5, 9).bool()), 1)
    assert masks[..., 0].all()
    assert not masks.all()


def test_an_index_that_is_always_out_of_bounds_cannot_be_drawn() -> None:
    with pytest.raises(CannotDraw, match="out of bounds"):
        draws(lambda x, i: x[i + 100], CACHE, torch.zeros(2, dtype=torch.int64)).draw({}, {})


def test_the_draw_changes_no_input_that_is_kept() -> None:
    def counted(cache: Tensor, count: Tensor) -> Tensor:
        count.copy_(count + 1)
        return cache.index_select(1, count[None])

    drawn = draws(counted, CACHE, torch.tensor(3))
    count = torch.tensor(7)
    assert drawn.draw({}, {1: count})[1] is count
    assert count == 7


def test_sizes_that_no_guard_forbids_are_drawn() -> None:
    traced = make_fx(lambda x: x * 2 if x.shape[0] > 3 else x, tracing_mode="symbolic")(torch.zeros(9, 4))
    (fake,) = [node.meta["val"] for node in traced.graph.find_nodes(op="placeholder")]
    sizes, rng = Sizes([fake]), random.Random(0)
    drawn = {sizes(fake.shape[0], sizes.drawn(rng)) for _ in range(30)}
    assert len(drawn) > 3
    assert min(drawn) > 3
    assert sizes.matching(fake.shape[:1], (11,)) == {fake.shape[0].node.expr: 11}
    assert sizes.matching([3, 4], (3, 5)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_difference_and_one_token_of_many_is(dtype: torch.dtype) -> None:
    values = torch.randn(3, 100, 64)
    weights = torch.softmax(torch.randn(3, 1, 100), -1)
    one = (weights @ values).to(dtype)
    assert difference(one, (weights.double() @ values.double()).to(dtype)) is None
    assert difference(one, (weights.roll(1, -1) @ values).to(dtype)) is not None
    weights[..., 50] = 0
    assert difference(one, (weights / weights.sum(-1, keepdim=True) @ values * 1.2).to(dtype)) is not None


def test_values_that_are_not_finite_must_be_equal() -> None:
    x = torch.tensor([[1.0, torch.nan, torch.inf]])
    assert difference(x, x.clone()) is None
    assert "1 of 3 numbers differ" in str(difference(x, torch.tensor([[1.0, 0.0, torch.inf]])))
    assert "1 of 3 numbers differ" in str(difference(x, torch.tensor([[1.0, torch.nan, -torch.inf]])))


def test_integers_shapes_and_dtypes_must_be_equal() -> None:
    assert difference(torch.tensor(3), torch.tensor(4)) == "1 of 1 numbers differ, the first at []: 3, expected 4"
    assert "[2], expected" in str(difference(torch.zeros(2), torch.zeros(3)))
    assert "float16" in str(difference(torch.zeros(2), torch.zeros(2).half()))
    assert difference(None, torch.zeros(2)) is not None
    assert difference(3, 3) is None


def test_sizes_for_which_the_original_graph_fails_cannot_be_drawn() -> None:
    drawn = draws(lambda x, pos: x.index_select(0, pos.view(3)), torch.zeros(9, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(CannotDraw, match=r"the original graph fails with .*: shape '\[3\]' is invalid"):
        drawn.draw({}, {1: torch.zeros(4, dtype=torch.int64)})
