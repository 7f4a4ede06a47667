"""Writes to a cache with a residual, compared with a simple model that loops over blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_bytes import empty_packed
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import pack_tokens, read_tokens, write_tokens, write_tokens_, write_vectors_
from kvcompile.kernels.spec.residual import MAX_FEW_TOKENS

BATCH, HEADS, HEAD_DIM, TOKENS = 2, 2, 16, 250
LAYOUTS = [
    PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 1, torch.float32)),
    PackedLayout("int2_per_channel", "key", HEAD_DIM, Residual(1, 2, torch.float32)),
    PackedLayout("int8_per_channel", "key", HEAD_DIM, Residual(0, 1, torch.bfloat16)),
    PackedLayout("int4_unrotated", "value", HEAD_DIM, Residual(1, 1, torch.float16)),
    PackedLayout("fp8_e4m3", "value", HEAD_DIM, Residual(2, 0, torch.float32)),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.spec)

Write = tuple[list[int], list[int]]
"""The positions of the tokens of one write, for each of two sequences."""


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def empty(layout: PackedLayout) -> Tensor:
    return empty_packed(layout, TOKENS, BATCH, HEADS, torch.device("cpu"))


@dataclass
class Sequence:
    """The model of one sequence, all heads.

    Attributes:
        layout: the layout of the cache.
        packed: the decoded contents of each packed block.
        entries: for each entry, the block that it holds and the exact contents of the block.
    """

    layout: PackedLayout
    packed: dict[int, Tensor] = field(default_factory=dict)
    entries: dict[int, tuple[int, Tensor]] = field(default_factory=dict)

    def roundtrip(self, contents: Tensor) -> Tensor:
        return self.layout.format.decode(self.layout.format.encode(contents)).to(contents.dtype)

    def entry(self, block: int) -> int | None:
        residual = self.layout.residual
        if block < residual.sink_blocks:
            return block
        cyclic = (block - residual.sink_blocks) % residual.recent_blocks if residual.recent_blocks else None
        return cyclic if cyclic is None else residual.sink_blocks + cyclic

    def block(self, block: int) -> Tensor:
        kept, rows = self.entries.get(self.entry(block), (None, None))
        zeros = torch.zeros(HEADS, BLOCK_TOKENS, HEAD_DIM, dtype=self.layout.residual.dtype)
        return rows if kept == block else self.packed.get(block, zeros)

    def write(self, positions: list[int], x: Tensor) -> None:
        blocks = sorted({position // BLOCK_TOKENS for position in positions})
        contents = {block: self.block(block).clone() for block in blocks}
        for token, position in enumerate(positions):
            contents[position // BLOCK_TOKENS][:, position % BLOCK_TOKENS] = x[:, token]
        for block in blocks:
            packed = self.roundtrip(contents[block])
            if self.layout.format.granularity != "channel":
                written = [position % BLOCK_TOKENS for position in positions if position // BLOCK_TOKENS == block]
                old = self.packed.get(block, torch.zeros_like(packed)).clone()
                old[:, written] = packed[:, written]
                packed = old
            self.packed[block] = packed
            if self.entry(block) is not None:
                self.entries[self.entry(block)] = block, contents[block]

    def tokens(self) -> Tensor:
        return torch.cat([self.block(block) for block in range(-(-TOKENS // BLOCK_TOKENS))], 1)[:, :TOKENS]


@st.composite
def writes(draw: st.DrawFn) -> list[Write]:
    """One to four writes of 1 to 40 tokens: runs of tokens, as models write them, or tokens anywhere."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.one_of(st.integers(1, 3), st.integers(1, 40)))
        starts = draw(st.tuples(*[st.integers(0, TOKENS - count)] * 2))
        runs = [list(range(start, start + count)) for start in starts]
        anywhere = st.lists(st.integers(0, TOKENS - 1), min_size=count, max_size=count, unique=True)
        result.append((runs[0], draw(st.one_of(st.just(runs[1]), anywhere))))
    return result


