"""Writes through a view without a dimension are packed: of the only sequence or head, or of one of the sequences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_steps import LOSSLESS, check_step, compiled_lossless
from torch import Tensor

from kvcompile import last_report

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

H, S, D = 2, 70, 64

Write = Callable[[Tensor, Tensor, Tensor], object]
"""Writes the tokens ``x`` [H, n, D] at ``pos`` [n] of a cache that has one dimension of size 1."""

ONE_SEQUENCE: dict[str, Write] = {
    "index": lambda cache, pos, x: cache[0].index_copy_(1, pos, x),
    "index and positions": lambda cache, pos, x: cache[0, :].__setitem__((slice(None), pos), x),
    "all indices at once": lambda cache, pos, x: cache.__setitem__((0, slice(None), pos), x),
    "last index": lambda cache, pos, x: cache[-1].index_copy_(1, pos, x),
    "slice": lambda cache, pos, x: cache[0, :, 9 : 9 + x.shape[1]].copy_(x),
    "squeeze": lambda cache, pos, x: cache.squeeze(0).index_copy_(1, pos, x),
    "slice of a squeeze": lambda cache, pos, x: cache.squeeze(0)[:, 9 : 9 + x.shape[1]].copy_(x),
    "view": lambda cache, pos, x: cache.view(H, S, D).__setitem__((slice(None), pos), x),
    "heads and sequences merged": lambda cache, pos, x: cache.flatten(0, 1).index_copy_(1, pos, x),
    "scatter": lambda cache, pos, x: cache[0].scatter_(1, pos.view(1, -1, 1).expand(H, -1, D), x),
    "mask": lambda cache, pos, x: cache[0].index_copy_(1, pos, torch.where(x[:1, :, :1] > 0, x, cache[0, :, pos])),
    "unbind": lambda cache, pos, x: cache.unbind(0)[0].index_copy_(1, pos, x),
    "twice": lambda cache, pos, x: [cache[0].index_copy_(1, pos[i : i + 1], x[:, i : i + 1]) for i in (0, -1)],
}
ONE_HEAD: dict[str, Write] = {
    "index": lambda cache, pos, x: cache[:, 0].index_copy_(1, pos, x),
    "all indices at once": lambda cache, pos, x: cache.__setitem__((slice(None), 0, pos), x),
    "squeeze": lambda cache, pos, x: cache.squeeze(1).index_copy_(1, pos, x),
    "position of each sequence": lambda cache, pos, x: cache.squeeze(1).__setitem__(
        (torch.arange(len(x))[:, None], pos.expand(len(x), -1)), x
    ),
}


EACH_SEQUENCE: dict[str, Write] = {
    "in order": lambda cache, pos, x: [cache[i].index_copy_(1, pos[i], x[i]) for i in range(len(x))],
    "from the last": lambda cache, pos, x: [
        cache[-i - 1].index_copy_(1, pos[-i - 1], x[-i - 1]) for i in range(len(x))
    ],
    "assignments": lambda cache, pos, x: [cache.__setitem__((i, slice(None), pos[i]), x[i]) for i in range(len(x))],
    "all but the first": lambda cache, pos, x: [cache[i].index_copy_(1, pos[i], x[i]) for i in (1, 2)],
}


def step_with(write: Write) -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        write(keys, pos, k.flatten(0, 1)), write(values, pos, v.flatten(0, 1))
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(S) <= pos[:, None])

    return step


def check(write: Write, shape: tuple[int, int]) -> None:
    """Two steps, the second of which begins with packed caches, compute what eager code computes on plain ones."""
    step = step_with(write)
    compiled = compiled_lossless(step)
    plain = [torch.randn(*shape, S, D) for _ in range(2)]
    packed = [cache.clone() for cache in plain]
    for first, n in ((9, 3), (12, 1)):
        new, pos = [torch.randn(*shape, n, D) for _ in range(3)], torch.arange(first, first + n)
        check_step(compiled, step, new, packed, plain, pos)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ONE_SEQUENCE)
def test_writes_to_the_only_sequence_are_packed(form: str) -> None:
    check(ONE_SEQUENCE[form], (1, H))


@pytest.mark.parametrize("form", ONE_HEAD)
def test_writes_to_the_only_head_are_packed(form: str) -> None:
    check(ONE_HEAD[form], (2, 1))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", EACH_SEQUENCE)
def test_writes_to_one_sequence_after_the_other_are_packed(form: str) -> None:
    write = EACH_SEQUENCE[form]

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        write(keys, pos, k), write(values, pos, v)
        visible = torch.arange(S) <= pos[:, :, None]
        return F.scaled_dot_product_attention(q, keys, values, visible[:, None])

    compiled = compiled_lossless(step)
    plain = [torch.randn(3, H, S, D) for _ in range(2)]
    packed = [cache.clone() for cache in plain]
    for n in (3, 1):
        new, pos = [torch.randn(3, H, n, D) for _ in range(3)], torch.tensor([[5], [63], [0]]) + torch.arange(n)
        check_step(compiled, step, new, packed, plain, pos)


def moved_to_values(keys: Tensor, values: Tensor, pos: Tensor, k: Tensor) -> None:
    values[0] = keys[0].index_copy(1, pos, k[0])


def moved_to_another_sequence(keys: Tensor, values: Tensor, pos: Tensor, k: Tensor) -> None:
    keys[0] = keys[1].index_copy(1, pos, k[0])
    values.index_copy_(2, pos, k)


def one_of_several_heads(keys: Tensor, values: Tensor, pos: Tensor, k: Tensor) -> None:
    keys[:, 1].index_copy_(1, pos, k[:, 1])
    values.index_copy_(2, pos, k)


@pytest.mark.parametrize(
    ("write", "batch"), [(moved_to_values, 1), (moved_to_another_sequence, 2), (one_of_several_heads, 2)]
)
def test_a_part_that_is_put_in_another_place_and_one_of_several_heads_stay_plain(
    write: Callable[..., None], batch: int
) -> None:
    def step(q: Tensor, k: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        write(keys, values, pos, k)
        return F.scaled_dot_product_attention(q, keys, values, torch.arange(S) <= pos[:, None])

    caches = [torch.randn(batch, H, S, D) for _ in range(2)]
    q, k = torch.randn(2, batch, H, 1, D)
    pos = torch.tensor([9])
    expected = step(q, k, *(cache.clone() for cache in caches), pos)
    compiled = torch.compile(step, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "ignore"})
    torch.testing.assert_close(compiled(q, k, *caches, pos), expected)
    assert last_report().totals.packed_layers == 0
