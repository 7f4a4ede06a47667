"""Attention on old tokens joined with new ones is packed if the graph also writes the new ones behind the old ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

B, H, S, D = 2, 2, 70, 64
LOSSLESS = {"default": {"dtype": "float32"}}

Read = Callable[[Tensor, Tensor, int], Tensor]
"""Writes the tokens ``x`` from ``start`` on, and returns the keys or values for attention."""


def write(cache: Tensor, x: Tensor, start: int, dim: int = 2) -> None:
    cache.narrow(dim, start, x.shape[dim]).copy_(x)


def joined_before_the_write(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([cache[:, :, :start], x], 2)
    cache[:, :, start : start + x.shape[2]] = x
    return joined


def joined_after_the_write(cache: Tensor, x: Tensor, start: int) -> Tensor:
    cache[:, :, start : start + x.shape[2]] = x
    return torch.cat([cache[:, :, :start], x], 2)


def joined_in_another_order(cache: Tensor, x: Tensor, start: int) -> Tensor:
    """The cache is [batch, tokens, heads, head_dim]."""
    rows = x.transpose(1, 2)
    joined = torch.cat([cache[:, :start], rows], 1)
    write(cache, rows, start, 1)
    return joined.transpose(1, 2)


def step_with(read: Read) -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        return F.scaled_dot_product_attention(q, read(keys, k, start), read(values, v, start))

    return step


@pytest.mark.sampled(2)
@pytest.mark.parametrize("read", [joined_before_the_write, joined_after_the_write, joined_in_another_order])
@pytest.mark.parametrize("dynamic", [False, None])
def test_joined_tokens_are_read_from_the_packed_cache(read: Read, dynamic: bool | None) -> None:
    step = step_with(read)
    options = {"policy": LOSSLESS, "on_unsupported": "error"}
    compiled = torch.compile(step, backend="kvquant", options=options, dynamic=dynamic)
    shape = (B, S, H, D) if read is joined_in_another_order else (B, H, S, D)
    plain = [torch.randn(shape) for _ in range(2)]
    packed = [cache.clone() for cache in plain]
    for start, n in ((1, 4), (5, 1), (6, 1), (7, 1), (63, 2), (65, 5)):
        new = [torch.randn(B, H, n, D) for _ in range(3)]
        torch.testing.assert_close(compiled(*new, *packed, start), step(*new, *plain, start))
        for cache, expected in zip(packed, plain, strict=True):
            assert isinstance(cache, PackedTensor)
            assert torch.equal(cache.dequantize(), expected)


def of_other_tokens(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([cache[:, :, :start], 2 * x], 2)
    write(cache, x, start)
    return joined


def of_another_place(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([cache[:, :, :start], x], 2)
    write(cache, x, start + 1)
    return joined


def of_later_tokens(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([cache[:, :, 1:start], x], 2)
    write(cache, x, start)
    return joined


def before_the_old_ones(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([x, cache[:, :, :start]], 2)
    write(cache, x, start)
    return joined


def of_one_token_for_several(cache: Tensor, x: Tensor, start: int) -> Tensor:
    joined = torch.cat([cache[:, :, :start], x], 2)
    cache[:, :, start : start + 2] = x
    return joined


@pytest.mark.parametrize(
    "read", [of_other_tokens, of_another_place, of_later_tokens, before_the_old_ones, of_one_token_for_several]
)
def test_other_joined_tokens_stay_plain(read: Read) -> None:
    step = step_with(read)
    compiled = torch.compile(step, backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "ignore"})
    plain = [torch.randn(B, H, S, D) for _ in range(2)]
    other = [cache.clone() for cache in plain]
    for start in (3, 4, 5):
        new = [torch.randn(B, H, 1, D) for _ in range(3)]
        torch.testing.assert_close(compiled(*new, *other, start), step(*new, *plain, start))
    assert all(torch.equal(cache, expected) for cache, expected in zip(other, plain, strict=True))
    assert last_report().totals.packed_layers == 0
