"""Attention on a packed cache of latents on Hopper, in Gluon: what the tensor cores need is written out.

The same function as :mod:`kvcompile.kernels.latent_attention`. There, a tile of latents is dequantized by the warps that
multiply it, which wait for each other; here warps have different work, and the tensor cores of a multiprocessor have
one of them to wait for at most:

- A warpgroup of *producers* reads packed tokens, dequantizes them once, and writes bfloat16 to one of two tiles in shared
  memory, swizzled as warpgroup products read it. The bytes of the next tile are on their way in its registers.
- Two warpgroups of *consumers* read that tile in both products. Each computes all scores and holds one half of the
  output's channels: 64 rows of 256 in float32 are 128 registers a thread, and weights are exchanged with nobody.
  The second takes its turn at scores after the first, so that one multiplies during the softmax of the other.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1 (the absorbed form); FlashAttention-3, arXiv:2407.08608, section 3.1
(producers, consumers and turns).
"""

from __future__ import annotations

import functools
from typing import Any

from kvcompile.kernels import deepseek_v4 as spec
from kvcompile.kernels.attention_tile import tanh
from kvcompile.kernels.codec import tl
from kvcompile.kernels.deepseek_v4_tiles import DATA_BYTES, NOPE_DIM, NUM_SCALES, QUANT_BLOCK, ROPE_DIM, SCALE_BYTES
from kvcompile.kernels.long_attention import softmax_step, visible_scores, visible_tiles
from kvcompile.kernels.references import referred

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier
except ImportError:  # no Triton, or one without it
    gluon = gl = hopper = async_copy = mbarrier = None


def gluon_jit(fn: Any = None, **options: Any) -> Any:
    """``gluon.jit``, or the function itself where there is no Gluon."""
    if fn is None:
        return functools.partial(gluon_jit, **options)
    return fn if gluon is None else gluon.jit(fn, **options)


ROWS = 64
"""Query rows of a program: those of a warpgroup's product."""

TOKENS = 64
"""Tokens of a tile: those of a block."""

if gluon is not None:
    HEAD_DIM = gl.constexpr(spec.HEAD_DIM)
    HALF_DIM = gl.constexpr(spec.HEAD_DIM // 2)
    STAGES = gl.constexpr(2)
    SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16]))
    OUTPUTS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, spec.HEAD_DIM // 2, 16]))
    ROWS_OF_SCORES = gl.constexpr(gl.SliceLayout(1, SCORES.value))
    ROWS_OF_OUTPUTS = gl.constexpr(gl.SliceLayout(1, OUTPUTS.value))
    SHARED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
    SHARED_CODES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    SHARED_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
    NUM_COPIED = gl.constexpr(4)
    NUM_LOADED = gl.constexpr(spec.NUM_SCALES - 4)
    BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
    # 16 bytes a thread and load. Four threads read the 64 codes of a scale, eight the embedding of a token.
    CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
    ROPE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
    QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    SHARED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
    QUERY_WIDTH = gl.constexpr(128)
    CONSUMER_REGISTERS = gl.constexpr(192)


