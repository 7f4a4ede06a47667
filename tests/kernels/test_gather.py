"""Gathering tokens of a packed pool copies bytes, and equals indexing the dequantized pool."""

from __future__ import annotations

import pytest
import torch
from formats_of_every_kind import in_turn
from packed_caches import HEAD_DIM, LAYOUTS

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.formats.base import BLOCK_TOKENS
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.gather import words
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.kernels.layout.references import References
from kvcompile.kernels.spec.gather import gather_tokens
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens

NUM_SLOTS, HEADS = 150, 3


def pool_of(layout: PackedLayout) -> torch.Tensor:
    return pack_tokens(layout, torch.randn(1, HEADS, NUM_SLOTS, HEAD_DIM))


@pytest.mark.parametrize(("layout", "num_tokens"), in_turn(LAYOUTS, [1, 63, 64, 65, 129]))
def test_gathered_tokens_are_the_tokens_of_the_slots(layout: PackedLayout, num_tokens: int) -> None:
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
    slots = torch.tensor([[0, 149, 77, 0]])  # slot 0 also fills the last block
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


KINDS = [
    ("int8_per_token_head", 80),
    ("int4_per_token_head", 64),
    ("turboquant_3bit", 64),
    ("turboquant_2.5bit", 16),
    ("fp8_e4m3_unit", 48),
    ("int2_per_group_32", 96),
    ("bfloat16", 128),
]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize(("kind", "role"), in_turn(KINDS, ["key", "value"]))
def test_the_kernel_copies_the_bytes_of_the_specification(kind, role, device):
    pytest.importorskip("triton")
    format_name, head_dim = kind
    layout = PackedLayout(format_name, role, head_dim)
    data = torch.randint(256, (3, 1, 2, layout.block_bytes), dtype=torch.uint8)
    slots = torch.randint(3 * BLOCK_TOKENS, (70, 2)).T  # any strides
    expected = gather_tokens(data, layout, slots)
    assert torch.equal(gather_kernel.gather(data.to(device), layout, slots.to(device)).cpu(), expected)
    data = data.to(device)
    (reference,) = References(1, data.device).refer([data])
    assert torch.equal(gather_kernel.gather(reference, layout, slots.to(device)).cpu(), expected)


def test_the_operator_refuses_arguments_that_do_not_fit():
    layout = PackedLayout("int8_per_token_head", "key", 64)
    data, slots = torch.zeros(layout.shape(64, 1, 2), dtype=torch.uint8), torch.zeros(2, 3).long()
    gather = torch.ops.kvcompile.gather.default
    assert gather(data, slots, layout.spec, "key", 64).shape == (1, 2, 2, layout.block_bytes)
    for arguments, message in (
        ((data[..., 1:], slots, layout.spec, "key", 64), "data must be uint8"),
        ((data.expand(1, 2, 2, -1), slots, layout.spec, "key", 64), "data must be uint8"),
        ((data, slots.int(), layout.spec, "key", 64), "slots must be int64"),
        ((data, slots[0], layout.spec, "key", 64), "slots must be int64"),
    ):
        with pytest.raises(ValueError, match=message):
            gather(*arguments)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("nbytes", [64, 68, 33])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_parts_are_selected_in_words_or_in_bytes(dim, nbytes, offset):
    size = (3, 4, 2, nbytes)
    data = torch.randint(0, 256, (offset + torch.Size(size).numel(),), dtype=torch.uint8)[offset:].view(size)
    index = torch.tensor([1, 1, 0])
    assert torch.equal(words.select(data, dim, index), data.index_select(dim, index))
    every_other = data[:, ::2]
    assert torch.equal(words.select(every_other, dim, index % 2), every_other.index_select(dim, index % 2))
    assert words.select(data, dim, index[:0]).shape[dim] == 0
