"""Exact blocks of a packed cache: the first blocks and the blocks written last, in full precision.

There are two reasons to keep tokens exactly. A scale that a whole block of tokens shares (``int4_per_channel``) is
known only when the block is full; and attention depends most on recent and first tokens. A layout may therefore have a
:class:`~kvcompile.kernels.layout.packed_layout.Residual`. The header of the cache then has ``S + R`` entries, each of
which holds one block of tokens in the dtype of the cache: S entries for the first blocks (``sink_blocks``) and R
entries for the blocks written last (``recent_blocks``). Block ``b`` has the entry ``b`` if ``b < S``, and otherwise the
entry ``S + (b - S) % R``, or no entry if R is 0. The entry holds the block if its tag is ``b + 1``.

Packed blocks are always written through. To write tokens to a block,

1. The *contents* of the block are read: from its entry if the entry holds it, else by decoding the packed block. The
   second case re-opens a block that had left its entry, after a crop, an overwrite or a rejected draft.
2. The new tokens are put into the contents, rounded to the dtype of the cache.
3. The contents are encoded to the packed block: all of them if tokens share scales, else only the new tokens.
4. The entry gets the contents and the tag. If several blocks of one write have the same entry, the last block gets it.

A block that an entry holds is read from the entry, every other block from its packed form. A block may be filled in any
number of steps: a reader sees it quantized once, with all its tokens, from the moment at which another block takes its
entry. Nothing needs to be done at that moment. A vector that is not finite is kept exactly in its entry; the packed
form holds the format's codes for such vectors.

Everything is traceable: no data-dependent Python, sizes may be symbolic.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.formats.base import computed_once
from kvcompile.kernels.formats.rotation import rotate
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual

MAX_FEW_TOKENS = 16
"""The most tokens of a write that encodes the block of each token. A larger write goes through all blocks."""

LOG_BLOCK_TOKENS = BLOCK_TOKENS.bit_length() - 1

_NOWHERE = 1 << 40
"""A block number that no cache has, so that writing there raises an error."""

Scatter = tuple[tuple[Tensor, ...], Tensor]
"""Indices and values of an ``index_put`` on packed data."""


def blocks_of(positions: Tensor) -> Tensor:
    """The blocks in which positions lie, int64 [k], distinct."""
    return torch.unique(positions // BLOCK_TOKENS)


def entry_of(residual: Residual, block: Tensor) -> Tensor:
    """The entry of each block, int64 [...]. Blocks without an entry get the last one, which never has their tag."""
    if residual.recent_blocks == 0:
        return block.clamp(max=residual.sink_blocks - 1)
    if residual.num_entries == 1:
        return torch.zeros_like(block)
    cyclic = residual.sink_blocks + (block - residual.sink_blocks) % residual.recent_blocks
    return torch.where(block < residual.sink_blocks, block, cyclic) if residual.sink_blocks else cyclic


def exact_blocks(data: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """The block of each entry, and whether the entry holds it.

    Returns:
        int64 block numbers within the cache and bool, both [batch, num_kv_heads, num_entries].
    """
    block = layout.tags(data).long() - 1
    num_blocks = layout.token_blocks(data)
    return block.clamp(0, num_blocks - 1), (block >= 0) & (block < num_blocks)


def holding_entries(data: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """The entry of each block, and whether the entry holds the block.

    Returns:
        int64 [num_blocks] and bool [num_blocks, batch, num_kv_heads].
    """
    assert layout.residual is not None
    block = torch.arange(layout.token_blocks(data), device=data.device)
    entry = entry_of(layout.residual, block)
    return entry, (layout.tags(data)[..., entry] == block + 1).permute(2, 0, 1)


def with_exact_blocks(x: Tensor, data: Tensor, layout: PackedLayout, *, stored_basis: bool = False) -> Tensor:
    """Replace the dequantized blocks ``x`` by the exact blocks in the header of ``data``, where there are any.

    Args:
        x: float32 [num_blocks, batch, num_kv_heads, BLOCK_TOKENS, head_dim].
        data: the packed data, with its header.
        layout: the layout of ``data``, with a residual.
        stored_basis: whether ``x`` is in the stored basis: exact blocks are then rotated if the format is rotated.

    Returns:
        Float32, of the shape of ``x``.
    """
    rows = layout.rows(data).float()
    if stored_basis and layout.format.rotated:
        rows = rotate(rows, layout.format.rotation_seed)
    entry, exact = holding_entries(data, layout)
    return torch.where(exact[..., None, None], rows[:, :, entry].permute(2, 0, 1, 3, 4), x)


@dataclass(frozen=True)
class Update:
    """The blocks and entries that a write changes, for every sequence and head.

    Attributes:
        block: the blocks of tokens that change, int64 [batch or 1, 1, k].
        sections: the new sections of these blocks, each [batch, num_kv_heads, k, ...].
        entry: the entries that change, int64 [batch or 1, 1, m].
        rows: the new tokens of these entries, [batch, num_kv_heads, m, BLOCK_TOKENS, head_dim].
        tags: the new tags of these entries, int64 [batch, num_kv_heads, m].
    """

    block: Tensor
    sections: dict[str, Tensor]
    entry: Tensor
    rows: Tensor
    tags: Tensor

    def packed(self, layout: PackedLayout) -> Tensor:
        """The new packed blocks, uint8 [batch, num_kv_heads, k, block_bytes]."""
        return torch.cat(layout.block_byte_values(self.sections), -1).to(torch.uint8)

    def entry_scatter(self, layout: PackedLayout) -> Scatter:
        """The scatter that writes only the entries, to the packed data or to its header."""
        return entry_scatter(layout, self.entry, self.rows, self.tags)

    def scatter(self, data: Tensor, layout: PackedLayout) -> Scatter:
        """The scatter that writes all changes to the packed ``data``; ``entry`` must hold one entry for each block.

        It is a single scatter because several in a row would not become in-place stores in a compiled graph.
        """
        if self.block.shape[-1] == 1 and layout.block_bytes % layout.row_bytes == 0:
            return self._whole_blocks(data, layout)
        byte = torch.arange(layout.block_bytes + layout.written_entry_bytes, device=self.block.device)
        in_block = byte < layout.block_bytes
        entry_block, entry_offset = layout.entry_place(self.entry[..., None], byte - layout.block_bytes)
        block = torch.where(in_block, self._place(layout)[..., None], entry_block)
        offset = torch.where(in_block, byte, entry_offset)
        values = layout.block_byte_values(self._sections_of_one()) + layout.entry_byte_values(self.rows, self.tags)
        return _scatter(block, offset, values)

    def _whole_blocks(self, data: Tensor, layout: PackedLayout) -> Scatter:
        """:meth:`scatter` of one block and its entry: the block, then all blocks of the header in which the entry lies.

        The other bytes of these blocks are written back unchanged. Generated code then copies rows, and computes
        neither a place nor a value for single bytes.
        """
        of_entry = layout.entry_blocks(self.entry[:, 0]).T  # [m, batch or 1]
        number = torch.arange(1 + of_entry.shape[0], device=data.device)[:, None]
        place = torch.where(number == 0, self._place(layout)[:, 0, 0], of_entry[(number[:, 0] - 1).clamp(min=0)])
        sequence, head = (torch.arange(size, device=data.device) for size in self.tags.shape[:2])
        if place.shape[1] == 1:  # the same blocks of all sequences
            place = computed_once(place[:, 0])[:, None]
            index: tuple[Tensor, ...] = (place[:, 0],)
        else:
            place = computed_once(place)
            index = place, sequence
        row = place[..., None] * layout.rows_per_block + torch.arange(layout.rows_per_block, device=data.device)
        token = (row - layout.first_row(self.entry[:, 0])).unsqueeze(2)
        row = row.unsqueeze(2)  # [1 + m, batch or 1, 1, rows_per_block]

        # All values are [1 + m, batch, num_kv_heads, rows_per_block, row_bytes], as they are stored.
        old = data[index].unflatten(-1, (-1, layout.row_bytes))
        new = _bytes_of_rows(self.rows)[sequence[:, None, None], head[:, None], token.clamp(0, BLOCK_TOKENS - 1)]
        tag_row = computed_once(layout.with_tag(old[1, :, :, 0], self.entry, self.tags).to(torch.uint8))
        packed = computed_once(self.packed(layout)).squeeze(2).unflatten(-1, (-1, layout.row_bytes))
        is_packed, is_tag = (number == 0)[..., None, None], row == 0
        is_new = (token >= 0) & (token < BLOCK_TOKENS) & ~is_packed
        values = _chosen([(is_packed, packed), (is_new, new), (is_tag & ~is_packed, tag_row[:, :, None])], old)
        return index, values.flatten(-2)

    def _place(self, layout: PackedLayout) -> Tensor:
        """The places of the blocks in the packed data. A negative block must not become a block of the header."""
        return torch.where(self.block < 0, _NOWHERE, self.block + layout.header_blocks)

    def _sections_of_one(self) -> dict[str, Tensor]:
        """The sections, equal for all occurrences of a block: rounding may differ, and their bytes must not mix."""
        if self.block.shape[-1] == 1:
            return self.sections
        same = (self.block[..., None] == self.block[..., None, :]).int().argmax(-1)
        sequence, head = _sequences_and_heads(self.tags)
        return {name: section[sequence, head, same] for name, section in self.sections.items()}


def entry_scatter(layout: PackedLayout, entry: Tensor, rows: Tensor, tags: Tensor) -> Scatter:
    """The scatter that writes tokens and tags of entries; arguments as in :class:`Update`."""
    byte = torch.arange(layout.written_entry_bytes, device=entry.device)
    return _scatter(*layout.entry_place(entry[..., None], byte), layout.entry_byte_values(rows, tags))


def _scatter(block: Tensor, offset: Tensor, values: list[Tensor]) -> Scatter:
    """A scatter of bytes for every sequence and head.

    Args:
        block, offset: int64, broadcast to [batch or 1, 1, k, nbytes]: where the bytes lie.
        values: int32 tensors that concatenate to [batch, num_kv_heads, k, nbytes].
    """
    sequence, head = _sequences_and_heads(values[0])
    return (block, sequence[..., None], head[..., None], offset), torch.cat(values, -1).to(torch.uint8)


def _chosen(choices: list[tuple[Tensor, Tensor]], otherwise: Tensor) -> Tensor:
    """For each row, the bytes of the choice whose condition holds, at most one; ``otherwise`` where no condition holds.

    It is computed on bits, because generated code has no fast choice between vectors of bytes.

    Args:
        choices: conditions, bool that broadcasts to [...], and rows, uint8 [..., nbytes].
        otherwise: uint8 [..., nbytes].
    """
    masks = [torch.where(condition, 0xFF, 0).to(torch.uint8)[..., None] for condition, _ in choices]
    result = otherwise & ~functools.reduce(torch.bitwise_or, masks)
    for mask, (_, rows) in zip(masks, choices, strict=True):
        result = result | (rows & mask)
    return result


def _bytes_of_rows(rows: Tensor) -> Tensor:
    """The bytes of the rows of one entry, uint8 [batch, num_kv_heads, BLOCK_TOKENS, row_bytes].

    The view of one dimension has the same strides in all releases of Inductor. It is a call of PyTorch, which takes
    less time than arithmetic on every byte.
    """
    return rows.reshape(-1).view(torch.uint8).view(*rows.shape[:2], BLOCK_TOKENS, rows.shape[-1] * rows.dtype.itemsize)


def token_update(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None, blocks: Tensor | None = None
) -> Update:
    """The changes of writing the tokens ``x`` at ``positions``; arguments as in ``packing.write_tokens_``."""
    assert layout.residual is not None
    token = torch.arange(x.shape[2], device=x.device)
    positions = torch.atleast_2d(positions).unsqueeze(1)  # [batch or 1, 1, n]
    valid = torch.atleast_2d(valid).unsqueeze(1) if valid is not None else None
    if is_few(x):
        block = positions >> LOG_BLOCK_TOKENS  # Inductor divides by a call, in each iteration of a loop
        place = block[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=x.device)
        chosen = place[..., None] == positions[..., None, None, :]
        if valid is not None:
            chosen = chosen & valid[..., None, None, :]
        source = torch.where(chosen, token, -1).amax(-1)
        entry = entry_of(layout.residual, block)
        if layout.residual.num_entries > 1:  # else it is constant
            entry = computed_once(entry)
        touched = None if valid is None else (source >= 0).any(-1)
    else:
        token = token.expand(positions.shape) if valid is None else torch.where(valid, token, -1)
        places = _empty_places(data, layout, *positions.shape[:2]).scatter(-1, positions, token)
        block, entry, source = _all_rows(data, layout, places, blocks)
        touched = (source >= 0).any(-1)
    sequence, head = _sequences_and_heads(data[0])
    vectors = x[sequence[..., None], head[..., None], source.clamp(min=0)]
    return _update(data, layout, block, entry, touched, source >= 0, vectors)


def is_few(x: Tensor) -> bool:
    """Whether a write of ``x`` [batch, num_kv_heads, n, head_dim] encodes only the blocks of its tokens."""
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
    """The changes of writing single vectors; arguments as in ``packing.write_vectors_``."""
    shape = vectors.shape[:-1]
    index = torch.arange(shape.numel(), device=data.device).reshape(shape)
    index = index if valid is None else torch.where(valid, index, -1)
    places = _empty_places(data, layout, *data.shape[1:3]).index_put((sequence, head, position), index)
    block, entry, source = _all_rows(data, layout, places, blocks)
    vectors = vectors.reshape(-1, layout.head_dim)[source.clamp(min=0)]
    return _update(data, layout, block, entry, (source >= 0).any(-1), source >= 0, vectors)


def _empty_places(data: Tensor, layout: PackedLayout, batch: int, heads: int) -> Tensor:
    """The number of the vector that is written at each position, here -1 for none: int64 [batch, heads, tokens]."""
    size = (batch, heads, layout.token_blocks(data) * BLOCK_TOKENS)
    return torch.full(size, -1, dtype=torch.int64, device=data.device)


def _all_rows(
    data: Tensor, layout: PackedLayout, places: Tensor, blocks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks, entries and sources of a write that goes through many blocks.

    Returns:
        ``blocks`` or all blocks, [1, 1, k]; all entries, [1, 1, m]; ``places`` of the blocks, [..., k, BLOCK_TOKENS].
    """
    places = places.unflatten(-1, (-1, BLOCK_TOKENS))
    if blocks is None:
        blocks = torch.arange(layout.token_blocks(data), device=data.device)
    else:
        places = places[:, :, blocks]
    return blocks[None, None], all_entries(layout, data), places


