"""Write a few tokens to a packed cache with a residual in Triton: a step of decoding.

:mod:`kvcompile.kernels.spec.residual` describes a write in four steps. If scales are per token, a token is encoded on
its own, and a program writes one token: the packed token, and its exact row if its block has an entry after the write.
A block that gets the entry by this write also needs its other rows there; the program of its first token decodes these
rows. Programs of the same write never wait for each other: none of them reads bytes that another one writes.

If scales are per channel, a token changes the codes of its whole block. One program writes all blocks of a head. The
most frequent of these writes, one token in a block that an entry holds, has a short path
(:mod:`kvcompile.kernels.store.append`).
"""

from __future__ import annotations

from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.store.append import append_token, appends_tokens
from kvcompile.kernels.store.blocks import write_block
from kvcompile.kernels.store.tokens import encode_tile, load_positions, load_vectors, store_sections
from kvcompile.kernels.tiles.header import block_ptr, entry_of, has_entry, row_ptrs, tag_ptrs
from kvcompile.kernels.tiles.rows import decode_rows
from kvcompile.kernels.tiles.runs import rotation_matrix


@jit(do_not_specialize=["num_tokens", "capacity"])
def store_few_kernel(
    data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_tokens, capacity, static_scale,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write up to TOKENS tokens of one head. Grid (num_tokens, num_kv_heads, batch).

    Arguments are the same as in :func:`kvcompile.kernels.store.tokens.store_kernel`.
    """
    _store_few(
        tl.program_id(1), data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides,
        valid_strides, num_tokens, capacity, static_scale, OPERAND, HAS_VALID, TOKENS, PRECISION,
    )  # fmt: skip


@jit(do_not_specialize=["num_kv_heads", "num_tokens", "capacity"])
def store_few_pair_kernel(
    k_data_ptr, v_data_ptr, key_ptr, value_ptr, positions_ptr, valid_ptr,
    k_data_strides, v_data_strides, key_strides, value_strides, position_strides, valid_strides,
    num_kv_heads, num_tokens, capacity, key_scale, value_scale,
    KEY: tl.constexpr, VALUE: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """:func:`store_few_kernel` for keys and values at the same positions. Grid (num_tokens, 2 * num_kv_heads, batch).

    The second dimension of the grid has the heads of keys, and after them the heads of values.
    """
    head = tl.program_id(1)
    if head < num_kv_heads:
        _store_few(
            head, k_data_ptr, key_ptr, positions_ptr, valid_ptr, k_data_strides, key_strides, position_strides,
            valid_strides, num_tokens, capacity, key_scale, KEY, HAS_VALID, TOKENS, PRECISION,
        )  # fmt: skip
    else:
        _store_few(
            head - num_kv_heads, v_data_ptr, value_ptr, positions_ptr, valid_ptr, v_data_strides, value_strides,
            position_strides, valid_strides, num_tokens, capacity, value_scale, VALUE, HAS_VALID, TOKENS, PRECISION,
        )  # fmt: skip


@jit
def _store_few(
    head, data_ptr, x_ptr, positions_ptr, valid_ptr, data_strides, x_strides, position_strides, valid_strides,
    num_tokens, capacity, static_scale,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    head = head.to(tl.int64)
    header_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + head * data_strides[2]
    x_ptr += batch * x_strides[0] + head * x_strides[1]
    token = tl.arange(0, TOKENS)
    if OPERAND.granularity == "channel":
        if tl.program_id(0) == 0:
            is_done: tl.constexpr = False
            if TOKENS == 1 and appends_tokens(OPERAND):
                position, written = load_positions(
                    positions_ptr, valid_ptr, batch, token.to(tl.int64), position_strides, valid_strides, num_tokens,
                    capacity, HAS_VALID,
                )  # fmt: skip
                is_done = append_token(
                    header_ptr, data_strides[0], x_ptr, x_strides, position, written, static_scale, OPERAND
                )
            if is_done == 0:
                _write_blocks(
                    header_ptr, data_strides[0], x_ptr, x_strides, positions_ptr, valid_ptr, batch, position_strides,
                    valid_strides, num_tokens, capacity, static_scale, OPERAND, HAS_VALID, TOKENS, PRECISION,
                )  # fmt: skip
    else:
        own = tl.program_id(0)
        x = load_vectors(x_ptr + own.to(tl.int64) * x_strides[2], x_strides, 1, OPERAND, 1)
        position, written = load_positions(
            positions_ptr, valid_ptr, batch, token.to(tl.int64), position_strides, valid_strides, num_tokens, capacity,
            HAS_VALID,
        )  # fmt: skip
        _write_token(header_ptr, data_strides[0], x, own, token, position, written, static_scale, OPERAND, PRECISION)


@jit
def _write_token(
    header_ptr, stride_block, x, own, token, position, written, static_scale,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the token ``own`` of a write of tokens ``token`` [TOKENS] to one head.

    Args:
        x: [1, padded_head_dim], the vector of the token.
        position, written: of all tokens of the write, [TOKENS]. The last token at a position counts.
    """
    position = tl.where(written, position, -1).to(tl.int32)
    own_position = tl.max(tl.where(token == own, position, -1), 0)
    if (own_position >= 0) & (tl.max(tl.where(position == own_position, token, -1), 0) == own):
        block = own_position // OPERAND.block_tokens
        row = own_position % OPERAND.block_tokens + tl.arange(0, 1)
        packed_ptr = block_ptr(header_ptr, stride_block, block, OPERAND)
        is_written = row >= 0
        if OPERAND.residual is not None:
            x = x.to(OPERAND.residual.dtype)
        encoded = encode_tile(x, 0, static_scale, OPERAND, PRECISION, False)
        store_sections(packed_ptr, row, is_written, encoded, OPERAND)
        if OPERAND.residual is not None:
            _write_exact(
                header_ptr, stride_block, packed_ptr, x, own, token, position, block, row, static_scale, OPERAND
            )


@jit
def _write_exact(
    header_ptr, stride_block, packed_ptr, x, own, token, position, block, row, static_scale, OPERAND: tl.constexpr,
):  # fmt: skip
    """Write the token ``own`` to the entry of its block as well, if the block has the entry after this write."""
    blocks = tl.where(position >= 0, position // OPERAND.block_tokens, -1)
    entry = entry_of(block, OPERAND)
    rivals = (blocks >= 0) & has_entry(blocks, OPERAND) & (entry_of(tl.maximum(blocks, 0), OPERAND) == entry)
    if has_entry(block, OPERAND) & (tl.max(tl.where(rivals, blocks, -1), 0) == block):
        channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
        ptrs = row_ptrs(header_ptr, stride_block, entry, row, OPERAND, 1)[:, None]
        tl.store(ptrs + channel, x, mask=channel < OPERAND.head_dim)
        is_first = tl.max(((blocks == block) & (token < own)).to(tl.int32), 0) == 0
        if is_first & (tl.load(tag_ptrs(header_ptr, entry)) != block + 1):
            _fill_entry(header_ptr, stride_block, packed_ptr, block, entry, position, static_scale, OPERAND)


@jit
def _fill_entry(header_ptr, stride_block, packed_ptr, block, entry, position, static_scale, OPERAND: tl.constexpr):
    """Give ``entry`` to ``block``: decode all rows of the block except rows at a ``position`` of this write."""
    ROWS: tl.constexpr = 16
    channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
    for run in range(OPERAND.block_tokens // ROWS):
        first_row = run * ROWS
        rows = block * OPERAND.block_tokens + first_row + tl.arange(0, ROWS)
        is_old = tl.max((rows[:, None] == position[None, :]).to(tl.int32), 1) == 0
        old = decode_rows(packed_ptr, first_row, static_scale, OPERAND, ROWS).to(OPERAND.residual.dtype)
        ptrs = row_ptrs(header_ptr, stride_block, entry, first_row, OPERAND, ROWS)[:, None] + channel
        tl.store(ptrs, old, mask=is_old[:, None] & (channel < OPERAND.head_dim))
    tl.store(tag_ptrs(header_ptr, entry), block + 1)


@jit(noinline=True)
def _write_blocks(
    header_ptr, stride_block, x_ptr, x_strides, positions_ptr, valid_ptr, batch, position_strides, valid_strides,
    num_tokens, capacity, static_scale,
    OPERAND: tl.constexpr, HAS_VALID: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write tokens to one head block by block.

    It is a separate function in the machine code. Otherwise Triton would give its layouts to ``append_token``, too.

    Two blocks of the write may have the same entry. One takes it, and the contents of the other are still read from it.
    The block that leaves the entry therefore comes first.
    """
    token = tl.arange(0, TOKENS)
    position, written = load_positions(
        positions_ptr, valid_ptr, batch, token.to(tl.int64), position_strides, valid_strides, num_tokens, capacity,
        HAS_VALID,
    )  # fmt: skip
    matrix = rotation_matrix(OPERAND, OPERAND.block_tokens)
    block = tl.where(written, position // OPERAND.block_tokens, -1).to(tl.int32)
    entry = tl.where((block >= 0) & has_entry(block, OPERAND), entry_of(tl.maximum(block, 0), OPERAND), -1)
    for step in range(2 * num_tokens):
        # Each step takes the block of one token, unless an earlier token has the same block. The first num_tokens steps
        # write the blocks that do not take their entry, the others write the blocks that do.
        own_token = step % num_tokens
        own = tl.max(tl.where(token == own_token, block, -1), 0)
        own_entry = tl.max(tl.where(token == own_token, entry, -1), 0)
        takes_entry = (own_entry >= 0) & (tl.max(tl.where(entry == own_entry, block, -1), 0) == own)
        is_first = tl.max(((block == own) & (token < own_token)).to(tl.int32), 0) == 0
        if (own >= 0) & is_first & (takes_entry == (step >= num_tokens)):
            place = own.to(tl.int64) * OPERAND.block_tokens + tl.arange(0, OPERAND.block_tokens)
            is_here = (place[:, None] == position[None, :]) & written[None, :]
            source = tl.max(tl.where(is_here, token[None, :], -1), 1)
            exact = tl.load(tag_ptrs(header_ptr, entry_of(own, OPERAND))) == own + 1
            write_block(
                header_ptr, stride_block, own, source, x_ptr, x_strides, exact, takes_entry, matrix, static_scale,
                OPERAND, PRECISION,
            )  # fmt: skip
