"""Attention on a packed cache of latents on Hopper, in Gluon, with products of warpgroups.

It computes the same as :mod:`kvcompile.kernels.latent.attention`. There the warps that multiply a tile of latents
dequantize it first, and the tensor cores wait. Here a program has three warpgroups, which work at the same time.

- *Producers* dequantize each tile once, to bfloat16, into one of two buffers in shared memory: even tiles into the
  first, odd tiles into the second. All products read these buffers. The bytes of the next tile are loaded meanwhile.
- Two warpgroups of *consumers* hold one half of the output's channels each: 64 rows of 256 float32 channels are 128
  registers per thread. The first *weighs* even tiles, which means that it computes their scores and softmax weights;
  the second weighs odd tiles. Both accumulate every tile. They exchange weights and decays in shared memory.

Each tile is weighed only once because products are limited by reading shared memory. The scores of a tile read 64 KB of
queries and 64 KB of latents; the accumulation of a tile reads 64 KB of latents and 16 KB of weights.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1 (the absorbed form); FlashAttention-3, arXiv:2407.08608, section 3.1
(producers and consumers); DeepSeek's report on the FlashMLA kernel for Hopper, April 2025 (two warpgroups that share an
output).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvcompile.compat.gluon import reinterpreted
from kvcompile.kernels.attention.prefill import softmax_step, visible_scores, visible_tiles
from kvcompile.kernels.attention.softmax_tile import store_log_sum, tanh
from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang.triton import tl
from kvcompile.kernels.latent.hopper_tiles import (
    CODES,
    LATENTS,
    NUM_COPIED,
    NUM_LOADED,
    PAIRS,
    allocate_copies,
    copy_codes,
    load_codes,
    load_copied_codes,
    load_rope,
    load_scales,
    store_dequantized,
    store_rope,
)
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.kernels.layout.references import referred

HEAD_DIM = gl.constexpr(spec.HEAD_DIM)
HALF_DIM = gl.constexpr(spec.HEAD_DIM // 2)
QUERY_WIDTH = gl.constexpr(128)
NUM_BUFFERS = gl.constexpr(2)
CONSUMER_REGISTERS = gl.constexpr(192)  # per thread; producers have the remaining 120

# A product of a warpgroup has 64 rows, 16 per warp.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_TOKENS, 16]))
OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, spec.HEAD_DIM // 2, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, OUTPUTS.value))
QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SHARED_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@gluon.jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_splits", "num_rows"])
def hopper_latent_attention_kernel(
    query_ptr, data_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr, query_strides, data_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_splits, num_rows, score_scale, softcap,
    LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Parameters and grid are the same as in :func:`kvcompile.kernels.latent.attention.latent_attention_kernel`.

    ROWS must be 64, and TOKENS the tokens of a block. Products are bfloat16; PRECISION and NUM_STAGES are ignored. The
    kernel is launched with four warps, which produce, and adds eight warps, which consume.
    """
    query = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HEAD_DIM], LATENTS)
    _copy_query(query.index(0), query_ptr, query_strides, num_kv_heads, q_len, GROUP_SIZE, ROWS)
    latents = gl.allocate_shared_memory(gl.bfloat16, [NUM_BUFFERS, TOKENS, HEAD_DIM], LATENTS)
    weights = gl.allocate_shared_memory(gl.bfloat16, [NUM_BUFFERS, ROWS, TOKENS], LATENTS)
    maxima = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, ROWS], SHARED_ROWS)
    decays = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, ROWS], SHARED_ROWS)
    totals = gl.allocate_shared_memory(gl.float32, [NUM_BUFFERS, ROWS], SHARED_ROWS)
    # Barriers for each buffer: ``ready`` when it holds a tile, ``weighed`` when the tile is weighed, ``free`` when both
    # consumers have finished with the tile. Barrier for each consumer: ``summed`` when its total is in shared memory.
    ready = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [NUM_BUFFERS, 1], BARRIER)
    for buffer in gl.static_range(NUM_BUFFERS):
        mbarrier.init(ready.index(buffer), count=1)
        mbarrier.init(weighed.index(buffer), count=1)
        mbarrier.init(free.index(buffer), count=2)
        mbarrier.init(summed.index(buffer), count=1)
    hopper.fence_async_shared()
    tl.debug_barrier()

    tiles = (range_ptr, q_len, kv_len, num_kv_heads, num_splits)
    buffers = (query, latents, weights, maxima, decays, totals)
    barriers = (ready, weighed, free, summed)
    masking = (mask_ptr, mask_strides, score_scale, softcap)
    results = (out_ptr, lse_ptr, num_rows)
    consumer = (buffers, barriers, tiles, masking, results)
    producer = (latents, allocate_copies(TOKENS), (ready, free), tiles, referred(data_ptr, LATENT), data_strides)
    gl.warp_specialize(
        [
            (_produce, (producer, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS)),
            (_consume, (consumer, GROUP_SIZE, HAS_SOFTCAP, MASK, IS_CAUSAL, PARTIAL, ROWS, TOKENS, 0)),
            (_consume, (consumer, GROUP_SIZE, HAS_SOFTCAP, MASK, IS_CAUSAL, PARTIAL, ROWS, TOKENS, 1)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )


@gluon.jit
def _rows(q_len, num_kv_heads, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """The query rows of a program: sequence, KV head, first row; each row's position, head and whether it exists."""
    batch = (gl.program_id(1) // num_kv_heads).to(gl.int64)
    kv_head = (gl.program_id(1) % num_kv_heads).to(gl.int64)
    # The last tile of rows comes first, because it takes longest under a causal mask.
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
    row = first_row + gl.arange(0, ROWS, LAYOUT)
    position = (row // GROUP_SIZE).to(gl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    return batch, kv_head, first_row, position, head, position < q_len


@gluon.jit
def _copy_query(query, query_ptr, strides, num_kv_heads, q_len, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Copy the query rows of a program to shared memory, in bfloat16."""
    batch, _, _, position, head, in_query = _rows(q_len, num_kv_heads, GROUP_SIZE, ROWS, gl.SliceLayout(1, QUERY))
    row_ptrs = query_ptr + batch * strides[0] + head * strides[1] + position * strides[2]
    NUM_SLICES: gl.constexpr = HEAD_DIM // QUERY_WIDTH
    for i in gl.static_range(NUM_SLICES):
        channel = i * QUERY_WIDTH + gl.arange(0, QUERY_WIDTH, gl.SliceLayout(0, QUERY))
        channels = gl.load(row_ptrs[:, None] + channel[None, :] * strides[3], mask=in_query[:, None], other=0.0)
        query.slice(i * QUERY_WIDTH, QUERY_WIDTH, dim=1).store(channels.to(gl.bfloat16))


@gluon.jit
def _tiles(
    tiles, GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, LAYOUT: tl.constexpr,
):  # fmt: skip
    """The tiles that a program visits, in pairs of an even and an odd tile.

    Returns:
        The results of :func:`kvcompile.kernels.attention.prefill.visible_tiles`; the number of tokens that the program
        may read, because the last tile of the last pair may belong to another split; and the number of pairs.
    """
    range_ptr, q_len, kv_len, num_kv_heads, num_splits = tiles
    batch, _, first_row, position, _, in_query = _rows(q_len, num_kv_heads, GROUP_SIZE, ROWS, LAYOUT)
    bounds, ranges = visible_tiles(
        first_row, in_query, range_ptr + (batch * q_len + position) * 3, q_len, kv_len, gl.program_id(2), num_splits,
        GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS,
    )  # fmt: skip
    return bounds, ranges, gl.minimum(kv_len, bounds[3] * TOKENS), gl.cdiv(bounds[3] - bounds[0], 2)


@gluon.jit
def _produce(
    producer, GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Dequantize all tiles, each as soon as its buffer is free.

    All loads of the next tile are issued early, because waiting for the first of several loads may wait for the last.
    """
    latents, copies, barriers, tiles, data_ptr, data_strides = producer
    ready, free = barriers
    ROW: gl.constexpr = gl.SliceLayout(1, CODES)
    batch, kv_head, _, _, _, _ = _rows(tiles[1], tiles[3], GROUP_SIZE, ROWS, ROW)
    bounds, _, kv_len, num_pairs = _tiles(tiles, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS, ROW)
    data_ptr += batch * data_strides[1] + kv_head * data_strides[2]
    pairs = reinterpreted(latents, gl.int32, [NUM_BUFFERS, TOKENS, HEAD_DIM // 2], PAIRS)
    tile = bounds[0]
    tile_ptr = data_ptr + tile.to(gl.int64) * data_strides[0]
    copy_codes(copies, tile_ptr, tile, kv_len, TOKENS)
    codes = ()
    for i in gl.static_range(NUM_LOADED):
        codes = codes + (load_codes(tile_ptr, tile, kv_len, NUM_COPIED + i, TOKENS),)  # noqa: RUF005
    rope = load_rope(tile_ptr, tile, kv_len, TOKENS)
    scales = load_scales(tile_ptr, tile, kv_len, TOKENS)
    for own_tile in range(num_pairs * NUM_BUFFERS):
        tile = bounds[0] + own_tile + 1
        tile_ptr = data_ptr + tile.to(gl.int64) * data_strides[0]
        copied = load_copied_codes(copies)
        copy_codes(copies, tile_ptr, tile, kv_len, TOKENS)
        next_scales = load_scales(tile_ptr, tile, kv_len, TOKENS)
        buffer = own_tile % NUM_BUFFERS
        mbarrier.wait(free.index(buffer), (own_tile // NUM_BUFFERS & 1) ^ 1)
        store_rope(pairs.index(buffer), rope)
        rope = load_rope(tile_ptr, tile, kv_len, TOKENS)
        next_codes = ()
        for i in gl.static_range(NUM_LOADED):
            store_dequantized(pairs.index(buffer), codes[i], scales, NUM_COPIED + i)
            next_codes = next_codes + (load_codes(tile_ptr, tile, kv_len, NUM_COPIED + i, TOKENS),)  # noqa: RUF005
        for block in gl.static_range(NUM_COPIED):
            store_dequantized(pairs.index(buffer), copied[block], scales, block)
        codes, scales = next_codes, next_scales
        hopper.fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(ready.index(buffer), count=1)
    hopper.async_copy.wait_group(0)


@gluon.jit
def _consume(
    consumer, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PARTIAL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Weigh every other tile, and accumulate one half of the output's channels over all tiles.

    No waiting warpgroup misses a phase of a barrier: a buffer is filled and weighed again only after both consumers
    have finished with it.
    """
    buffers, barriers, tiles, masking, results = consumer
    query, latents, weights, maxima, decays, totals = buffers
    ready, weighed, free, summed = barriers
    mask_ptr, mask_strides, score_scale, softcap = masking
    batch, _, _, position, head, in_query = _rows(tiles[1], tiles[3], GROUP_SIZE, ROWS, SCORE_ROWS)
    bounds, ranges, kv_len, num_pairs = _tiles(tiles, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS, SCORE_ROWS)
    mask_row_ptrs = mask_ptr + batch * mask_strides[0] + head * mask_strides[1] + position * mask_strides[2]
    visibility = (position, in_query, ranges[0], ranges[1], ranges[2], mask_row_ptrs, mask_strides[3])

    maximum = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
    total = gl.full([ROWS], 0.0, gl.float32, SCORE_ROWS)
    outputs = gl.full([ROWS, HALF_DIM], 0.0, gl.float32, OUTPUTS)
    for pair in range(num_pairs):
        tile = bounds[0] + NUM_BUFFERS * pair + HALF
        # The addresses of operands must depend on the loop. The compiler would otherwise compute the addresses of all
        # their tiles before the loop, and keep them in registers.
        zero = tile >> 31
        for buffer in gl.static_range(NUM_BUFFERS):
            latent = latents.index(buffer + zero)
            mbarrier.wait(ready.index(buffer), pair & 1)
            if buffer == HALF:
                scores = _scores(
                    query.index(zero), latent, tile, bounds, kv_len, score_scale, softcap, visibility, HAS_SOFTCAP,
                    MASK, IS_CAUSAL,
                )  # fmt: skip
                weight, decay, maximum, total = softmax_step(scores, maximum, total, True)
                weights.index(buffer).store(weight.to(gl.bfloat16))
                maxima.index(buffer).store(maximum)
                decays.index(buffer).store(decay)
                hopper.fence_async_shared()
                tl.debug_barrier()
                mbarrier.arrive(weighed.index(buffer), count=1)
            else:
                mbarrier.wait(weighed.index(buffer), pair & 1)
                maximum = maxima.index(buffer).load(SCORE_ROWS)
                decay = decays.index(buffer).load(SCORE_ROWS)
                total = total * decay
            outputs = outputs * gl.convert_layout(decay, OUTPUT_ROWS)[:, None]
            values = latent.slice(HALF * HALF_DIM, HALF_DIM, dim=1)
            outputs = hopper.warpgroup_mma(weights.index(buffer), values, outputs, is_async=True)
            outputs = hopper.warpgroup_mma_wait(0, deps=[outputs])
            tl.debug_barrier()
            mbarrier.arrive(free.index(buffer), count=1)

    totals.index(HALF).store(total)
    tl.debug_barrier()
    mbarrier.arrive(summed.index(HALF), count=1)
    mbarrier.wait(summed.index(1 - HALF), 0)
    total += totals.index(1 - HALF).load(SCORE_ROWS)
    out_row = (batch * tiles[3] * GROUP_SIZE + head) * tiles[1] + position
    _store(outputs, maximum, total, out_row, in_query, results, PARTIAL, HALF)


@gluon.jit
def _scores(
    query, latent, tile, bounds, kv_len, score_scale, softcap, visibility,
    HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in units of log2, float32 [rows, tokens], -inf where a row does not see a token."""
    scores = gl.full([query.shape[0], latent.shape[0]], 0.0, gl.float32, SCORES)
    scores = hopper.warpgroup_mma(query, latent.permute([1, 0]), scores, use_acc=False, is_async=True)
    scores = hopper.warpgroup_mma_wait(0, deps=[scores]) * score_scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    token = tile * latent.shape[0] + gl.arange(0, latent.shape[0], gl.SliceLayout(0, SCORES))
    if MASK == "float":  # known at compile time  # noqa: SIM114
        scores = visible_scores(scores, token, kv_len, visibility, MASK, IS_CAUSAL)
    elif (tile < bounds[1]) | (tile >= bounds[2]):  # most tiles of a long context hide nothing
        scores = visible_scores(scores, token, kv_len, visibility, MASK, IS_CAUSAL)
    return scores


@gluon.jit
def _store(outputs, maximum, total, out_row, in_query, results, PARTIAL: tl.constexpr, HALF: tl.constexpr):
    """Write a consumer's half of the output; the first consumer also writes the log-sum-exp."""
    out_ptr, lse_ptr, num_rows = results
    seen = total > 0
    if PARTIAL:
        out_row += gl.program_id(2).to(gl.int64) * num_rows
        if HALF == 0:
            store_log_sum(lse_ptr, out_row, maximum, gl.log2(total), seen, in_query)
    inverse = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), OUTPUT_ROWS)
    channel = HALF * HALF_DIM + gl.arange(0, HALF_DIM, gl.SliceLayout(0, OUTPUTS))
    out_ptrs = out_ptr + gl.convert_layout(out_row, OUTPUT_ROWS)[:, None] * HEAD_DIM + channel[None, :]
    gl.store(out_ptrs, outputs * inverse[:, None], mask=gl.convert_layout(in_query, OUTPUT_ROWS)[:, None])
