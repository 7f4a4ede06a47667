"""The header of a packed cache in Triton: entries that hold exact blocks of tokens.

:mod:`kvcompile.kernels.layout.packed_layout` has the places of the header's bytes, and
:mod:`kvcompile.kernels.spec.residual` their meaning. A ``header_ptr`` points to the first block of the header of one
head of one sequence.
"""

from __future__ import annotations

from kvcompile.kernels.lang.tiles import prefetch_lines
from kvcompile.kernels.lang.triton import jit, tl


@jit
def block_ptr(header_ptr, stride_block, block, OPERAND: tl.constexpr):
    """Pointer to a packed block of tokens."""
    return header_ptr + (block.to(tl.int64) + OPERAND.header_blocks) * stride_block


@jit
def tag_ptrs(header_ptr, entry):
    """Pointers to the tags of entries: int32, 1 plus the block that the entry holds, or 0 for an empty entry."""
    return header_ptr.to(tl.pointer_type(tl.int32)) + entry


@jit
def entry_of(block, OPERAND: tl.constexpr):
    """The entry of each block, int32. Blocks without an entry get one that never has their tag."""
    SINKS: tl.constexpr = OPERAND.residual.sink_blocks
    RECENT: tl.constexpr = OPERAND.residual.recent_blocks
    if RECENT == 0:
        entry = tl.minimum(block, SINKS - 1)
    else:
        entry = tl.where(block < SINKS, block, SINKS + (tl.maximum(block, SINKS) - SINKS) % RECENT)
    return entry


@jit
def has_entry(block, OPERAND: tl.constexpr):
    """Whether each block has an entry."""
    return block < (OPERAND.residual.sink_blocks if OPERAND.residual.recent_blocks == 0 else 1 << 30)


@jit
def is_exact(header_ptr, block, OPERAND: tl.constexpr):
    """Whether an entry holds each ``block``, int32 of any shape, not negative."""
    exact = block < 0
    if OPERAND.num_entries > 0:
        exact = tl.load(tag_ptrs(header_ptr, entry_of(block, OPERAND))) == block + 1
    return exact


@jit
def row_ptrs(header_ptr, stride_block, entry, first_row, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Pointers to TOKENS tokens of an entry, from ``first_row`` on, [TOKENS], with elements of the residual's dtype."""
    ROWS_BYTES: tl.constexpr = OPERAND.residual.rows_per_block * OPERAND.residual.row_bytes
    row = 1 + entry * OPERAND.block_tokens + first_row + tl.arange(0, TOKENS)
    # The bytes of all rows before, and of the gap after the rows of each block before. Remainders would take twice as
    # many instructions.
    gaps = (row // OPERAND.residual.rows_per_block).to(tl.int64) * (stride_block - ROWS_BYTES)
    ptrs = header_ptr + gaps + row.to(tl.int64) * OPERAND.residual.row_bytes
    return ptrs.to(tl.pointer_type(OPERAND.residual.dtype))


@jit
def load_rows(header_ptr, stride_block, entry, first_row, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """The tokens of :func:`row_ptrs`, [TOKENS, padded_head_dim] in the residual's dtype; 0 in padding."""
    channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
    ptrs = row_ptrs(header_ptr, stride_block, entry, first_row, OPERAND, TOKENS)[:, None] + channel
    return tl.load(ptrs, mask=channel < OPERAND.head_dim, other=0.0)


@jit
def prefetch_rows(header_ptr, stride_block, entry, first_row, OPERAND: tl.constexpr, TOKENS: tl.constexpr):
    """Prefetch the tokens of :func:`row_ptrs` to the L2 cache, if the cache has ``entry``."""
    if OPERAND.num_entries > 0 and OPERAND.ptx > 0:
        LINES: tl.constexpr = OPERAND.residual.lines_per_row
        entry = tl.minimum(entry, OPERAND.num_entries - 1)
        ptrs = row_ptrs(header_ptr, stride_block, entry, first_row, OPERAND, TOKENS).to(tl.pointer_type(tl.uint8))
        byte = tl.minimum(tl.arange(0, LINES) * 128, OPERAND.residual.row_bytes - 1)
        prefetch_lines(ptrs[:, None] + byte[None, :])
