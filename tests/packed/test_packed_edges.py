"""Writes of no vectors change nothing, and copies between packed caches are right at every length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_caches import HEAD_DIM, INT8, values
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.packed.tensor import PackedTensor

FP32 = torch.float32
LAYOUTS = [
    INT8,
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 1, FP32)),
    PackedLayout("int8_per_channel", "key", HEAD_DIM, Residual(1, 2, FP32)),
    PackedLayout("turboquant_4bit", "value", HEAD_DIM, Residual(1, 0, FP32)),
]
LENGTHS = (0, 1, 63, 64, 65, 128, 130, 192)
NOTHING = torch.tensor([], dtype=torch.int64)

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)
every_length = pytest.mark.parametrize("tokens", LENGTHS)
pytestmark = pytest.mark.usefixtures("seed_without_grad")


def cache_of(layout: PackedLayout, tokens: int, batch: int = 2, **kwargs: Any) -> PackedTensor:
    """A cache of random values, written in parts with the first tokens last, so that a slot may hold any block."""
    cache = PackedTensor.from_dense(values(batch, 3, tokens, HEAD_DIM), layout, **kwargs)
    if not cache.growing:
        cache[:, :, tokens // 2 :] = values(batch, 3, tokens - tokens // 2, HEAD_DIM)
        cache[:, :, : tokens // 3] = values(batch, 3, tokens // 3, HEAD_DIM)
    return cache


def full(*shape: int) -> Tensor:
    return torch.ones(*shape, HEAD_DIM)


WRITES_OF_NOTHING: dict[str, Callable[[Tensor], object]] = {
    "a mask of sequences": lambda c: c.__setitem__(torch.zeros(2, dtype=torch.bool), 0),
    "a mask of tokens": lambda c: c.__setitem__((..., torch.zeros(c.shape[2], dtype=torch.bool), slice(None)), 0),
    "a mask of vectors": lambda c: c.__setitem__(torch.zeros(c.shape[:3], dtype=torch.bool), full(0)),
    "positions": lambda c: c.__setitem__((slice(None), slice(None), NOTHING), full(2, 3, 0)),
    "positions of one head": lambda c: c[:, 1].__setitem__((slice(None), NOTHING), full(2, 0)),
    "positions per sequence": lambda c: c.__setitem__((torch.arange(2)[:, None], slice(None), NOTHING[None]), 1.0),
    "an empty slice": lambda c: c.__setitem__((slice(None), slice(None), slice(0, 0)), full(2, 3, 0)),
    "no sequence": lambda c: c[2:].zero_(),
    "no head": lambda c: c[:, 3:].fill_(1),
    "copy_": lambda c: c[:, :, :0].copy_(full(2, 3, 0)),
    "copy_ of a packed cache": lambda c: c[:, :, :0].copy_(c[:, :, c.shape[2] :]),
    "zero_": lambda c: c[:, :, c.shape[2] :].zero_(),
    "fill_": lambda c: c[:, :, :0].fill_(1),
    "index_copy_": lambda c: c.index_copy_(2, NOTHING, full(2, 3, 0)),
    "index_copy_ of sequences": lambda c: c.index_copy_(0, NOTHING, full(0, 3, c.shape[2])),
    "index_fill_": lambda c: c.index_fill_(1, NOTHING, 1.0),
    "scatter_": lambda c: c.scatter_(2, NOTHING[:, None].expand(2, 3, 0, HEAD_DIM), 1.0),
}


@pytest.mark.sampled(2)  # every write, in half of the layouts
@pytest.mark.parametrize("write", WRITES_OF_NOTHING.values(), ids=WRITES_OF_NOTHING.keys())
@every_layout
def test_a_write_of_no_vectors_changes_no_byte(layout, write):
    for tokens in LENGTHS:
        cache = cache_of(layout, tokens)
        before = cache.packed.clone()
        write(cache)
        assert torch.equal(cache.packed, before)


@every_layout
@every_length
@pytest.mark.parametrize("axes", ["bhtd", "bthd"])
def test_a_snapshot_is_restored_to_the_bit(layout, tokens, axes):
    cache = PackedTensor.from_dense(values(2, 3, tokens, HEAD_DIM), layout)
    if axes == "bthd":
        cache = PackedTensor.from_dense(values(2, tokens, 3, HEAD_DIM), layout, axes).transpose(1, 2)
    cache[:, :, : tokens // 3] = values(2, 3, tokens // 3, HEAD_DIM)
    saved = cache.clone()
    expected = saved.dequantize()
    cache[:, :, tokens // 2 :] = values(2, 3, tokens - tokens // 2, HEAD_DIM)
    cache.copy_(saved)
    assert torch.equal(cache.dequantize(), expected)


@every_layout
@every_length
def test_sequences_and_heads_are_copied_within_a_cache(layout, tokens):
    cache = cache_of(layout, tokens)
    expected = cache.dequantize()
    cache[:, 0] = cache[:, 1]
    expected[:, 0] = expected[:, 1]
    assert torch.equal(cache.dequantize(), expected)
    cache[1] = cache[0]
    expected[1] = expected[0]
    assert torch.equal(cache.dequantize(), expected)


@every_layout
@every_length
def test_a_copy_between_views_that_overlap_reads_before_it_writes(layout, tokens):
    cache = cache_of(layout, tokens)
    expected = cache.dequantize()
    cache[:, 1:] = cache[:, :-1]
    assert torch.equal(cache.dequantize(), torch.cat([expected[:, :1], expected[:, :-1]], 1))


@pytest.mark.sampled(3)  # every length with every number of tokens after it, in one or two layouts
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda layout: layout.spec)
@pytest.mark.parametrize("behind", [1, 62, 64, 70])
@every_length
def test_a_copy_into_a_part_leaves_the_tokens_behind_it(layout, tokens, behind):
    exact = PackedLayout("float32", "key", HEAD_DIM, layout.residual)
    cache, source = cache_of(exact, tokens + behind), cache_of(exact, tokens)
    expected = torch.cat([source.dequantize(), cache.dequantize()[:, :, tokens:]], 2)
    cache[:, :, :tokens].copy_(source)
    assert torch.equal(cache.dequantize(), expected)
    lossy, source = cache_of(layout, tokens + behind), cache_of(layout, tokens)
    expected = torch.cat([source.dequantize(), lossy.dequantize()[:, :, tokens:]], 2)
    lossy[:, :, :tokens].copy_(source)
    torch.testing.assert_close(lossy.dequantize(), expected, rtol=0, atol=0.9)  # a step of int4_per_channel is 0.5


@every_layout
def test_a_write_that_a_plain_cache_rejects_changes_no_byte(layout):
    cache = cache_of(layout, 65)
    before = cache.packed.clone()
    x = values(2, 3, 2, HEAD_DIM)
    writes: list[Callable[[], object]] = [
        lambda: cache.__setitem__((slice(None), slice(None), torch.tensor([3, 65])), x),
        lambda: cache.__setitem__((torch.tensor([0, 2]), slice(None), torch.tensor([3, 4])), x.transpose(1, 2)),
        lambda: cache.index_copy_(2, torch.tensor([3, 65]), x),
        lambda: cache.index_copy_(2, torch.tensor([3, -1]), x),
        lambda: cache.index_fill_(2, torch.tensor([3, 65]), 1.0),
        lambda: cache.scatter_(2, torch.tensor([[3], [65]]).expand(2, 3, 2, HEAD_DIM), x),
        lambda: cache.scatter_(2, torch.tensor([[3], [-1]]).expand(2, 3, 2, HEAD_DIM), x),
        lambda: cache.copy_(x),
        lambda: cache[:, 0].copy_(cache[:, 1, :3]),
        lambda: torch.cat([cache, x[:1]], 2),
    ]
    for write in writes:
        with pytest.raises((IndexError, RuntimeError)):
            write()
        assert torch.equal(cache.packed, before)
