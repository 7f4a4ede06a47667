"""Write the header of a cache that is packed as a whole in Triton.

The specification is :func:`kvcompile.kernels.spec.residual.header_of`. The recent blocks of a head end with its last
token that is not zero, if the caller does not know how many tokens were written. Most caches are filled from their
start, so a few programs at the end find this token, and all other programs then end without reading their tokens.
"""

from __future__ import annotations

from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.layout.references import referred
from kvcompile.kernels.tiles.header import row_ptrs, tag_ptrs


@jit(do_not_specialize=["num_kv_heads", "num_tokens"])
def last_token_kernel(
    x_ptr, last_ptr, x_strides, num_kv_heads, num_tokens, OPERAND: tl.constexpr, TOKENS: tl.constexpr
):
    """Raise ``last_ptr`` to the last of TOKENS tokens that is not zero.

    Grid (batch * num_kv_heads, num_tokens / TOKENS).

    Programs of the last tokens start first. A program that already finds a later token has nothing to do.

    Args:
        x_ptr: [batch, num_kv_heads, num_tokens, head_dim], any float dtype.
        last_ptr: int32 [batch, num_kv_heads], -1 at first.
    """
    row = tl.program_id(0)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * TOKENS
    if tl.load(last_ptr + row) < first + TOKENS - 1:
        token = first + tl.arange(0, TOKENS)
        x = _load_vectors(x_ptr, x_strides, row, num_kv_heads, token, token < num_tokens, OPERAND)
        is_zero = tl.sum((x != 0.0).to(tl.int32), 1) == 0
        last = tl.max(tl.where(is_zero, -1, token), 0)
        if last >= 0:
            tl.atomic_max(last_ptr + row, last)


@jit(do_not_specialize=["num_kv_heads", "num_tokens"])
def store_header_kernel(
    data_ptr, x_ptr, last_ptr, num_written_ptr, data_strides, x_strides, num_written_stride, num_kv_heads, num_tokens,
    OPERAND: tl.constexpr, HAS_NUM_WRITTEN: tl.constexpr,
):  # fmt: skip
    """Write one entry of the header of one head. Grid (batch * num_kv_heads, num_entries).

    Args:
        data_ptr: packed data, uint8, strides (block, batch, head) in bytes.
        x_ptr: all tokens of the cache, [batch, num_kv_heads, num_tokens, head_dim], any float dtype.
        last_ptr: the result of :func:`last_token_kernel`.
        num_written_ptr: with HAS_NUM_WRITTEN int64 [batch], which takes the place of ``last_ptr`` unless it is 0.
    """
    row, entry = tl.program_id(0), tl.program_id(1)
    batch, kv_head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    last = tl.load(last_ptr + row)
    if HAS_NUM_WRITTEN:
        num_written = tl.load(num_written_ptr + batch * num_written_stride[0]).to(tl.int32)
        last = tl.where(num_written > 0, num_written - 1, last)
    last_block = tl.where(last < 0, -1, last // OPERAND.block_tokens)
    SINKS: tl.constexpr = OPERAND.residual.sink_blocks
    RECENT: tl.constexpr = OPERAND.residual.recent_blocks
    block = entry
    if RECENT > 0:
        block += tl.where(entry < SINKS, 0, tl.maximum(last_block - entry, 0) // RECENT * RECENT)
    is_held = last_block >= entry

    header_ptr = referred(data_ptr, OPERAND) + batch * data_strides[1] + kv_head * data_strides[2]
    tl.store(tag_ptrs(header_ptr, entry), tl.where(is_held, block + 1, 0))
    token = block * OPERAND.block_tokens + tl.arange(0, OPERAND.block_tokens)
    x = _load_vectors(x_ptr, x_strides, row, num_kv_heads, token, is_held & (token < num_tokens), OPERAND)
    channel = tl.arange(0, OPERAND.padded_head_dim)[None, :]
    ptrs = row_ptrs(header_ptr, data_strides[0], entry, 0, OPERAND, OPERAND.block_tokens)[:, None] + channel
    tl.store(ptrs, x.to(OPERAND.residual.dtype), mask=channel < OPERAND.head_dim)


@jit
def _load_vectors(x_ptr, x_strides, row, num_kv_heads, token, in_bounds, OPERAND: tl.constexpr):
    """The vectors of tokens of one head, [tokens, padded_head_dim]; 0 where not ``in_bounds``, and in padding."""
    batch, kv_head = (row // num_kv_heads).to(tl.int64), (row % num_kv_heads).to(tl.int64)
    channel = tl.arange(0, OPERAND.padded_head_dim)
    head_ptr = x_ptr + batch * x_strides[0] + kv_head * x_strides[1]
    ptrs = head_ptr + token.to(tl.int64)[:, None] * x_strides[2] + channel[None, :] * x_strides[3]
    return tl.load(ptrs, mask=in_bounds[:, None] & (channel < OPERAND.head_dim)[None, :], other=0.0)