@every_layout
@given(steps=writes(), random=st.randoms(use_true_random=False))
@example(steps=[(list(range(200)), list(range(200))), ([199, 200], [10, 249])], random=None)
@example(steps=[([60 + i for i in range(MAX_FEW_TOKENS)],) * 2, (list(range(128, 250)),) * 2], random=None)
@settings(max_examples=6, deadline=None)
def test_writes_in_any_order_agree_with_the_model(layout, steps, random):
    data, sequences = empty(layout), [Sequence(layout) for _ in range(BATCH)]
    for positions in steps:
        x = torch.randn(BATCH, HEADS, len(positions[0]), HEAD_DIM).to(layout.residual.dtype)
        valid = torch.tensor([[random is None or random.random() < 0.8 for _ in row] for row in positions])
        write_tokens_(data, layout, x, torch.tensor(positions), valid)
        for sequence, row, vectors, chosen in zip(sequences, positions, x, valid, strict=True):
            sequence.write(
                [position for position, is_valid in zip(row, chosen, strict=True) if is_valid], vectors[:, chosen]
            )
    expected = torch.stack([sequence.tokens() for sequence in sequences]).float()
    assert torch.equal(read_tokens(data, layout, TOKENS).to(layout.residual.dtype).float(), expected)


@every_layout
@pytest.mark.parametrize("count", [1, MAX_FEW_TOKENS, MAX_FEW_TOKENS + 1, 130])
def test_a_write_to_named_blocks_and_one_to_all_are_the_same_bytes(layout, count):
    data = pack_tokens(layout, torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM))
    before = data.clone()
    x, positions = torch.randn(BATCH, HEADS, count, HEAD_DIM), torch.randperm(TOKENS)[:count]
    expected = write_tokens(data, layout, x, positions)
    assert torch.equal(data, before)
    write_tokens_(data, layout, x, positions, blocks=torch.unique(positions // BLOCK_TOKENS))
    assert torch.equal(data, expected)


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        PackedLayout("int4_per_channel", "key", HEAD_DIM, Residual(0, 3, torch.bfloat16)),
        PackedLayout("int2_per_channel", "key", HEAD_DIM, Residual(2, 1, torch.float32)),
        PackedLayout("int4_unrotated", "value", 48, Residual(0, 1, torch.float32)),  # rows end between blocks
    ],
    ids=lambda layout: f"{layout.spec} {layout.head_dim}",
)
def test_single_tokens_are_the_same_bytes_as_writes_through_all_blocks(layout):
    """A single token is written with whole blocks of the header, in which other entries keep their bytes."""
    data = pack_tokens(layout, torch.randn(BATCH, HEADS, TOKENS, layout.head_dim))
    for positions in ([[63], [249]], [[64], [0]], [[65], [130]], [[1], [131]], [[192], [132]]):
        x, valid = torch.randn(BATCH, HEADS, 1, layout.head_dim), torch.tensor([[True], [positions[1] != [131]]])
        sequence, head = torch.arange(BATCH)[:, None], torch.arange(HEADS)
        places, expected = torch.tensor(positions), data.clone()
        write_vectors_(expected, layout, x[:, :, 0], sequence, head, places.expand(-1, HEADS), valid)
        before = data.clone()
        written = write_tokens(data, layout, x, places, valid)
        assert torch.equal(data, before)
        assert torch.equal(written, expected)
        if valid.all():
            assert torch.equal(write_tokens(data, layout, x, places), expected)
        data = written


@every_layout
def test_blocks_filled_one_after_the_other_in_any_order_of_tokens_equal_a_single_write(layout):
    x, random = torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM), Random(0)
    data = empty(layout)
    for begin in range(0, TOKENS, BLOCK_TOKENS):
        positions = list(range(begin, min(begin + BLOCK_TOKENS, TOKENS)))
        random.shuffle(positions)
        while positions:
            count = random.randint(1, len(positions))
            chosen, positions = torch.tensor(positions[:count]), positions[count:]
            write_tokens_(data, layout, x[:, :, chosen], chosen)
    for other in (pack_tokens(layout, x), write_tokens(empty(layout), layout, x, torch.arange(TOKENS))):
        # Packed blocks have the same bytes. Entries have the same values, but a token that was not written may be -0.0.
        assert torch.equal(data[layout.header_blocks :], other[layout.header_blocks :])
        assert torch.equal(layout.tags(data), layout.tags(other))
        assert torch.equal(read_tokens(data, layout, TOKENS), read_tokens(other, layout, TOKENS))


