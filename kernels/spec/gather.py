"""Gathering tokens of a packed pool by their slots: bytes are copied, without dequantizing or quantizing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.kernels.formats.bit_planes import Section
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks


def gather_tokens(data: Tensor, layout: PackedLayout, slots: Tensor) -> Tensor:
    """Packed data of sequences whose tokens lie anywhere in one pool.

    The function is traceable. Every byte of the result is read from one place of ``data``, so that Inductor makes one
    pointwise kernel of it.

    Args:
        data: uint8 [num_blocks, 1, num_kv_heads, block_bytes], the pool: a packed cache of one sequence.
        layout: the layout of ``data`` and of the result, without a residual.
        slots: int64 [batch, n], the slot in the pool of each token of the result; duplicates are allowed.

    Returns:
        uint8 [ceil(n / BLOCK_TOKENS), batch, num_kv_heads, block_bytes]. Tokens after the last token repeat slot 0.

    Raises:
        ValueError: the layout has a residual; exact tokens are not part of the bytes of a token.
        IndexError: a slot is outside of the pool.
    """
    if layout.residual is not None:
        raise ValueError(f"{layout.spec}: tokens of a cache with a residual cannot be gathered; give it no residual")
    batch, num_tokens = slots.shape
    blocks = num_blocks(num_tokens)
    slots = F.pad(slots, (0, blocks * BLOCK_TOKENS - num_tokens)).view(batch, blocks, BLOCK_TOKENS)
    columns = [_gather_section(data, layout, section, slots) for section in layout.sections]
    return torch.cat(columns, -1).to(torch.uint8)


def _gather_section(data: Tensor, layout: PackedLayout, section: Section, slots: Tensor) -> Tensor:
    """The bytes of one section, int32 [num_blocks, batch, num_kv_heads, nbytes]; Inductor fuses ``cat`` of int32."""
    block, token = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    begin = layout.section_offsets[section.name]
    flat = data[:, 0, :, begin : begin + section.nbytes * BLOCK_TOKENS]
    if layout.column_major(section):
        columns = flat.unflatten(-1, (section.width, BLOCK_TOKENS, section.dtype.itemsize))
        rows = columns[block, :, :, token].permute(1, 0, 3, 4, 2, 5)
    else:
        rows = flat.unflatten(-1, (BLOCK_TOKENS, section.nbytes))[block, :, token].permute(1, 0, 3, 2, 4)
    return rows.reshape(*rows.shape[:3], section.nbytes * BLOCK_TOKENS).int()
