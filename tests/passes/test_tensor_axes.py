"""Views between any layout of named axes and four dimensions put every element in its place, and lead back."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kvcompile.passes.mark.axes import Axis, Layout, Step, axes_of, rearrange, regroup

SIZES = {"b": 2, "h": 3, "g": 5, "q": 7, "k": 1, "d": 11}
SLOTS = (("b",), ("h", "g"), ("q",), ("k", "d"))


def numbered(names: list[str]) -> Tensor:
    return torch.arange(math.prod(SIZES[name] for name in names)).reshape([SIZES[name] for name in names])


def apply(x: Tensor, steps: tuple[Step, ...]) -> Tensor:
    for step in steps:
        x = getattr(x, step.method)(*step.args)
    return x


def random_layout(rng: random.Random) -> tuple[list[str], Layout]:
    """Some axes in random order, with neighbours merged at random and dimensions of size 1 in between."""
    names = rng.sample(list(SIZES), rng.randint(1, len(SIZES)))
    dims: list[list[Axis]] = []
    for name in names:
        if not dims or rng.random() < 0.6:
            dims.extend([] for _ in range(rng.choice([0, 0, 1])))
            dims.append([])
        dims[-1].append(Axis(name, SIZES[name]))
    return names, tuple(axes_of(*dim) for dim in dims)


@pytest.mark.parametrize("seed", range(80))
def test_any_layout_is_brought_to_its_dimensions_and_back(seed: int) -> None:
    names, layout = random_layout(random.Random(seed))
    x = numbered(names)
    given = x.reshape([math.prod(axis.size for axis in dim) for dim in layout])
    found = rearrange(layout, SLOTS)
    assert found is not None
    wanted = [name for slot in SLOTS for name in slot if name in names]
    shape = [math.prod(SIZES[name] for name in slot if name in names) for slot in SLOTS]
    expected = x.permute([names.index(name) for name in wanted]).reshape(shape)
    result = apply(given, found.steps)
    assert torch.equal(result, expected)
    assert torch.equal(apply(result, found.back), given)


def test_a_tensor_that_has_its_dimensions_already_is_not_changed() -> None:
    layout = ((Axis("b", 2),), (Axis("h", 3), Axis("g", 5)), (), (Axis("d", 11),))
    assert rearrange(layout, SLOTS).steps == ()


def test_an_axis_without_a_dimension_cannot_be_placed() -> None:
    assert rearrange(((Axis("x", 4),),), SLOTS) is None


@pytest.mark.parametrize("seed", range(30))
def test_a_reshape_regroups_the_axes_or_splits_one(seed: int) -> None:
    rng = random.Random(seed)
    _, layout = random_layout(rng)
    merged = [axis for dim in layout for axis in dim]
    cuts = sorted(rng.sample(range(1, len(merged)), rng.randint(0, len(merged) - 1))) if merged else []
    groups = [merged[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(merged)], strict=True)]
    shape = torch.Size(math.prod(axis.size for axis in group) for group in groups)
    assert regroup(layout, shape) == tuple(tuple(group) for group in groups)
    assert regroup(layout, torch.Size([*shape, 1])) == (*(tuple(group) for group in groups), ())
    assert regroup(layout, torch.Size([*shape, 13])) is None
