"""Tokens of a packed cache that are kept as they are: the blocks written last, and the first ones.

A scale that a whole block of tokens shares (``int4_per_channel``) is known only when the block is full, and recent and
first tokens matter most to attention. So a layout may have a :class:`~kvcompile.kernels.layout.packed_layout.Residual`:
slots for ``sink_blocks`` (S) and ``recent_blocks`` (R) blocks of tokens in the dtype of the cache. Block ``b`` has the
slot ``b`` if ``b < S`` and ``S + (b - S) % R`` otherwise, none if R is 0; the slot holds the block if its tag is ``b +
1``.

Packed blocks are always written through. To write tokens to a block,

1. its *contents* are taken, from its slot if that holds the block, else decoded from the packed block (which re-opens a
   block that had left its slot: after a crop, an overwrite, a rejected draft),
2. the tokens are put in, rounded to the dtype of the cache,
3. the contents are encoded to the packed block: all of them if tokens share scales, else only the new tokens,
4. the slot gets contents and tag. Of several blocks of one write that have the same slot, the highest gets it.

Blocks that a slot holds are read from there, all others from their packed form. So a block that is filled in any number
of steps is quantized, as far as anyone can see, once and with all its tokens, when another one takes its slot; and
nothing needs to be done then. A vector that is not finite is exact in its slot and what the format says when packed.

Everything is traceable: no data-dependent Python, sizes may be symbolic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcompile.kernels.formats.rotation import rotate
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual

MAX_FEW_TOKENS = 16
"""Up to so many tokens are written to the block of each; more by going through all blocks."""

_NOWHERE = 1 << 40
"""A block that no cache has: to write there is an error."""

Scatter = tuple[tuple[Tensor, ...], Tensor]
"""Indices and values of an ``index_put`` on packed data."""


def blocks_of(positions: Tensor) -> Tensor:
    """The blocks that positions lie in, int64 [k], each once."""
    return torch.unique(positions // BLOCK_TOKENS)


def slot_of(residual: Residual, block: Tensor) -> Tensor:
    """The slot of blocks, int64 [...]; where R is 0 and there is none, the last one, which never has their tag."""
    if residual.recent_blocks == 0:
        return block.clamp(max=residual.sink_blocks - 1)
    cyclic = residual.sink_blocks + (block - residual.sink_blocks) % residual.recent_blocks
    return torch.where(block < residual.sink_blocks, block, cyclic) if residual.sink_blocks else cyclic


def held_blocks(data: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """The block of each slot, int64 [batch, num_kv_heads, num_slots] and within the cache, and whether it holds it."""
    block = layout.tags(data).long() - 1
    num_blocks = layout.token_blocks(data)
    return block.clamp(0, num_blocks - 1), (block >= 0) & (block < num_blocks)


def holding_slots(data: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """The slot of each block, int64 [num_blocks], and whether it holds it, bool [num_blocks, batch, num_kv_heads]."""
    assert layout.residual is not None
    block = torch.arange(layout.token_blocks(data), device=data.device)
    slot = slot_of(layout.residual, block)
    return slot, (layout.tags(data)[..., slot] == block + 1).permute(2, 0, 1)


def with_held_blocks(x: Tensor, data: Tensor, layout: PackedLayout, *, stored_basis: bool = False) -> Tensor:
    """``x``, float32 [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, head_dim], with the blocks that slots hold.

    With ``stored_basis`` they are rotated if the format is.
    """
    rows = layout.rows(data).float()
    if stored_basis and layout.format.rotated:
        rows = rotate(rows, layout.format.rotation_seed)
    slot, held = holding_slots(data, layout)
    return torch.where(held[..., None, None], rows[:, :, slot].permute(2, 0, 1, 3, 4), x)


@dataclass(frozen=True)
class Update:
    """What a write changes, of every sequence and head.

    Attributes:
        block: blocks of tokens, int64 [batch or 1, 1, k].
        parts: their new sections, each [batch, num_kv_heads, k, ...].
        slot: int64 [batch or 1, 1, m].
        rows: their new rows, [batch, num_kv_heads, m, BLOCK_TOKENS, head_dim].
        tags: their new tags, int64 [batch, num_kv_heads, m].
    """

    block: Tensor
    parts: dict[str, Tensor]
    slot: Tensor
    rows: Tensor
    tags: Tensor

    def packed(self, layout: PackedLayout) -> Tensor:
        """The new packed blocks, uint8 [batch, num_kv_heads, k, block_bytes]."""
        return torch.cat(layout.block_parts_bytes(self.parts), -1).to(torch.uint8)

    def slot_scatter(self, layout: PackedLayout) -> Scatter:
        """The slots alone, for the packed data or its header."""
        return slot_scatter(layout, self.slot, self.rows, self.tags)

    def scatter(self, layout: PackedLayout) -> Scatter:
        """All of it, for the packed data, where the slots are those of the blocks.

        One scatter, since several in a row would not become in-place stores in a compiled graph.
        """
        byte = torch.arange(layout.block_bytes + layout.written_slot_bytes, device=self.block.device)
        in_block = byte < layout.block_bytes
        slot_block, slot_offset = layout.slot_place(self.slot[..., None], byte - layout.block_bytes)
        # A block below 0 must not become one of the header.
        block = torch.where(self.block < 0, _NOWHERE, self.block + layout.header_blocks)
        block = torch.where(in_block, block[..., None], slot_block)
        offset = torch.where(in_block, byte, slot_offset)
        values = layout.block_parts_bytes(self._parts_of_one()) + layout.slot_parts_bytes(self.rows, self.tags)
        return _scatter(block, offset, values)

    def _parts_of_one(self) -> dict[str, Tensor]:
        """The sections, of blocks that come twice those of one: rounding may differ, and bytes must not mix."""
        if self.block.shape[-1] == 1:
            return self.parts
        same = (self.block[..., None] == self.block[..., None, :]).int().argmax(-1)
        sequence, head = _sequences_and_heads(self.tags)
        return {name: part[sequence, head, same] for name, part in self.parts.items()}


def slot_scatter(layout: PackedLayout, slot: Tensor, rows: Tensor, tags: Tensor) -> Scatter:
    """What gives slots new rows and tags, all three as in :class:`Update`."""
    byte = torch.arange(layout.written_slot_bytes, device=slot.device)
    return _scatter(*layout.slot_place(slot[..., None], byte), layout.slot_parts_bytes(rows, tags))


def _scatter(block: Tensor, offset: Tensor, values: list[Tensor]) -> Scatter:
    """A scatter to bytes of every sequence and head.

    ``block`` and ``offset`` broadcast to int64 [batch or 1, 1, k, nbytes]; ``values`` are int32 and together
    [batch, num_kv_heads, k, nbytes].
    """
    sequence, head = _sequences_and_heads(values[0])
    return (block, sequence[..., None], head[..., None], offset), torch.cat(values, -1).to(torch.uint8)


def token_update(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None, blocks: Tensor | None = None
) -> Update:
    """What writing the tokens ``x`` at ``positions`` changes; arguments as for ``packing.write_tokens_``."""
    assert layout.residual is not None
    token = torch.arange(x.shape[2], device=x.device)
    positions = torch.atleast_2d(positions).unsqueeze(1)  # [batch or 1, 1, n]
    valid = torch.atleast_2d(valid).unsqueeze(1) if valid is not None else None
    if is_few(x):
        block = positions // BLOCK_TOKENS
        place = block[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=x.device)
        chosen = place[..., None] == positions[..., None, None, :]
        if valid is not None:
            chosen = chosen & valid[..., None, None, :]
        source = torch.where(chosen, token, -1).amax(-1)
        slot, touched = slot_of(layout.residual, block), None if valid is None else (source >= 0).any(-1)
    else:
        token = token.expand(positions.shape) if valid is None else torch.where(valid, token, -1)
        places = _empty_places(data, layout, *positions.shape[:2]).scatter(-1, positions, token)
        block, slot, source = _all_rows(data, layout, places, blocks)
        touched = (source >= 0).any(-1)
    sequence, head = _sequences_and_heads(data[0])
    vectors = x[sequence[..., None], head[..., None], source.clamp(min=0)]
    return _update(data, layout, block, slot, touched, source >= 0, vectors)


def is_few(x: Tensor) -> bool:
    """Whether the tokens ``x`` [batch, num_kv_heads, n, head_dim] are written to the block of each."""
    return isinstance(x.shape[2], int) and x.shape[2] <= MAX_FEW_TOKENS


def vector_update(
    data: Tensor,
    layout: PackedLayout,
    vectors: Tensor,
    sequence: Tensor,
    head: Tensor,
    position: Tensor,
    valid: Tensor | None,
    blocks: Tensor | None,
) -> Update:
    """What writing single vectors changes; arguments as for ``packing.write_vectors_``."""
    shape = vectors.shape[:-1]
    index = torch.arange(shape.numel(), device=data.device).reshape(shape)
    index = index if valid is None else torch.where(valid, index, -1)
    places = _empty_places(data, layout, *data.shape[1:3]).index_put((sequence, head, position), index)
    block, slot, source = _all_rows(data, layout, places, blocks)
    vectors = vectors.reshape(-1, layout.head_dim)[source.clamp(min=0)]
    return _update(data, layout, block, slot, (source >= 0).any(-1), source >= 0, vectors)


def _empty_places(data: Tensor, layout: PackedLayout, batch: int, heads: int) -> Tensor:
    """Which vector is written to each place of a token, none yet: -1, int64 [batch, heads, tokens]."""
    size = (batch, heads, layout.token_blocks(data) * BLOCK_TOKENS)
    return torch.full(size, -1, dtype=torch.int64, device=data.device)


def _all_rows(
    data: Tensor, layout: PackedLayout, places: Tensor, blocks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``blocks`` or all blocks, [1, 1, k]; all slots, [1, 1, m]; ``places`` of the blocks, [..., k, BLOCK_TOKENS]."""
    places = places.unflatten(-1, (-1, BLOCK_TOKENS))
    if blocks is None:
        blocks = torch.arange(layout.token_blocks(data), device=data.device)
    else:
        places = places[:, :, blocks]
    return blocks[None, None], all_slots(layout, data), places


