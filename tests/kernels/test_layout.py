"""The places of the bytes in a packed cache, and the promises of writing and reading them."""

from __future__ import annotations

import pytest
import sympy
import torch
from formats_of_every_kind import BY_TOKEN, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_bytes import empty_packed

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.rotation import rotate
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, FEW_TOKENS, PackedLayout, are_few, num_blocks
from kvcompile.kernels.spec.packing import (
    float_blocks,
    pack_tokens,
    read_stored_tokens,
    read_tokens,
    write_tokens,
    write_tokens_,
)

CPU = torch.device("cpu")
BATCH, HEADS, HEAD_DIM = 2, 3, 64

every_layout = pytest.mark.parametrize(
    "layout",
    [PackedLayout(name, role, HEAD_DIM) for name in BY_TOKEN for role in ("key", "value")],
    ids=lambda layout: f"{layout.format_name}-{layout.role}",
)
few_examples = settings(max_examples=10, deadline=None, derandomize=True)


def random_tokens(num_tokens, seed=0):
    """Random integers. Their rotation is exact at head_dim 64 (elements +-1/8), so that bytes are equal."""
    shape = (BATCH, HEADS, num_tokens, HEAD_DIM)
    return torch.randint(-99, 100, shape, generator=torch.Generator().manual_seed(seed)).float()


def packed(layout, x, capacity=None):
    data = empty_packed(layout, capacity or x.shape[2], x.shape[0], x.shape[1], CPU)
    return write_tokens(data, layout, x, torch.arange(x.shape[2]))


def dequantized(layout, x):
    return layout.format.decode(layout.format.encode(x))


@pytest.mark.parametrize(("name", "head_dim"), SHAPES)
@pytest.mark.parametrize("role", ["key", "value"])
def test_the_size_of_a_cache_equals_its_bytes_expression(name, head_dim, role):
    layout = PackedLayout(name, role, head_dim)
    data = empty_packed(layout, 130, 2, 3, CPU)
    symbols = sympy.symbols("num_tokens batch num_kv_heads", integer=True, positive=True)
    assert data.nbytes == layout.nbytes().subs(dict(zip(symbols, (130, 2, 3), strict=True)))
    assert data.shape == layout.shape(130, 2, 3) == (3, 2, 3, 64 * layout.bytes_per_token)
    assert layout.block_bytes % 64 == 0


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_a_block_holds_64_tokens(num_tokens, blocks):
    assert num_blocks(num_tokens) == blocks


@every_layout
def test_token_bytes_fill_a_block_without_gap_or_overlap(layout):
    offsets = layout.byte_offsets(torch.arange(BLOCK_TOKENS))
    assert offsets.shape == (BLOCK_TOKENS, layout.bytes_per_token)
    assert torch.equal(offsets.flatten().sort().values, torch.arange(layout.block_bytes))


@every_layout
def test_few_tokens_have_the_same_bytes_and_offsets_as_many(layout):
    row, x = torch.arange(BLOCK_TOKENS), random_tokens(BLOCK_TOKENS)
    assert are_few(row[:FEW_TOKENS].shape)
    assert not are_few(row.shape)
    assert torch.equal(
        torch.cat([layout.byte_offsets(part) for part in row.split(FEW_TOKENS)]), layout.byte_offsets(row)
    )
    assert all(torch.equal(layout.byte_offsets(row[i]), layout.byte_offsets(row)[i]) for i in (0, BLOCK_TOKENS - 1))
    parts = [layout.token_bytes(layout.format.encode(part)) for part in x.split(FEW_TOKENS, 2)]
    assert torch.equal(torch.cat(parts, 2), layout.token_bytes(layout.format.encode(x)))


@every_layout
def test_sections_are_views_of_the_written_bytes(layout):
    x = random_tokens(BLOCK_TOKENS)
    data = packed(layout, x)
    sections = layout.split(data)
    for name, section in layout.format.encode(x).items():
        assert sections[name].untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
        assert torch.equal(sections[name][0], section)


def test_codes_of_keys_are_row_major_and_of_values_column_major():
    name = "int8_per_token_head"
    x = random_tokens(BLOCK_TOKENS)
    codes = get_format(name).encode(x)["codes"]
    bytes_of_codes = BLOCK_TOKENS * HEAD_DIM
    key = packed(PackedLayout(name, "key", HEAD_DIM), x)[0, ..., :bytes_of_codes]
    value = packed(PackedLayout(name, "value", HEAD_DIM), x)[0, ..., :bytes_of_codes]
    assert torch.equal(key, codes.flatten(-2))
    assert torch.equal(value, codes.transpose(-1, -2).flatten(-2))


