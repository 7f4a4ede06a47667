"""A stack of packed caches in ranges of channels reads like the plain tensor, and a write to it writes its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_caches import INT8, quantized, values
from stack_forms import check_is_saved_and_loaded, plain, save_and_load
from torch import Tensor

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")

WIDTH = INT8.head_dim
LOSSLESS = PackedLayout("float32", "value", WIDTH)


def packed(x: Tensor, layout: PackedLayout = INT8) -> PackedRanges:
    """Three ranges of ``x`` [batch, heads, tokens, 3 * WIDTH]: a plain one between two packed ones."""
    layouts = {(0,): (layout, "bhtd"), (2,): (layout, "bhtd")}
    return PackedRanges.of(PackedStack.from_dense(x.unflatten(-1, (3, WIDTH)), layouts, (3,)))


def rounded(x: Tensor) -> Tensor:
    """``x`` with the values of ``packed(x)``."""
    first, second, third = x.chunk(3, -1)
    return torch.cat([quantized(first, INT8), second, quantized(third, INT8)], -1)


def ranges() -> tuple[PackedRanges, Tensor]:
    x = values(2, 2, 70, 3 * WIDTH)
    return packed(x), rounded(x)


SELECTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a packed range": lambda c: c[..., :WIDTH],
    "a plain range": lambda c: c[..., WIDTH : 2 * WIDTH],
    "the last range": lambda c: c.split(WIDTH, -1)[-1],
    "chunk": lambda c: c.chunk(3, -1)[2],
    "sizes": lambda c: c.split((WIDTH, 2 * WIDTH), -1)[0],
    "two ranges": lambda c: c[..., WIDTH:],
    "part of a range": lambda c: c[..., 3:9],
    "parts of two ranges": lambda c: c[..., WIDTH - 3 : WIDTH + 3],
    "every other channel": lambda c: c[..., ::2],
    "no channel": lambda c: c[..., 3 * WIDTH :],
    "a channel": lambda c: c[..., 5],
    "tokens": lambda c: c[:, :, 3:9],
    "tokens of a range": lambda c: c[:, :, 3:9, 2 * WIDTH :],
    "a head": lambda c: c[:, 1],
    "a sequence": lambda c: c[-1],
    "beams": lambda c: c.index_select(0, torch.tensor([1, 1])),
    "indexed tokens": lambda c: c[:, :, torch.tensor([3, 1])],
    "indexed channels": lambda c: c[..., torch.tensor([3, WIDTH])],
    "another shape": lambda c: c.view(2, 2, 70, 3, WIDTH),
    "merged heads": lambda c: c.transpose(1, 2).reshape(2, 70, -1),
    "tokens first": lambda c: c.permute(2, 0, 1, 3)[3],
    "channels first": lambda c: c.permute(3, 0, 1, 2)[:WIDTH],
    "a copy": lambda c: c.clone(),
    "deepcopy": copy.deepcopy,
    "longer": lambda c: torch.cat([c, c[:, :, :3]], 2),
    "wider": lambda c: torch.cat([c, c[..., :3]], 3),
    "another dtype": lambda c: c.to(torch.float64),
    "a sum": lambda c: c + 1,
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS.keys())
def test_ranges_read_as_the_plain_tensor(select: Callable[[Tensor], Tensor]) -> None:
    cache, expected = ranges()
    result = plain(select(cache))
    assert result.dtype == select(expected).dtype
    torch.testing.assert_close(result + 0, select(expected), rtol=0, atol=0)


def test_a_slice_of_one_range_is_a_view_of_its_cache() -> None:
    cache, expected = ranges()
    first, second, _ = cache.split(WIDTH, -1)
    assert (type(first), type(second)) == (PackedTensor, Tensor)
    first[:, :, 5] = 0
    second[:, :, 6] = 0
    expected[:, :, 5, :WIDTH] = 0
    expected[:, :, 6, WIDTH : 2 * WIDTH] = 0
    assert torch.equal(cache.dequantize(), expected)


@pytest.mark.parametrize(
    "select",
    [
        lambda c: c[..., WIDTH:],
        lambda c: c.clone(),
        lambda c: c[:, :1],
        lambda c: c.transpose(0, 1),
        lambda c: torch.cat([c, values(2, 2, 1, 3 * WIDTH)], 2),
    ],
)
def test_views_and_copies_of_several_ranges_are_packed(select: Callable[[Tensor], Tensor]) -> None:
    cache, _ = ranges()
    result = select(cache)
    assert isinstance(result, PackedRanges)
    assert any(isinstance(part, PackedTensor) for part in result.parts)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "indexed tokens": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([4, 66])), x),
    "one row for all": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([4])), x[0, 0, :1]),
    "a number for each token": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([4, 5])), x[..., :1]),
    "a number": lambda c, x: c.__setitem__((slice(None), slice(None), torch.tensor([4, 5])), x.new_tensor(2.0)),
    "index_copy": lambda c, x: c.index_copy_(2, torch.tensor([69, 0]), x),
    "tokens": lambda c, x: c[:, :, 3:5].copy_(x),
    "a range": lambda c, x: c[:, :, 3:5, :WIDTH].copy_(x[..., :WIDTH]),
    "two ranges": lambda c, x: c[..., WIDTH:][:, :, 3:5].copy_(x[..., WIDTH:]),
    "per sequence": lambda c, x: c.__setitem__((torch.arange(2)[:, None], 0, torch.tensor([[5, 6], [7, 8]])), x[:, 0]),
    "through a permutation": lambda c, x: c.permute(2, 0, 1, 3).__setitem__(
        torch.tensor([5]), x.permute(2, 0, 1, 3)[:1]
    ),
    "a head": lambda c, x: c[:, 1].fill_(2),
    "everything": lambda c, x: c.zero_(),
    "itself": lambda c, x: c.copy_(c.clone()),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_ranges_writes_their_caches(write: Callable[[Tensor, Tensor], Any]) -> None:
    cache, expected = ranges()
    x = values(2, 2, 2, 3 * WIDTH)
    write(cache, x)
    write(expected, x)
    torch.testing.assert_close(cache.dequantize(), rounded(expected), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "write",
    [
        lambda c: c.mul_(2),
        lambda c: c[..., WIDTH - 3 : WIDTH + 3].mul_(2),
        lambda c: c[..., 3].add_(1),
        lambda c: c.view(-1)[5:].zero_(),
        lambda c: c.index_copy_(3, torch.tensor([5, 3 * WIDTH - 1]), c[..., :2].clone()),
        lambda c: c.__setitem__((..., torch.tensor([3, WIDTH])), 0),
    ],
)
def test_any_other_write_reads_computes_and_stores(write: Callable[[Tensor], Any]) -> None:
    x = values(2, 2, 70, 3 * WIDTH)
    cache = packed(x, LOSSLESS)
    write(cache), write(x)
    assert torch.equal(cache.dequantize(), x)


def test_a_write_of_other_channels_is_an_error_and_writes_nothing() -> None:
    cache, expected = ranges()
    with pytest.raises(RuntimeError, match="expected"):
        cache.index_copy_(2, torch.tensor([1]), values(2, 2, 1, WIDTH))
    with pytest.raises(RuntimeError):
        cache[:, :, torch.tensor([1])] = values(2, 2, 1, WIDTH)
    assert torch.equal(cache.dequantize(), expected)


@save_and_load
def test_ranges_are_saved_packed_and_loaded(
    save: Callable[..., None], load: Callable[..., Any], tmp_path: Path
) -> None:
    check_is_saved_and_loaded(*ranges(), save, load, tmp_path / "file")


def test_ranges_report_the_shape_of_the_plain_tensor_and_the_bytes_of_their_caches() -> None:
    cache, _ = ranges()
    assert tuple(cache.shape) == (2, 2, 70, 3 * WIDTH)
    assert repr(cache).startswith(f"PackedRanges(shape=(2, 2, 70, {3 * WIDTH})")
    assert kvcompile.cache_nbytes(cache) == sum(map(kvcompile.cache_nbytes, cache.parts))