ATTENTION = {
    "decode": {"q_len": 1},
    "decode with all": {"q_len": 3, "mask": True, "softcap": 5.0, "sinks": True},
    "prefill": {"q_len": 40},
    "prefill with all": {"q_len": 40, "mask": True, "softcap": 5.0, "sinks": True},
}
KEYS = [
    *LAYOUTS[:3],
    PackedLayout("turboquant_3bit_seed7", "key", HEAD_DIM, Residual(1, 1, torch.float32)),
    PackedLayout("int8_per_token_head", "key", HEAD_DIM),
]
VALUES = [
    *LAYOUTS[3:],
    PackedLayout("int4_per_token_head", "value", HEAD_DIM, Residual(0, 2, torch.float32)),
    PackedLayout("turboquant_2bit", "value", HEAD_DIM),
    PackedLayout("bfloat16", "value", HEAD_DIM, Residual(1, 1, torch.bfloat16)),
]


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION.keys())
@pytest.mark.parametrize(("key", "value"), list(zip(KEYS, VALUES, strict=True)), ids=[layout.spec for layout in KEYS])
def test_attention_equals_attention_on_the_tokens_that_are_read(key, value, options):
    kv_len, q_len = 200, options["q_len"]
    k_data, v_data = (random_cache(layout) for layout in (key, value))
    for data, layout in ((k_data, key), (v_data, value)):  # tokens beyond kv_len have no influence
        poison = torch.full((BATCH, HEADS, TOKENS - kv_len, HEAD_DIM), torch.nan)
        write_tokens_(data, layout, poison, torch.arange(kv_len, TOKENS))
    query = torch.randn(BATCH, 2 * HEADS, q_len, HEAD_DIM)
    mask = torch.rand(BATCH, 1, q_len, kv_len) < 0.7 if "mask" in options else None
    sinks = torch.randn(2 * HEADS) if "sinks" in options else None
    softcap = options.get("softcap", 0.0)
    out = attend(query, k_data, v_data, key, value, mask=mask, sinks=sinks, kv_len=kv_len, softcap=softcap)

    k, v = (read_tokens(data, layout, kv_len) for data, layout in ((k_data, key), (v_data, value)))
    scores = query @ k.repeat_interleave(2, 1).mT * HEAD_DIM**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(BATCH, -1, q_len, 1)], -1)
    expected = scores.softmax(-1)[..., :kv_len] @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def random_cache(layout: PackedLayout) -> Tensor:
    """A cache whose entries hold different blocks in the two sequences."""
    data = pack_tokens(layout, torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM))
    write_tokens_(data, layout, torch.randn(BATCH, HEADS, 2, HEAD_DIM), torch.tensor([[70, 71], [3, 140]]))
    return data


@pytest.mark.parametrize("position", [-1, 256])
@pytest.mark.parametrize("count", [1, MAX_FEW_TOKENS + 1])
def test_a_position_outside_of_the_cache_is_an_error_and_changes_nothing(position, count):
    layout = LAYOUTS[0]
    data = pack_tokens(layout, torch.randn(BATCH, HEADS, TOKENS, HEAD_DIM))
    before = data.clone()
    positions = torch.tensor([position, *range(1, count)])
    with pytest.raises((IndexError, RuntimeError)):
        write_tokens_(data, layout, torch.randn(BATCH, HEADS, count, HEAD_DIM), positions)
    assert torch.equal(data, before)


def test_scales_per_channel_without_a_residual_are_refused():
    layout = PackedLayout("int4_per_channel", "key", HEAD_DIM)
    with pytest.raises(ValueError, match="through a residual"):
        write_tokens(empty(layout), layout, torch.randn(BATCH, HEADS, 1, HEAD_DIM), torch.tensor([0]))


@every_layout
def test_parsing_the_spec_of_a_layout_gives_the_layout(layout):
    assert PackedLayout.parse(layout.spec, layout.role, HEAD_DIM) == layout
    assert PackedLayout.parse(layout.format_name, layout.role, HEAD_DIM).residual is None


@pytest.mark.parametrize(
    "spec",
    ["int4_per_channel[recent=1]", "fp8_e4m3[recent=1,sinks=0,int8]", "fp8_e4m3[recent=0,sinks=0,float32]", "int5", ""],
)
def test_a_text_that_is_no_spec_is_an_error(spec):
    with pytest.raises(ValueError, match=r"."):
        PackedLayout.parse(spec, "key", HEAD_DIM)