@every_layout
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
def test_reading_written_tokens_equals_decoding_encoded_tokens(layout, num_tokens):
    x = random_tokens(num_tokens)
    data = packed(layout, x, capacity=num_tokens + 70)
    expected = dequantized(layout, x)
    torch.testing.assert_close(read_tokens(data, layout, num_tokens), expected)
    assert not read_tokens(data, layout, num_tokens + 70)[:, :, num_tokens:].any()
    stored = rotate(expected, layout.format.rotation_seed) if layout.format.rotated else expected
    torch.testing.assert_close(read_stored_tokens(data, layout, num_tokens), stored, rtol=1e-4, atol=1e-4)


@every_layout
@given(data=st.data())
@few_examples
def test_any_order_and_grouping_of_writes_gives_the_same_bytes(layout, data):
    num_tokens = data.draw(st.integers(1, 150))
    order = torch.tensor(data.draw(st.permutations(range(num_tokens))))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_tokens), max_size=3)))
    x = random_tokens(num_tokens)
    target = empty_packed(layout, num_tokens, BATCH, HEADS, CPU)
    for positions in torch.tensor_split(order, cuts):
        write_tokens_(target, layout, x[:, :, positions], positions)
    assert torch.equal(target, packed(layout, x))


@every_layout
def test_rewriting_a_token_leaves_no_trace_of_the_old_one(layout):
    x, old = random_tokens(100), random_tokens(100, seed=1)
    data = packed(layout, old)
    write_tokens_(data, layout, x, torch.arange(100))
    assert torch.equal(data, packed(layout, x))


@every_layout
def test_in_place_and_functional_writes_agree_and_the_functional_one_changes_nothing(layout):
    data = packed(layout, random_tokens(100))
    before, x, positions = data.clone(), random_tokens(3, seed=1), torch.tensor([99, 0, 64])
    written = write_tokens(data, layout, x, positions)
    assert torch.equal(data, before)
    write_tokens_(data, layout, x, positions)
    assert torch.equal(data, written)
    assert not torch.equal(data, before)


@every_layout
def test_permuting_the_batch_permutes_the_cache(layout):
    x = random_tokens(70)
    assert torch.equal(packed(layout, x)[:, [1, 0]], packed(layout, x[[1, 0]]))


@every_layout
def test_a_prefix_of_the_blocks_is_the_shorter_cache(layout):
    x = random_tokens(150)
    long = packed(layout, x, capacity=640)
    prefix = long[: num_blocks(100)]
    assert prefix.is_contiguous()
    assert torch.equal(prefix, packed(layout, x[:, :, :128]))
    torch.testing.assert_close(read_tokens(prefix, layout, 100), dequantized(layout, x[:, :, :100]))


@every_layout
def test_every_sequence_can_be_written_at_its_own_positions(layout):
    x = random_tokens(3)
    positions = torch.tensor([[0, 63, 64], [5, 4, 90]])
    data = write_tokens(empty_packed(layout, 100, BATCH, HEADS, CPU), layout, x, positions)
    tokens = read_tokens(data, layout, 100)
    for sequence in range(BATCH):
        torch.testing.assert_close(tokens[sequence, :, positions[sequence]], dequantized(layout, x)[sequence])
        unwritten = [token for token in range(100) if token not in positions[sequence]]
        assert not tokens[sequence, :, unwritten].any()


@every_layout
@given(valid=st.lists(st.booleans(), min_size=10, max_size=10))
@few_examples
def test_invalid_tokens_leave_the_bytes_at_their_positions_unchanged(layout, valid):
    valid = torch.tensor(valid)
    data, x, positions = packed(layout, random_tokens(80)), random_tokens(10, seed=1), torch.arange(60, 70)
    expected = write_tokens(data, layout, x[:, :, valid], positions[valid])
    assert torch.equal(write_tokens(data, layout, x, positions, valid), expected)
    both = write_tokens(data, layout, x, positions.expand(BATCH, -1), torch.stack([valid, ~valid]))
    inverse = write_tokens(data, layout, x[:, :, ~valid], positions[~valid])
    assert torch.equal(both, torch.stack([expected[:, 0], inverse[:, 1]], 1))


@every_layout
def test_writing_no_token_changes_nothing(layout):
    data = packed(layout, random_tokens(10))
    assert torch.equal(write_tokens(data, layout, random_tokens(0), torch.arange(0)), data)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 192])
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 80), ("float16", 64), ("float32", 16)])
def test_keys_in_plain_floats_are_packed_data_without_a_copy_if_they_fill_their_blocks(dtype, head_dim, num_tokens):
    layout = PackedLayout(dtype, "key", head_dim)
    x = torch.randn(BATCH, HEADS, num_tokens, head_dim).to(layout.format.packing.dtype)
    data = float_blocks(layout, x)
    assert torch.equal(data, pack_tokens(layout, x))
    assert (data.data_ptr() == x.data_ptr()) == (num_tokens % BLOCK_TOKENS == 0)


@every_layout
def test_strides_of_the_written_vectors_do_not_matter(layout):
    x = random_tokens(20)
    strided = x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    assert not strided.is_contiguous()
    assert torch.equal(packed(layout, strided), packed(layout, x))