def all_entries(layout: PackedLayout, data: Tensor) -> Tensor:
    """The numbers of all entries, int64 [1, 1, num_entries]."""
    assert layout.residual is not None
    return torch.arange(layout.residual.num_entries, device=data.device)[None, None]


def _sequences_and_heads(per_head: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of sequences, [batch, 1, 1], and heads, [1, num_kv_heads, 1], for a tensor [batch, num_kv_heads, ...]."""
    batch, heads = (torch.arange(size, device=per_head.device) for size in per_head.shape[:2])
    return batch[:, None, None], heads[None, :, None]


def _update(
    data: Tensor,
    layout: PackedLayout,
    block: Tensor,
    entry: Tensor,
    touched: Tensor | None,
    written: Tensor,
    vectors: Tensor,
) -> Update:
    """Steps 1 to 4 of the text at the top of this file, for some blocks of every sequence and head.

    Args:
        data, layout: the cache before the write.
        block: the blocks to encode, int64 [batch or 1, 1, k]. If a block occurs twice, its other arguments
            occur twice, too.
        entry: the entries to write, int64 [batch or 1, 1, m]: at least the entries of ``block``.
        touched: bool [batch or 1, num_kv_heads or 1, k]: the blocks to which a token is written; None means all.
        written: bool [batch or 1, num_kv_heads or 1, k, BLOCK_TOKENS]: the tokens that are written.
        vectors: [batch, num_kv_heads, k, BLOCK_TOKENS, head_dim]: the new value of each token that is written.
    """
    residual, fmt = layout.residual, layout.format
    assert residual is not None
    sequence, head = _sequences_and_heads(data[0])
    rows, tags, entry_of_block = layout.rows(data), layout.tags(data), entry_of(residual, block)
    sections = {name: section[block, sequence, head] for name, section in layout.split(data).items()}

    exact = tags[sequence, head, entry_of_block] == block + 1
    decoded = fmt.decode(sections).to(residual.dtype)
    contents = torch.where(exact[..., None, None], rows[sequence, head, entry_of_block], decoded)
    contents = torch.where(written[..., None], vectors.to(residual.dtype), contents)

    encoded, old_sections = fmt.encode(contents), sections
    if fmt.granularity == "channel":
        changed = touched[..., None, None] if touched is not None else None
    else:
        changed = written[..., None]
    sections = encoded
    if changed is not None:
        sections = {name: torch.where(changed, encoded[name], section) for name, section in old_sections.items()}

    if touched is None and residual.recent_blocks and block.shape[-1] == 1:
        return Update(
            block, sections, entry, contents, (block + 1).expand(exact.shape)
        )  # one token: its block gets the entry
    new_block, row = _winners(residual, block, entry, entry_of_block, touched)
    taken = new_block >= 0
    new_rows = torch.where(taken[..., None, None], contents[sequence, head, row], rows[sequence, head, entry])
    new_tags = torch.where(taken, new_block + 1, tags[sequence, head, entry])
    return Update(block, sections, entry, new_rows, new_tags)


def _winners(
    residual: Residual, block: Tensor, entry: Tensor, entry_of_block: Tensor, touched: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The block that each entry gets, or -1, and its index in ``block``; int64 [batch or 1, num_kv_heads or 1, m]."""
    claims = entry[..., None] == entry_of_block[..., None, :]
    if touched is not None:
        claims = claims & touched[..., None, :]
    if residual.recent_blocks == 0:
        claims = claims & (block < residual.sink_blocks)[..., None, :]
    claiming = torch.where(claims, block[..., None, :], -1)
    return claiming.amax(-1), claiming.argmax(-1)


def header_of(layout: PackedLayout, x: Tensor, num_written: Tensor | None = None) -> Tensor:
    """The header of a cache that holds exactly the tokens ``x`` [batch, num_kv_heads, n, head_dim].

    The recent blocks of a head end with its last token that is not zero. In a cache of fixed size that was filled from
    its start, this is the last token written, and not the end of the cache.

    Args:
        layout: the layout of the cache, with a residual.
        x: the tokens.
        num_written: int64 [] or [batch]: the recent blocks end with the last of this number of tokens instead, because
            the others were never written. 0 if the number is not known.

    Returns:
        uint8 [header_blocks, batch, num_kv_heads, block_bytes].
    """
    residual = layout.residual
    assert residual is not None
    batch, heads, n, _ = x.shape
    if x.numel() == 0:
        return x.new_zeros((layout.header_blocks, batch, heads, layout.block_bytes), dtype=torch.uint8)
    block = torch.arange(n, device=x.device) // BLOCK_TOKENS
    is_zero = (x.amax(-1) == 0) & (x.amin(-1) == 0)  # without a temporary of the size of x
    last = torch.where(is_zero, -1, block).amax(-1, keepdim=True)  # [batch, num_kv_heads, 1]
    if num_written is not None:
        num_written = num_written.to(x.device).reshape(-1, 1, 1)
        last = torch.where(num_written > 0, (num_written - 1) // BLOCK_TOKENS, last)
    entry = all_entries(layout, x)
    cycles = torch.where(entry < residual.sink_blocks, 0, (last - entry) // max(residual.recent_blocks, 1))
    block_of_entry = entry + cycles * residual.recent_blocks
    is_exact = last >= entry

    token = block_of_entry[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS, device=x.device)
    sequence, head = _sequences_and_heads(x)
    rows = x[sequence[..., None], head[..., None], token.clamp(0, n - 1)].to(residual.dtype)
    rows = torch.where((is_exact[..., None] & (token < n))[..., None], rows, 0.0)
    return _header_of_entries(layout, rows, torch.where(is_exact, block_of_entry + 1, 0))


def _header_of_entries(layout: PackedLayout, rows: Tensor, tags: Tensor) -> Tensor:
    """The header that holds ``rows`` [batch, num_kv_heads, num_entries, BLOCK_TOKENS, head_dim] and their ``tags``."""
    tag_bytes = tags.int().contiguous().view(torch.uint8)
    first_row = F.pad(tag_bytes, (0, layout.row_bytes - tag_bytes.shape[-1])).unsqueeze(2)
    data = torch.cat([first_row, rows.flatten(2, 3).contiguous().view(torch.uint8)], 2)
    data = F.pad(data, (0, 0, 0, layout.header_blocks * layout.rows_per_block - data.shape[2]))
    data = data.unflatten(2, (layout.header_blocks, layout.rows_per_block)).flatten(3)
    return F.pad(data, (0, layout.block_bytes - data.shape[3])).permute(2, 0, 1, 3).contiguous()