def all_slots(layout: PackedLayout, data: Tensor) -> Tensor:
    """int64 [1, 1, num_slots]."""
    assert layout.residual is not None
    return torch.arange(layout.residual.num_slots, device=data.device)[None, None]


def _sequences_and_heads(per_head: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the sequences, [batch, 1, 1], and heads, [1, num_kv_heads, 1], of a [batch, num_kv_heads, ...]."""
    batch, heads = (torch.arange(size, device=per_head.device) for size in per_head.shape[:2])
    return batch[:, None, None], heads[None, :, None]


def _update(
    data: Tensor,
    layout: PackedLayout,
    block: Tensor,
    slot: Tensor,
    touched: Tensor | None,
    written: Tensor,
    vectors: Tensor,
) -> Update:
    """Steps 1 to 4 of the module's text, for some blocks of every sequence and head.

    Args:
        data, layout: the cache before.
        block: int64 [batch or 1, 1, k]; what is given for blocks that come twice is the same.
        slot: int64 [batch or 1, 1, m]: the slots of all ``block``, and perhaps more.
        touched: bool [batch or 1, num_kv_heads or 1, k]: the blocks that are written to; None if all are.
        written: bool [batch or 1, num_kv_heads or 1, k, BLOCK_TOKENS]: the tokens that are written.
        vectors: what to, [batch, num_kv_heads, k, BLOCK_TOKENS, head_dim].
    """
    residual, fmt = layout.residual, layout.format
    assert residual is not None
    sequence, head = _sequences_and_heads(data[0])
    rows, tags, slot_of_block = layout.rows(data), layout.tags(data), slot_of(residual, block)
    parts = {name: section[block, sequence, head] for name, section in layout.split(data).items()}

    held = tags[sequence, head, slot_of_block] == block + 1
    decoded = fmt.decode(parts).to(residual.dtype)
    contents = torch.where(held[..., None, None], rows[sequence, head, slot_of_block], decoded)
    contents = torch.where(written[..., None], vectors.to(residual.dtype), contents)

    encoded, old_parts = fmt.encode(contents), parts
    if fmt.granularity == "channel":
        changed = touched[..., None, None] if touched is not None else None
    else:
        changed = written[..., None]
    parts = encoded
    if changed is not None:
        parts = {name: torch.where(changed, encoded[name], part) for name, part in old_parts.items()}

    if touched is None and residual.recent_blocks and block.shape[-1] == 1:
        return Update(
            block, parts, slot, contents, (block + 1).expand(held.shape)
        )  # one token: its block gets the slot
    new_block, row = _winners(residual, block, slot, slot_of_block, touched)
    taken = new_block >= 0
    new_rows = torch.where(taken[..., None, None], contents[sequence, head, row], rows[sequence, head, slot])
    new_tags = torch.where(taken, new_block + 1, tags[sequence, head, slot])
    return Update(block, parts, slot, new_rows, new_tags)


def _winners(
    residual: Residual, block: Tensor, slot: Tensor, slot_of_block: Tensor, touched: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The block that each slot gets, or -1 for none, and its index; int64 [batch or 1, num_kv_heads or 1, m]."""
    claims = slot[..., None] == slot_of_block[..., None, :]
    if touched is not None:
        claims = claims & touched[..., None, :]
    if residual.recent_blocks == 0:
        claims = claims & (block < residual.sink_blocks)[..., None, :]
    claiming = torch.where(claims, block[..., None, :], -1)
    return claiming.amax(-1), claiming.argmax(-1)


def header_of(layout: PackedLayout, x: Tensor) -> Tensor:
    """The header of a cache that holds just the tokens ``x`` [batch, num_kv_heads, n, head_dim].

    Of each head those recent blocks are held that end with its last token which is not zero: the end of a cache of
    fixed size that was filled from its start, and not the end of its zeros.

    Returns:
        uint8 [header_blocks, batch, num_kv_heads, block_bytes].
    """
    residual = layout.residual
    assert residual is not None
    batch, heads, n, _ = x.shape
    header = x.new_zeros((layout.header_blocks, batch, heads, layout.block_bytes), dtype=torch.uint8)
    if n == 0:
        return header
    block = torch.arange(n, device=x.device) // BLOCK_TOKENS
    last = torch.where(x.count_nonzero(-1) > 0, block, -1).amax(-1, keepdim=True)  # [batch, num_kv_heads, 1]
    slot = all_slots(layout, x)
    cycles = torch.where(slot < residual.sink_blocks, 0, (last - slot) // max(residual.recent_blocks, 1))
    held = slot + cycles * residual.recent_blocks
    is_held = last >= slot

    token = held[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=x.device)
    sequence, head = _sequences_and_heads(x)
    rows = x[sequence[..., None], head[..., None], token.clamp(0, n - 1)].to(residual.dtype)
    rows = torch.where((is_held[..., None] & (token < n))[..., None], rows, 0.0)
    return header.index_put_(*slot_scatter(layout, slot, rows, torch.where(is_held, held + 1, 0)))
