"""Another batch size gives the compiled step a symbolic size, and the caches are packed as for the first one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_steps import check_step, compiled_lossless
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

H, S, D = 2, 70, 64

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def place_of_each_sequence(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    rows = torch.arange(len(q))
    keys[rows, :, pos], values[rows, :, pos] = k[:, :, 0], v[:, :, 0]
    return F.scaled_dot_product_attention(q, keys, values, (torch.arange(S) <= pos[:, None])[:, None, None])


def places_of_each_sequence(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    rows, places = torch.arange(len(q))[:, None], pos[:, None]
    keys[rows, :, places], values[rows, :, places] = k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, keys, values, (torch.arange(S) <= pos[:, None])[:, None, None])


def heads_and_sequences_in_one_dimension(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Tensor:
    keys[:, pos[:1]], values[:, pos[:1]] = k.flatten(0, 1), v.flatten(0, 1)
    mask = torch.arange(S) <= pos[:1, None]
    return F.scaled_dot_product_attention(q.flatten(0, 1), keys, values, mask).view(q.shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("step", "dynamic"),
    [
        (place_of_each_sequence, None),
        (place_of_each_sequence, True),
        (places_of_each_sequence, None),
        (places_of_each_sequence, True),
        (heads_and_sequences_in_one_dimension, None),  # with True no size would tell heads from sequences
    ],
)
def test_caches_of_every_batch_size_are_packed(step: Step, dynamic: bool | None) -> None:
    is_merged = step is heads_and_sequences_in_one_dimension
    compiled = compiled_lossless(step, dynamic=dynamic)
    for batch in (1, 3, 4, 2):
        shape = (batch * H, S, D) if is_merged else (batch, H, S, D)
        plain = [torch.randn(shape) for _ in range(2)]
        packed = [cache.clone() for cache in plain]
        for first in (5, 62):
            new, pos = [torch.randn(batch, H, 1, D) for _ in range(3)], first + torch.arange(batch)
            check_step(compiled, step, new, packed, plain, pos)


@pytest.mark.parametrize("step", [place_of_each_sequence, places_of_each_sequence])
def test_a_batch_of_no_sequences_is_a_batch(step: Step) -> None:
    empty = [torch.zeros(0, H, n, D) for n in (1, 1, 1, S, S)]
    assert compiled_lossless(step)(*empty, torch.zeros(0, dtype=torch.int64)).shape == (0, H, 1, D)


def test_a_slice_to_the_end_does_not_limit_a_symbolic_size() -> None:
    """With heads and sequences in one dimension, one symbol must become a multiple of another."""

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys[:, pos], values[:, pos] = k.flatten(0, 1), v.flatten(0, 1)
        scores = q.flatten(0, 1) @ keys.transpose(1, 2) / D**0.5
        weights = scores.masked_fill(torch.arange(S) > pos[:, None], float("-inf")).softmax(-1)
        return (weights @ values).view(q.shape)

    compiled = compiled_lossless(step)
    for batch in (1, 3):
        plain = [torch.randn(batch * 4, S, D) for _ in range(2)]
        packed = [cache.clone() for cache in plain]
        for first, n in ((0, 5), (5, 1), (6, 3), (9, 1)):
            new, pos = [torch.randn(batch, 4, n, D) for _ in range(3)], torch.arange(first, first + n)
            check_step(compiled, step, new, packed, plain, pos)