@gluon_jit(do_not_specialize=["num_kv_heads", "q_len", "kv_len", "num_splits", "num_rows"])
def hopper_latent_attention_kernel(
    query_ptr, data_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr, query_strides, data_strides, mask_strides,
    num_kv_heads, q_len, kv_len, num_splits, num_rows, score_scale, softcap,
    LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Parameters and grid are those of :func:`kvcompile.kernels.latent_attention.latent_attention_kernel`."""
    query = gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, HEAD_DIM], SHARED)
    latents = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, HEAD_DIM], SHARED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, TOKENS], SHARED)
    maxima = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], SHARED_ROWS)
    decays = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], SHARED_ROWS)
    totals = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], SHARED_ROWS)
    packed = ()
    for _ in gl.static_range(NUM_COPIED):
        packed = packed + (gl.allocate_shared_memory(gl.int32, [TOKENS, QUANT_BLOCK // 4], SHARED_CODES),)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    weighed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    summed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
        mbarrier.init(weighed.index(stage), count=1)
        mbarrier.init(summed.index(stage), count=1)
    _copy_query(query.index(0), query_ptr, query_strides, num_kv_heads, q_len, GROUP_SIZE, ROWS)
    hopper.fence_async_shared()
    tl.debug_barrier()

    buffers = (query, latents, weights, maxima, decays, totals, packed)
    barriers = (ready, free, weighed, summed)
    pointers = (data_ptr, mask_ptr, range_ptr, out_ptr, lse_ptr)
    strides = (data_strides, mask_strides)
    numbers = (num_kv_heads, q_len, kv_len, num_splits, num_rows, score_scale, softcap)
    gl.warp_specialize(
        [
            (_produce, (buffers, barriers, pointers, strides, numbers, LATENT, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS)),
            (_consume, (buffers, barriers, pointers, strides, numbers, LATENT, GROUP_SIZE, HAS_SOFTCAP, MASK, IS_CAUSAL, PARTIAL, ROWS, TOKENS, 0)),
            (_consume, (buffers, barriers, pointers, strides, numbers, LATENT, GROUP_SIZE, HAS_SOFTCAP, MASK, IS_CAUSAL, PARTIAL, ROWS, TOKENS, 1)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip


@gluon_jit
def _rows(num_kv_heads, q_len, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr, LAYOUT: tl.constexpr):
    """The query rows of a program: sequence, KV head, first row; position, head and whether it exists of every row."""
    batch = (gl.program_id(1) // num_kv_heads).to(gl.int64)
    kv_head = (gl.program_id(1) % num_kv_heads).to(gl.int64)
    # The last tile of rows comes first: under a causal mask it is the one that takes longest.
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
    row = first_row + gl.arange(0, ROWS, LAYOUT)
    position = (row // GROUP_SIZE).to(gl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    return batch, kv_head, first_row, position, head, position < q_len


@gluon_jit
def _copy_query(query, query_ptr, strides, num_kv_heads, q_len, GROUP_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """The query rows of a program, in bfloat16, to shared memory."""
    ROW: gl.constexpr = gl.SliceLayout(1, QUERY)
    batch, _, _, position, head, in_query = _rows(num_kv_heads, q_len, GROUP_SIZE, ROWS, ROW)
    row_ptrs = query_ptr + batch * strides[0] + head * strides[1] + position * strides[2]
    NUM_PARTS: gl.constexpr = HEAD_DIM // QUERY_WIDTH
    for i in gl.static_range(NUM_PARTS):
        channel = i * QUERY_WIDTH + gl.arange(0, QUERY_WIDTH, gl.SliceLayout(0, QUERY))
        part = gl.load(row_ptrs[:, None] + channel[None, :] * strides[3], mask=in_query[:, None], other=0.0)
        query.slice(i * QUERY_WIDTH, QUERY_WIDTH, dim=1).store(part.to(gl.bfloat16))


@gluon_jit
def _tiles(
    range_ptr, num_kv_heads, q_len, kv_len, num_splits,
    GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    LAYOUT: tl.constexpr,
):  # fmt: skip
    """:func:`kvcompile.kernels.long_attention.visible_tiles` of a program."""
    batch, _, first_row, position, _, in_query = _rows(num_kv_heads, q_len, GROUP_SIZE, ROWS, LAYOUT)
    return visible_tiles(
        first_row, in_query, range_ptr + (batch * q_len + position) * 3, q_len, kv_len, gl.program_id(2), num_splits,
        GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS,
    )  # fmt: skip


@gluon_jit
def _consume(
    buffers, barriers, pointers, strides, numbers,
    LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PARTIAL: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Attention of all rows to all tiles; of the output, one half of the channels."""
    query, latents, weights, maxima, decays, totals, _ = buffers
    ready, free, weighed, summed = barriers
    _, mask_ptr, range_ptr, out_ptr, lse_ptr = pointers
    mask_strides = strides[1]
    num_kv_heads, q_len, kv_len, num_splits, num_rows, score_scale, softcap = numbers
    batch, _, _, position, head, in_query = _rows(num_kv_heads, q_len, GROUP_SIZE, ROWS, ROWS_OF_SCORES)
    tiles, ranges = _tiles(
        range_ptr, num_kv_heads, q_len, kv_len, num_splits, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS, ROWS_OF_SCORES
    )
    mask_row_ptrs = mask_ptr + batch * mask_strides[0] + head * mask_strides[1] + position * mask_strides[2]
    visibility = (position, in_query, ranges[0], ranges[1], ranges[2], mask_row_ptrs, mask_strides[3])

    maximum = gl.full([ROWS], float("-inf"), gl.float32, ROWS_OF_SCORES)
    total = gl.full([ROWS], 0.0, gl.float32, ROWS_OF_SCORES)
    outputs = gl.full([ROWS, HALF_DIM], 0.0, gl.float32, OUTPUTS)
    end_token = gl.minimum(kv_len, tiles[3] * TOKENS)  # the last pair of tiles may have one of another split
    for pair in range(0, gl.cdiv(tiles[3] - tiles[0], 2)):
        phase = pair & 1
        tile = tiles[0] + 2 * pair + HALF
        zero = tile >> 31
        for stage in gl.static_range(STAGES):
            if stage == HALF:
                mbarrier.wait(ready.index(HALF), phase)
                scores = gl.full([ROWS, TOKENS], 0.0, gl.float32, SCORES)
                # Addresses of operands are not known before the loop: the 32 sections of each would fill registers.
                zero = tile >> 31
                keys = latents.index(HALF + zero).permute([1, 0])
                scores = hopper.warpgroup_mma(query.index(zero), keys, scores, use_acc=False, is_async=True)
                scores = hopper.warpgroup_mma_wait(0, deps=[scores]) * score_scale
                if HAS_SOFTCAP:
                    scores = softcap * tanh(scores / softcap)
                token = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, SCORES))
                if MASK == "float":  # known at compile time  # noqa: SIM114
                    scores = visible_scores(scores, token, end_token, visibility, MASK, IS_CAUSAL)
                elif (tile < tiles[1]) | (tile >= tiles[2]):  # in most tiles of a long context nothing needs to be hidden
                    scores = visible_scores(scores, token, end_token, visibility, MASK, IS_CAUSAL)
                weight, decay, maximum, total = softmax_step(scores, maximum, total, True)
                weights.index(stage).store(weight.to(gl.bfloat16))
                maxima.index(stage).store(maximum)
                decays.index(stage).store(decay)
                hopper.fence_async_shared()
                tl.debug_barrier()
                mbarrier.arrive(weighed.index(stage), count=1)
            else:
                mbarrier.wait(ready.index(stage), phase)
                mbarrier.wait(weighed.index(stage), phase)
                maximum = maxima.index(stage).load(ROWS_OF_SCORES)
                decay = decays.index(stage).load(ROWS_OF_SCORES)
                total = total * decay
            outputs = outputs * gl.convert_layout(decay, ROWS_OF_OUTPUTS)[:, None]
            values = latents.index(stage + zero).slice(HALF * HALF_DIM, HALF_DIM, dim=1)
            outputs = hopper.warpgroup_mma(weights.index(stage), values, outputs, is_async=True)
            outputs = hopper.warpgroup_mma_wait(0, deps=[outputs])
            tl.debug_barrier()
            mbarrier.arrive(free.index(stage), count=1)

    totals.index(HALF).store(total)
    tl.debug_barrier()
    mbarrier.arrive(summed.index(HALF), count=1)
    mbarrier.wait(summed.index(1 - HALF), 0)
    total += totals.index(1 - HALF).load(ROWS_OF_SCORES)
    seen = total > 0
    out_row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        out_row += gl.program_id(2).to(gl.int64) * num_rows
        if HALF == 0:
            gl.store(lse_ptr + out_row, gl.where(seen, maximum + gl.log2(total), float("-inf")), mask=in_query)
    inverse = gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), ROWS_OF_OUTPUTS)
    out_row = gl.convert_layout(out_row, ROWS_OF_OUTPUTS)
    stored = gl.convert_layout(in_query, ROWS_OF_OUTPUTS)
    channel = HALF * HALF_DIM + gl.arange(0, HALF_DIM, gl.SliceLayout(0, OUTPUTS))
    out_ptrs = out_ptr + out_row[:, None] * HEAD_DIM + channel[None, :]
    gl.store(out_ptrs, outputs * inverse[:, None], mask=stored[:, None])


