"""Triton kernels of the DeepSeek-V4 K cache; :mod:`kvcompile.kernels.formats.ds_mla_rows` specifies them bit for bit.

Both kernels move each byte once. A tile is [tokens, scale blocks, channels], and a thread holds 8 channels: 8 bytes of
codes and 16 bytes of bfloat16, which is the widest access. Pages need only be aligned to 8 bytes, and TOKEN_BYTES
guarantees this for any ``block_size``. :mod:`kvcompile.kernels.deepseek_v4.tiles` quantizes and dequantizes tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.deepseek_v4.tiles import (
    DATA_BYTES,
    NOPE_DIM,
    NUM_SCALES,
    QUANT_BLOCK,
    ROPE_DIM,
    SCALE_BYTES,
    bfloat16_bits_of_e4m3,
    insert_tokens,
    scales_of,
)
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import ASSERTING, Launcher
from kvcompile.kernels.lang.triton import jit, tl, triton

TOKENS_PER_WARP = 4
"""Tokens that fill a warp. A thread has 8 channels of every scale block of its token, so that 8 threads hold a token.
Neither maxima nor scales then pass through shared memory."""

NUM_WARPS = 4
"""Warps of a program; fewer in the gather kernel if a page has fewer tokens than these warps hold."""

WARPS_PER_SM = 40
"""The number of warps of the gather kernel for which a streaming multiprocessor has registers."""


@jit(do_not_specialize=["page_words", "num_tokens", "num_slots"])
def insert_kernel(
    k_cache_ptr, k_ptr, slot_mapping_ptr, k_strides, slot_strides, page_words, num_tokens, num_slots,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS tokens. Grid (ceil(num_tokens / TOKENS),).

    Programs write disjoint bytes, because slots are distinct, and read no byte that is written.

    Args:
        k_cache_ptr: uint8, pages ``8 * page_words`` bytes apart and aligned to 8 bytes; changed in place.
        k_ptr: int16 patterns [num_tokens, HEAD_DIM], strides (token, channel).
        slot_mapping_ptr: int32 or int64 [num_tokens]. A slot of ``num_slots`` or more fails an assertion, and no byte
            is written for it.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    slot = tl.load(slot_mapping_ptr + token * slot_strides[0], mask=token < num_tokens, other=-1)
    tl.device_assert(slot < num_slots, "quantize_and_insert_k_cache: a slot is outside of the cache")
    inserted = (slot >= 0) & (slot < num_slots)
    slot = tl.where(inserted, slot, 0).to(tl.int32)  # no memory holds 2**31 tokens
    page_ptrs = k_cache_ptr + (slot // BLOCK_SIZE).to(tl.int64) * page_words * 8
    token_in_page = slot % BLOCK_SIZE
    data_ptrs = page_ptrs + token_in_page * DATA_BYTES
    scale_ptrs = page_ptrs + BLOCK_SIZE * DATA_BYTES + token_in_page * SCALE_BYTES
    insert_tokens(data_ptrs, scale_ptrs, k_ptr + token * k_strides[0], k_strides[1], inserted, HARDWARE_FP8)


@jit(do_not_specialize=["page_words", "num_reqs", "num_rows", "max_seq_len", "num_blocks", "offset"])
def gather_kernel(
    out_ptr, k_cache_ptr, seq_lens_ptr, gather_lens_ptr, block_table_ptr,
    out_strides, seq_lens_strides, gather_lens_strides, block_table_strides,
    page_words, num_reqs, num_rows, max_seq_len, num_blocks, offset,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, MAX_REQS: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """Programs take turns at the tiles of all requests. Any grid (programs,) is correct.

    Only the device knows the lengths of requests. Taking turns divides the work evenly for any lengths, and the cost
    depends on the gathered tokens alone, and not on the size of ``out``.

    A tile is TOKENS consecutive positions within one page, so that it needs one number of the block table. Tiles write
    disjoint rows, and read no byte that is written.

    Args:
        out_ptr: int16 patterns, strides (request, row, channel); changed in place.
        k_cache_ptr: uint8, pages ``8 * page_words`` bytes apart and aligned to 8 bytes.
        seq_lens_ptr: int32 or int64 [num_reqs].
        gather_lens_ptr: int32 or int64 [num_reqs]; ``seq_lens_ptr`` again to gather all tokens.
        block_table_ptr: int32 or int64 page numbers, strides (request, page).
        num_rows: rows of ``out`` from ``offset`` on.
        max_seq_len: positions that the block table has room for.
        MAX_REQS: a power of two, at least ``num_reqs``.

    A request that does not fit, or a page number outside [0, num_blocks), fails an assertion, and is not read.
    """
    TILES_PER_PAGE: tl.constexpr = (BLOCK_SIZE + TOKENS - 1) // TOKENS
    reqs = tl.arange(0, MAX_REQS)
    seq_lens = tl.load(seq_lens_ptr + reqs * seq_lens_strides[0], mask=reqs < num_reqs, other=0)
    gather_lens = tl.load(gather_lens_ptr + reqs * gather_lens_strides[0], mask=reqs < num_reqs, other=0)
    fits = (gather_lens >= 0) & (gather_lens <= num_rows) & (gather_lens <= seq_lens) & (seq_lens <= max_seq_len)
    tl.device_assert(
        fits | (gather_lens == 0),
        "dequantize_and_gather_k_cache: a request gathers more tokens than it has, or out or block_table has room for",
    )
    first_pages = (seq_lens - gather_lens) // BLOCK_SIZE
    pages = tl.where(fits & (gather_lens > 0), tl.cdiv(seq_lens, BLOCK_SIZE) - first_pages, 0)
    ends = tl.cumsum(pages.to(tl.int32) * TILES_PER_PAGE, 0)  # the end of the tiles of each request
    num_tiles = tl.max(ends, 0)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        earlier = ends <= tile
        req = tl.sum(earlier.to(tl.int32), 0)
        tile_in_req = tile - tl.max(tl.where(earlier, ends, 0), 0)
        _gather_tile(
            out_ptr, k_cache_ptr, seq_lens_ptr, gather_lens_ptr, block_table_ptr,
            out_strides, seq_lens_strides, gather_lens_strides, block_table_strides,
            page_words, num_blocks, offset, req.to(tl.int64), tile_in_req,
            BLOCK_SIZE, TOKENS, TILES_PER_PAGE, HARDWARE_FP8,
        )  # fmt: skip


@jit
def _gather_tile(
    out_ptr, k_cache_ptr, seq_lens_ptr, gather_lens_ptr, block_table_ptr,
    out_strides, seq_lens_strides, gather_lens_strides, block_table_strides,
    page_words, num_blocks, offset, req, tile_in_req,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, TILES_PER_PAGE: tl.constexpr, HARDWARE_FP8: tl.constexpr,
):  # fmt: skip
    """Gather tile ``tile_in_req`` of request ``req``, counted from the page of the first token that it gathers."""
    seq_len = tl.load(seq_lens_ptr + req * seq_lens_strides[0]).to(tl.int32)
    start = seq_len - tl.load(gather_lens_ptr + req * gather_lens_strides[0]).to(tl.int32)
    page_in_req = start // BLOCK_SIZE + tile_in_req // TILES_PER_PAGE
    page_ptrs = block_table_ptr + req * block_table_strides[0] + page_in_req.to(tl.int64) * block_table_strides[1]
    page = tl.load(page_ptrs)
    in_cache = (page >= 0) & (page < num_blocks)
    tl.device_assert(in_cache, "dequantize_and_gather_k_cache: a page in block_table is outside of the cache")

    token_in_page = tile_in_req % TILES_PER_PAGE * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    position = page_in_req * BLOCK_SIZE + token_in_page
    gathered = in_cache & (position >= start) & (position < seq_len)
    if BLOCK_SIZE % TOKENS != 0:
        gathered = gathered & (token_in_page < BLOCK_SIZE)
    block = tl.arange(0, SCALE_BYTES)[None, :, None]
    channel = (block * QUANT_BLOCK + tl.arange(0, QUANT_BLOCK)[None, None, :]).to(tl.int64)
    rope_channel = tl.arange(0, ROPE_DIM)[None, None, :].to(tl.int64)
    is_nope = gathered & (block < NUM_SCALES)

    page_ptr = k_cache_ptr + page.to(tl.int64) * page_words * 8
    data_ptrs = page_ptr + token_in_page * DATA_BYTES
    scale_ptrs = page_ptr + BLOCK_SIZE * DATA_BYTES + token_in_page * SCALE_BYTES
    codes = tl.load(data_ptrs + channel, mask=is_nope, other=0)
    scale_word = tl.load(scale_ptrs.to(tl.pointer_type(tl.int64)), mask=gathered, other=0)
    rope = tl.load((data_ptrs + NOPE_DIM).to(tl.pointer_type(tl.int16)) + rope_channel, mask=gathered, other=0)

    bits = bfloat16_bits_of_e4m3(codes, scales_of(scale_word, block), HARDWARE_FP8)
    out_ptrs = out_ptr + req * out_strides[0] + (position - start + offset).to(tl.int64) * out_strides[1]
    tl.store(out_ptrs + channel * out_strides[2], bits, mask=is_nope)
    tl.store(out_ptrs + (NOPE_DIM + rope_channel) * out_strides[2], rope, mask=gathered)


launch_insert = Launcher(insert_kernel, writes=("k_cache_ptr",))
launch_gather = Launcher(gather_kernel, writes=("out_ptr",))


def quantize_and_insert_k_cache(k: Tensor, k_cache: Tensor, slot_mapping: Tensor, block_size: int) -> None:
    """:func:`kvcompile.kernels.formats.ds_mla_rows.quantize_and_insert_k_cache` on a GPU."""
    num_tokens, num_blocks = slot_mapping.shape[0], k_cache.shape[0]
    if num_tokens == 0:
        return
    tokens = TOKENS_PER_WARP * NUM_WARPS
    launch_insert(
        (triton.cdiv(num_tokens, tokens), 1, 1),
        (k_cache, k.view(torch.int16), slot_mapping),
        (k.stride(), slot_mapping.stride()),
        (k_cache.stride(0) // 8, num_tokens, num_blocks * block_size),
        (block_size, tokens, launcher.converts_e4m3(k_cache.device)),
        {"num_warps": NUM_WARPS, **ASSERTING},
    )


def dequantize_and_gather_k_cache(
    out: Tensor,
    k_cache: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor | None,
    block_table: Tensor,
    block_size: int,
    offset: int,
) -> None:
    """:func:`kvcompile.kernels.formats.ds_mla_rows.dequantize_and_gather_k_cache` on a GPU."""
    num_reqs, num_rows = seq_lens.shape[0], out.shape[1] - offset
    if num_reqs == 0 or num_rows == 0:
        return
    if gather_lens is None:
        gather_lens = seq_lens
    num_sms = launcher.num_sms_of(out.device)
    tokens = min(TOKENS_PER_WARP * NUM_WARPS, triton.next_power_of_2(block_size))
    num_warps = max(1, tokens // TOKENS_PER_WARP)
    most_tiles = num_reqs * (triton.cdiv(num_rows, block_size) + 1) * triton.cdiv(block_size, tokens)
    launch_gather(
        (min(most_tiles, num_sms * min(32, WARPS_PER_SM // num_warps)), 1, 1),
        (out.view(torch.int16), k_cache, seq_lens, gather_lens, block_table),
        (out.stride(), seq_lens.stride(), gather_lens.stride(), block_table.stride()),
        (
            k_cache.stride(0) // 8, num_reqs, num_rows, min(block_table.shape[1] * block_size, 2**31 - 1),
            k_cache.shape[0], offset,
        ),
        (block_size, tokens, triton.next_power_of_2(num_reqs), launcher.converts_e4m3(out.device)),
        {"num_warps": num_warps, **ASSERTING},
    )  # fmt: skip
