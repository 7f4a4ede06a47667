"""Caches of fixed size drop their first tokens, or get more room, and keep all others byte by byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual
from kvcompile.kernels.spec.packing import drop_first_blocks_
from kvcompile.packed.room import drop_first_tokens_, droppable_tokens, extended
from kvcompile.packed.tensor import PackedTensor

HEAD_DIM, FP32 = 64, torch.float32
LAYOUTS = [
    PackedLayout("int8_per_token_head", "key", HEAD_DIM),
    PackedLayout("turboquant_3bit", "value", HEAD_DIM),
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 1, FP32)),
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 3, FP32)),
    PackedLayout("int8_per_token_head", "value", HEAD_DIM, Residual(0, 2, FP32)),
]
WITH_SINKS = [
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(1, 2, FP32)),
    PackedLayout("int8_per_token_head", "value", HEAD_DIM, Residual(2, 0, FP32)),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS + WITH_SINKS, ids=lambda layout: layout.spec)


def write(cache: PackedTensor, begin: int, x: Tensor) -> None:
    cache.index_copy_(2, torch.arange(begin, begin + x.shape[2]), x)


def empty(num_tokens: int, layout: PackedLayout) -> PackedTensor:
    return PackedTensor.zeros((2, 2, num_tokens, HEAD_DIM), FP32, layout)


@every_layout
@pytest.mark.parametrize("num_written", [448, 449, 500, 511, 512])
def test_a_cache_that_drops_tokens_goes_on_as_one_that_does_not(layout: PackedLayout, num_written: int) -> None:
    """Its tokens equal the last tokens of a longer cache, also after further writes."""
    drops = droppable_tokens([layout.residual])
    x = torch.randn(2, 2, num_written + 150, HEAD_DIM)
    short, long = empty(512, layout), empty(1024, layout)
    for cache in (short, long):
        write(cache, 0, x[:, :, :300])
        write(cache, 300, x[:, :, 300:num_written])
    drop_first_tokens_(short, drops)
    for end in (num_written, num_written + 1, num_written + 30, 512 + drops):
        if end > num_written:
            for cache, shift in ((short, drops), (long, 0)):
                write(cache, num_written - shift, x[:, :, num_written : min(end, x.shape[2])])
        assert torch.equal(short.dequantize()[:, :, : end - drops], long.dequantize()[:, :, drops:end])


def test_recent_blocks_that_become_the_first_ones_stay_exact() -> None:
    cache, x = empty(256, WITH_SINKS[0]), torch.randn(2, 2, 256, HEAD_DIM)
    write(cache, 0, x)
    drop_first_tokens_(cache, 128)
    assert torch.equal(cache.dequantize()[:, :, :128], x[:, :, 128:])
    write(cache, 128, x[:, :, :128])
    first, second, *_ = cache.dequantize().split(64, 2)
    assert torch.equal(first, x[:, :, 128:192])  # it is the first block now
    assert not torch.equal(second, x[:, :, 192:])


@every_layout
def test_free_slots_hold_zeros(layout: PackedLayout) -> None:
    cache, drops = empty(512, layout), droppable_tokens([layout.residual])
    write(cache, 0, torch.randn(2, 2, 512, HEAD_DIM))
    drop_first_tokens_(cache, drops)
    assert not cache.dequantize()[:, :, 512 - drops :].any()


def test_a_plain_cache_moves_its_tokens_too() -> None:
    cache, x = torch.zeros(1, 2, 130, 8), torch.randn(1, 2, 130, 8)
    cache.copy_(x)
    drop_first_tokens_(cache, BLOCK_TOKENS)
    assert torch.equal(cache[:, :, :66], x[:, :, 64:])
    assert not cache[:, :, 66:].any()


def test_blocks_that_would_leave_their_entry_are_not_dropped() -> None:
    cache = empty(512, LAYOUTS[3])
    with pytest.raises(ValueError, match="2 blocks are not a multiple of 3 recent blocks"):
        drop_first_blocks_(cache.packed, cache.packed_layout, 2)


def test_all_caches_of_a_model_drop_tokens_together() -> None:
    assert droppable_tokens([]) == droppable_tokens([None]) == BLOCK_TOKENS
    assert (
        droppable_tokens([None, Residual(1, 2, FP32), Residual(0, 3, FP32), Residual(2, 0, FP32)]) == 6 * BLOCK_TOKENS
    )


@every_layout
@pytest.mark.parametrize("num_tokens", [70, 128, 300])
def test_an_extended_cache_holds_the_same_tokens(layout: PackedLayout, num_tokens: int) -> None:
    cache, x = empty(70, layout), torch.randn(2, 2, 70, HEAD_DIM)
    write(cache, 0, x)
    longer = extended(cache, num_tokens)
    assert torch.equal(longer.dequantize()[:, :, :70], cache.dequantize())
    assert not longer.dequantize()[:, :, 70:].any()
    assert longer.packed.data_ptr() != cache.packed.data_ptr()
