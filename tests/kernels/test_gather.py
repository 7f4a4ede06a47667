"""Gathering tokens of a packed pool moves their bytes, and says what reading the pool and indexing would."""

from __future__ import annotations

import pytest
import torch
from packed_caches import HEAD_DIM, LAYOUTS

from kvcompile.kernels.formats.base import BLOCK_TOKENS
from kvcompile.kernels.gather import gather_tokens
from kvcompile.kernels.layout import PackedLayout, Residual
from kvcompile.kernels.packing import pack_tokens, read_tokens

NUM_SLOTS, HEADS = 150, 3

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.format_name}-{layout.role}")


def pool_of(layout: PackedLayout) -> torch.Tensor:
    return pack_tokens(layout, torch.randn(1, HEADS, NUM_SLOTS, HEAD_DIM))


@every_layout
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 129])
def test_gathered_tokens_are_those_of_the_slots(layout: PackedLayout, num_tokens: int) -> None:
    data = pool_of(layout)
    slots = torch.randint(NUM_SLOTS, (4, num_tokens))  # duplicates within and between sequences
    slots[0, -1], slots[-1, 0] = NUM_SLOTS - 1, 0
    gathered = gather_tokens(data, layout, slots)
    assert (gathered.dtype, gathered.shape) == (torch.uint8, layout.shape(num_tokens, 4, HEADS))
    pool = read_tokens(data, layout, NUM_SLOTS)[0]
    expected = pool[:, slots].transpose(0, 1)
    assert torch.equal(read_tokens(gathered, layout, num_tokens), expected)


def test_only_the_slots_are_read() -> None:
    layout = LAYOUTS[0]
    data = pool_of(layout)
    slots = torch.tensor([[0, 149, 77, 0]])  # slot 0 is also what fills the last block
    clean = gather_tokens(data, layout, slots)
    poison = data.new_full(data.shape, 255)
    for slot in slots.unique():
        one = layout.byte_offsets(slot % BLOCK_TOKENS)
        poison[slot // BLOCK_TOKENS, :, :, one] = data[slot // BLOCK_TOKENS, :, :, one]
    assert torch.equal(gather_tokens(poison, layout, slots), clean)


def test_slots_outside_of_the_data_are_an_error() -> None:
    data = pool_of(LAYOUTS[0])
    for slot in (3 * BLOCK_TOKENS, -4 * BLOCK_TOKENS):
        with pytest.raises(IndexError):
            gather_tokens(data, LAYOUTS[0], torch.tensor([[slot]]))


def test_tokens_beside_a_residual_are_not_gathered() -> None:
    layout = PackedLayout("int8_per_token_head", "key", HEAD_DIM, Residual(0, 1, torch.float32))
    with pytest.raises(ValueError, match="with a residual cannot be gathered"):
        gather_tokens(torch.zeros(layout.shape(64, 1, 1), dtype=torch.uint8), layout, torch.zeros(1, 1).long())
