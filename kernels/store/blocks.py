"""Write many tokens to a packed cache with a residual in Triton, block by block.

:mod:`kvcompile.kernels.spec.residual` describes a write in four steps; :func:`write_block` takes them for one block of
one head. The kernels here fix the order of the blocks. Two blocks of the same write may have the same entry: one block
takes the entry, and the other block leaves it, but is first read from it. One program therefore writes both, first the
block that leaves the entry.
"""

from __future__ import annotations

from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.store.tokens import encode_tile, load_positions, store_sections
from kvcompile.kernels.tiles.header import block_ptr, entry_of, has_entry, load_rows, row_ptrs, tag_ptrs
from kvcompile.kernels.tiles.rows import decode_rows
from kvcompile.kernels.tiles.runs import rotation_matrix


@jit(do_not_specialize=["num_tokens", "capacity"])
def place_tokens_kernel(
    places_ptr, positions_ptr, valid_ptr, position_strides, valid_strides, num_tokens, capacity,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Invert ``positions``, and find the block that takes each entry. Grid (batch, ceil(num_tokens / TOKENS)).

    Args:
        places_ptr: int32 [batch, capacity + OPERAND.num_entries], all -1 before. First, for each token of the cache,
            the token of ``x`` that is written there; then, for each entry, the last written block that has it.
        positions_ptr, valid_ptr, capacity: as in :func:`kvcompile.kernels.store.tokens.store_kernel`.
    """
    batch = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    position, written = load_positions(
        positions_ptr, valid_ptr, batch, token, position_strides, valid_strides, num_tokens, capacity, HAS_VALID
    )
    places_ptr += batch * (capacity + OPERAND.num_entries)
    tl.store(places_ptr + position, token.to(tl.int32), mask=written)
    block = (position // OPERAND.block_tokens).to(tl.int32)
    winner_ptrs = places_ptr + capacity + entry_of(block, OPERAND)
    # Only a block after the known one can take the entry. Checking it first saves most atomics to the same address.
    known = tl.load(winner_ptrs, mask=written, other=0)
    tl.atomic_max(winner_ptrs, block, mask=written & has_entry(block, OPERAND) & (block > known))


@jit(do_not_specialize=["num_kv_heads"])
def copy_tags_kernel(data_ptr, tags_ptr, data_strides, num_kv_heads, OPERAND: tl.constexpr):
    """Copy the tags of a head's entries to ``tags_ptr``, int32 [batch, num_kv_heads, OPERAND.num_entries].

    Grid (batch * num_kv_heads,).
    """
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    header_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + head * data_strides[2]
    entry = tl.arange(0, OPERAND.residual.padded_entries)
    tags = tl.load(tag_ptrs(header_ptr, entry), mask=entry < OPERAND.num_entries)
    tags_ptr += tl.program_id(0).to(tl.int64) * OPERAND.num_entries
    tl.store(tags_ptr + entry, tags, mask=entry < OPERAND.num_entries)


@jit(do_not_specialize=["num_kv_heads", "capacity", "num_blocks", "blocks_per_program"])
def store_blocks_kernel(
    data_ptr, x_ptr, places_ptr, tags_ptr, data_strides, x_strides, num_kv_heads, capacity, num_blocks,
    blocks_per_program, static_scale, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write tokens to some blocks of one head. Grid (batch * num_kv_heads, ceil(num_blocks / blocks_per_program)).

    Args:
        data_ptr, x_ptr, static_scale: as in :func:`kvcompile.kernels.store.tokens.store_kernel`.
        places_ptr: the result of :func:`place_tokens_kernel`.
        tags_ptr: int32 [batch, num_kv_heads, OPERAND.num_entries]: the tags before the write. Programs change the tags
            in the header.
        num_blocks: blocks of tokens.
    """
    batch = (tl.program_id(0) // num_kv_heads).to(tl.int64)
    head = (tl.program_id(0) % num_kv_heads).to(tl.int64)
    header_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + head * data_strides[2]
    x_ptr += batch * x_strides[0] + head * x_strides[1]
    places_ptr += batch * (capacity + OPERAND.num_entries)
    tags_ptr += tl.program_id(0).to(tl.int64) * OPERAND.num_entries
    matrix = rotation_matrix(OPERAND, OPERAND.block_tokens)
    for i in range(2 * blocks_per_program):
        own = tl.program_id(1) * blocks_per_program + i // 2
        if own < num_blocks:
            entry = entry_of(own, OPERAND)
            before = tl.load(tags_ptr + entry) - 1
            takes_entry = tl.load(places_ptr + capacity + entry) == own
            # If this block takes its entry, first write the block that leaves it. Then write this block, unless
            # it leaves its entry: then another program writes it.
            is_block = (before >= 0) & (before < num_blocks)
            is_block = is_block & (entry_of(tl.maximum(before, 0), OPERAND) == entry)
            leaves = (i % 2 == 0) & takes_entry & (before != own) & is_block
            stays = (i % 2 == 1) & (takes_entry | (before != own))
            if leaves | stays:
                block = tl.where(leaves, before, own)
                place = block.to(tl.int64) * OPERAND.block_tokens + tl.arange(0, OPERAND.block_tokens)
                source = tl.load(places_ptr + place)
                if tl.max(source, 0) >= 0:
                    write_block(
                        header_ptr, data_strides[0], block, source, x_ptr, x_strides, before == block,
                        takes_entry & stays, matrix, static_scale, OPERAND, PRECISION,
                    )  # fmt: skip


@jit
def write_block(
    header_ptr, stride_block, block, source, x_ptr, x_strides, exact, takes_entry, matrix, static_scale,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write tokens to one block of one head.

    Args:
        source: [block_tokens], the token of ``x`` for each row of the block, or -1 for a row that is not written.
        exact: whether the block's entry holds the block before the write.
        takes_entry: whether the entry holds the block after the write.
        matrix: :func:`kvcompile.kernels.tiles.runs.rotation_matrix` for a block.
    """
    BLOCK_TOKENS: tl.constexpr = OPERAND.block_tokens
    packed_ptr = block_ptr(header_ptr, stride_block, block, OPERAND)
    entry = entry_of(block, OPERAND)
    written = source >= 0
    all_written = tl.min(written.to(tl.int32), 0) > 0
    channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
    in_head = channel < OPERAND.head_dim
    x_ptrs = x_ptr + (source.to(tl.int64) * x_strides[2])[:, None] + channel * x_strides[3]
    new = tl.load(x_ptrs, mask=written[:, None] & in_head, other=0.0).to(OPERAND.residual.dtype)

    contents = new
    if OPERAND.granularity == "channel":
        if all_written == 0:
            # The entry is read before it is known whether it holds this block, so that the loads overlap.
            old = load_rows(header_ptr, stride_block, entry, 0, OPERAND, BLOCK_TOKENS)
            if exact == 0:
                old = decode_rows(packed_ptr, 0, static_scale, OPERAND, BLOCK_TOKENS).to(OPERAND.residual.dtype)
            contents = tl.where(written[:, None], new, old)
    elif (all_written == 0) & takes_entry & (exact == 0):  # an entry that holds the block keeps its rows
        old = decode_rows(packed_ptr, 0, static_scale, OPERAND, BLOCK_TOKENS).to(OPERAND.residual.dtype)
        contents = tl.where(written[:, None], new, old)
    tl.debug_barrier()  # other threads read old bytes before any thread writes

    encoded = encode_tile(contents, matrix, static_scale, OPERAND, PRECISION, False)
    everywhere = tl.full([BLOCK_TOKENS], True, tl.int1)
    if OPERAND.granularity == "channel" or all_written:
        store_sections(packed_ptr, tl.arange(0, BLOCK_TOKENS), everywhere, encoded, OPERAND)
    else:
        store_sections(packed_ptr, tl.arange(0, BLOCK_TOKENS), written, encoded, OPERAND)
    if takes_entry:
        changed = written | (exact == 0)
        ptrs = row_ptrs(header_ptr, stride_block, entry, 0, OPERAND, BLOCK_TOKENS)[:, None] + channel
        tl.store(ptrs, contents, mask=changed[:, None] & in_head)
        tl.store(tag_ptrs(header_ptr, entry), block + 1)