@gluon_jit
def _produce(
    buffers, barriers, pointers, strides, numbers,
    LATENT: tl.constexpr, GROUP_SIZE: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Dequantize all tiles into shared memory, each as soon as its place is free."""
    _, latents, _, _, _, _, packed = buffers
    ready, free, _, _ = barriers
    data_ptr, _, range_ptr, _, _ = pointers
    data_strides = strides[0]
    num_kv_heads, q_len, kv_len, num_splits, _, _, _ = numbers
    ROW: gl.constexpr = gl.SliceLayout(1, CODES)
    batch, kv_head, _, _, _, _ = _rows(num_kv_heads, q_len, GROUP_SIZE, ROWS, ROW)
    tiles, _ = _tiles(
        range_ptr, num_kv_heads, q_len, kv_len, num_splits, GROUP_SIZE, MASK, IS_CAUSAL, ROWS, TOKENS, ROW
    )
    data_ptr = referred(data_ptr, LATENT) + batch * data_strides[1] + kv_head * data_strides[2]
    end_token = gl.minimum(kv_len, tiles[3] * TOKENS)
    words = latents._reinterpret(gl.int32, [STAGES, TOKENS, HEAD_DIM // 2], SHARED_WORDS)
    _copy_codes(packed, data_ptr, data_strides[0], tiles[0], end_token, TOKENS)
    codes = ()
    for i in gl.static_range(NUM_LOADED):
        loaded = _load_codes(data_ptr, data_strides[0], tiles[0], end_token, NUM_COPIED + i, TOKENS)
        codes = codes + (loaded,)  # noqa: RUF005
    rope = _load_rope(data_ptr, data_strides[0], tiles[0], end_token, TOKENS)
    scales = _load_scales(data_ptr, data_strides[0], tiles[0], end_token, TOKENS)
    for own_tile in range(0, gl.cdiv(tiles[3] - tiles[0], 2) * 2):
        next_tile = tiles[0] + own_tile + 1
        async_copy.wait_group(0)
        copied = ()
        for block in gl.static_range(NUM_COPIED):
            copied = copied + (packed[block].load(CODES),)  # noqa: RUF005
        _copy_codes(packed, data_ptr, data_strides[0], next_tile, end_token, TOKENS)
        next_scales = _load_scales(data_ptr, data_strides[0], next_tile, end_token, TOKENS)
        stage = own_tile % STAGES
        latent = words.index(stage)
        mbarrier.wait(free.index(stage), (own_tile // STAGES & 1) ^ 1)
        latent.slice(NOPE_DIM // 2, ROPE_DIM // 2, dim=1).store(rope)
        rope = _load_rope(data_ptr, data_strides[0], next_tile, end_token, TOKENS)
        next_codes = ()
        for i in gl.static_range(NUM_LOADED):
            part = dequantize_codes(codes[i], scales, NUM_COPIED + i)
            latent.slice((NUM_COPIED + i) * QUANT_BLOCK // 2, QUANT_BLOCK // 2, dim=1).store(part)
            loaded = _load_codes(data_ptr, data_strides[0], next_tile, end_token, NUM_COPIED + i, TOKENS)
            next_codes = next_codes + (loaded,)  # noqa: RUF005
        codes = next_codes
        for block in gl.static_range(NUM_COPIED):
            part = dequantize_codes(copied[block], scales, block)
            latent.slice(block * QUANT_BLOCK // 2, QUANT_BLOCK // 2, dim=1).store(part)
        scales = next_scales
        hopper.fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(ready.index(stage), count=1)
    async_copy.wait_group(0)


@gluon_jit
def _copy_codes(packed, data_ptr, stride_block, tile, kv_len, TOKENS: tl.constexpr):
    """Begin to copy the codes of a tile to ``packed``, four an int32; 0 of tokens from ``kv_len`` on.

    Every thread copies what it will load.
    """
    slot = gl.arange(0, TOKENS, gl.SliceLayout(1, CODES))
    word = gl.arange(0, QUANT_BLOCK // 4, gl.SliceLayout(0, CODES))
    token_ptrs = (data_ptr + tile.to(gl.int64) * stride_block + slot * DATA_BYTES).to(gl.pointer_type(gl.int32))
    ptrs = token_ptrs[:, None] + word[None, :]
    exists = (tile * TOKENS + slot < kv_len)[:, None]
    for block in gl.static_range(NUM_COPIED):
        async_copy.async_copy_global_to_shared(packed[block], ptrs + block * (QUANT_BLOCK // 4), mask=exists)
    async_copy.commit_group()


@gluon_jit
def _load_codes(data_ptr, stride_block, tile, kv_len, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """The codes that share a scale, four an int32, [tokens, QUANT_BLOCK / 4]; 0 of tokens from ``kv_len`` on."""
    slot = gl.arange(0, TOKENS, gl.SliceLayout(1, CODES))
    word = gl.arange(0, QUANT_BLOCK // 4, gl.SliceLayout(0, CODES))
    token_ptrs = data_ptr + tile.to(gl.int64) * stride_block + (slot * DATA_BYTES + BLOCK * QUANT_BLOCK)
    ptrs = token_ptrs.to(gl.pointer_type(gl.int32))[:, None] + word[None, :]
    return gl.load(ptrs, mask=(tile * TOKENS + slot < kv_len)[:, None], other=0)


@gluon_jit
def _load_rope(data_ptr, stride_block, tile, kv_len, TOKENS: tl.constexpr):
    """The rotary embedding, two channels an int32, [tokens, ROPE_DIM / 2]; 0 of tokens from ``kv_len`` on."""
    slot = gl.arange(0, TOKENS, gl.SliceLayout(1, ROPE))
    word = gl.arange(0, ROPE_DIM // 2, gl.SliceLayout(0, ROPE))
    token_ptrs = data_ptr + tile.to(gl.int64) * stride_block + (slot * DATA_BYTES + NOPE_DIM)
    ptrs = token_ptrs.to(gl.pointer_type(gl.int32))[:, None] + word[None, :]
    return gl.load(ptrs, mask=(tile * TOKENS + slot < kv_len)[:, None], other=0)


@gluon_jit
def _load_scales(data_ptr, stride_block, tile, kv_len, TOKENS: tl.constexpr):
    """The scale bytes, int64 [tokens]; 0 of tokens from ``kv_len`` on."""
    slot = gl.arange(0, TOKENS, gl.SliceLayout(1, CODES))
    ptrs = data_ptr + tile.to(gl.int64) * stride_block + (TOKENS * DATA_BYTES + slot * SCALE_BYTES)
    return gl.load(ptrs.to(gl.pointer_type(gl.int64)), mask=tile * TOKENS + slot < kv_len, other=0)


@gluon_jit
def dequantize_codes(codes, scales, BLOCK: tl.constexpr):
    """e4m3 codes, four an int32 [tokens, words], with the scales [tokens] of their block -> bfloat16, rounded to
    nearest even, two an int32 [tokens, 2 * words]."""
    exponent = (scales >> (8 * BLOCK)).to(gl.int32) & 0xFF
    scale = gl.maximum(exponent << 7, 0x40) * 0x10001  # bfloat16, twice
    low, high = gl.inline_asm_elementwise(
        DEQUANTIZE, CONSTRAINTS, [codes, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
    )
    return gl.reshape(gl.join(low, high), [codes.shape[0], 2 * codes.shape[1]])


def _dequantize_sixteen() -> str:
    """PTX that turns 16 codes of e4m3 in 4 registers and a scale, twice in one, into pairs of bfloat16 in 8.

    Sign, exponent and mantissa are moved to where a bfloat16 has them: that is the value times 2**-120, and the product
    with 2**120 is exact. The product with the scale rounds, once. Codes of NaN would be 480: a scale of NaN instead
    makes NaN of all 16, with which any score of their token is NaN as it is with one.
    """
    lines = [".reg .b32 code, pair, largest, scale;", ".reg .pred nan;", "mov.b32 largest, 0;"]
    for i in range(4):
        low, high = f"${i}", f"${4 + i}"
        lines += [
            f"prmt.b32 code, ${8 + i}, 0, 0x3120;",  # bytes 0 and 1 are the lower ones of halves, 2 and 3 the upper
            f"shl.b32 {low}, code, 4;",
            f"and.b32 {low}, {low}, 0x07F007F0;",
            f"shr.u32 {high}, code, 4;",
            f"and.b32 {high}, {high}, 0x07F007F0;",
            f"max.u16x2 largest, largest, {low};",
            f"max.u16x2 largest, largest, {high};",
            "shl.b32 pair, code, 8;",
            f"lop3.b32 {low}, pair, 0x80008000, {low}, 0xEA;",
            f"lop3.b32 {high}, code, 0x80008000, {high}, 0xEA;",
        ]
    lines += [
        "add.u32 largest, largest, 0x00100010;",
        "and.b32 largest, largest, 0x08000800;",
        "setp.ne.u32 nan, largest, 0;",
        "selp.b32 scale, 0x7FFF7FFF, $12, nan;",
        "mov.b32 pair, 0x7B807B80;",
    ]
    for i in range(8):
        lines += [f"mul.rn.bf16x2 ${i}, ${i}, pair;", f"mul.rn.bf16x2 ${i}, ${i}, scale;"]
    return "{\n" + "\n".join(lines) + "\n}"


if gluon is not None:
    DEQUANTIZE = gl.constexpr(_dequantize_sixteen())
    CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))
