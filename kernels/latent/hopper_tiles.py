"""The producers of :mod:`kvcompile.kernels.latent.hopper`: they dequantize packed latents to bfloat16 in shared memory.

A tile is a block of 64 tokens. Functions with a parameter ``kv_len`` do not read tokens from ``kv_len`` on; these
tokens are zeros.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kvcompile.compat.gluon import async_load
from kvcompile.kernels.deepseek_v4.tiles import DATA_BYTES, NOPE_DIM, QUANT_BLOCK, ROPE_DIM, SCALE_BYTES
from kvcompile.kernels.formats import ds_mla_rows as spec
from kvcompile.kernels.lang.triton import tl

COPIED_BLOCKS = 4
"""The number of scale blocks of the next tile that are copied to shared memory, which has no room for more. The other
blocks are loaded to registers."""

NUM_COPIED = gl.constexpr(COPIED_BLOCKS)
NUM_LOADED = gl.constexpr(spec.NUM_SCALES - COPIED_BLOCKS)

# The layout that products of warpgroups read: rows of 64 channels, 128 bytes, swizzled. PAIRS is the same memory, seen
# as pairs of channels.
LATENTS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PAIRS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
COPIED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A thread loads 16 bytes at once: four threads read the 64 codes of a scale, eight the rotary embedding of a token.
CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
ROPE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def allocate_copies(TOKENS: tl.constexpr):
    """Shared memory for :func:`copy_codes`, one buffer per scale block: Triton then knows that they do not overlap."""
    copies = ()
    for _ in gl.static_range(NUM_COPIED):
        copies = copies + (gl.allocate_shared_memory(gl.int32, [TOKENS, QUANT_BLOCK // 4], COPIED),)  # noqa: RUF005
    return copies


@gluon.jit
def copy_codes(copies, tile_ptr, tile, kv_len, TOKENS: tl.constexpr):
    """Start asynchronous copies of the first NUM_COPIED scale blocks of a tile.

    Each thread copies the codes that it later loads, so that no barrier is needed.
    """
    for block in gl.static_range(NUM_COPIED):
        ptrs, exists = _codes_of(tile_ptr, tile, kv_len, block, TOKENS)
        async_load(copies[block], ptrs, mask=exists)
    hopper.async_copy.commit_group()


@gluon.jit
def load_copied_codes(copies):
    """The codes that :func:`copy_codes` copied, as a tuple of int32 [tokens, QUANT_BLOCK / 4], four codes each."""
    hopper.async_copy.wait_group(0)
    codes = ()
    for block in gl.static_range(NUM_COPIED):
        codes = codes + (copies[block].load(CODES),)  # noqa: RUF005
    return codes


@gluon.jit
def load_codes(tile_ptr, tile, kv_len, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    """Load the codes of a scale block, int32 [tokens, QUANT_BLOCK / 4], four codes each."""
    ptrs, exists = _codes_of(tile_ptr, tile, kv_len, BLOCK, TOKENS)
    return gl.load(ptrs, mask=exists, other=0)


@gluon.jit
def _codes_of(tile_ptr, tile, kv_len, BLOCK: tl.constexpr, TOKENS: tl.constexpr):
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, CODES))
    word = gl.arange(0, QUANT_BLOCK // 4, gl.SliceLayout(0, CODES))
    ptrs = (tile_ptr + row * DATA_BYTES).to(gl.pointer_type(gl.int32))[:, None] + word[None, :]
    return ptrs + BLOCK * (QUANT_BLOCK // 4), (tile * TOKENS + row < kv_len)[:, None]


@gluon.jit
def load_rope(tile_ptr, tile, kv_len, TOKENS: tl.constexpr):
    """Load the rotary embedding, int32 [tokens, ROPE_DIM / 2], two channels each."""
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, ROPE))
    word = gl.arange(0, ROPE_DIM // 2, gl.SliceLayout(0, ROPE))
    ptrs = (tile_ptr + (row * DATA_BYTES + NOPE_DIM)).to(gl.pointer_type(gl.int32))[:, None] + word[None, :]
    return gl.load(ptrs, mask=(tile * TOKENS + row < kv_len)[:, None], other=0)


@gluon.jit
def load_scales(tile_ptr, tile, kv_len, TOKENS: tl.constexpr):
    """Load the scale bytes, int64 [tokens], eight each."""
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, CODES))
    ptrs = (tile_ptr + (TOKENS * DATA_BYTES + row * SCALE_BYTES)).to(gl.pointer_type(gl.int64))
    return gl.load(ptrs, mask=tile * TOKENS + row < kv_len, other=0)


@gluon.jit
def store_rope(pairs, rope):
    """Write the rotary embedding to its place in ``pairs``, the int32 view of a tile of latents."""
    pairs.slice(NOPE_DIM // 2, ROPE_DIM // 2, dim=1).store(rope)


@gluon.jit
def store_dequantized(pairs, codes, scales, BLOCK: tl.constexpr):
    """Dequantize a scale block, rounded to nearest even, and write it to its place in ``pairs``."""
    exponent = (scales >> (8 * BLOCK)).to(gl.int32) & 0xFF
    scale = gl.maximum(exponent << 7, 0x40) * 0x10001  # in both halves, as bfloat16; 2**-127 is subnormal
    low, high = gl.inline_asm_elementwise(
        DEQUANTIZE, CONSTRAINTS, [codes, scale[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=4
    )
    dequantized = gl.reshape(gl.join(low, high), [codes.shape[0], QUANT_BLOCK // 2])
    pairs.slice(BLOCK * (QUANT_BLOCK // 2), QUANT_BLOCK // 2, dim=1).store(dequantized)


def _dequantize_sixteen() -> str:
    """PTX that turns 16 e4m3 codes, $8 to $11, into pairs of bfloat16.

    Channels 0 and 1 of every four are in $0 to $3, channels 2 and 3 in $4 to $7. Both halves of $12 hold the scale.

    Sign, exponent and mantissa are moved to their places in a bfloat16. This is the value times 2**-120, and the
    product with 2**120 is exact. Only the product with the scale rounds. A NaN code would become 480; instead it makes
    the scale NaN, and with it all 16 channels. This changes no result: a single NaN channel makes every score of the
    token NaN.
    """
    lines = [".reg .b32 code, even, largest, scale, unbias;", ".reg .pred nan;", "mov.b32 largest, 0;"]
    for i in range(4):
        low, high = f"${i}", f"${4 + i}"
        lines += [
            f"prmt.b32 code, ${8 + i}, 0, 0x3120;",  # codes 0, 1: lower bytes of the halves; 2, 3: upper bytes
            f"shl.b32 {low}, code, 4;",
            f"and.b32 {low}, {low}, 0x07F007F0;",
            f"shr.u32 {high}, code, 4;",
            f"and.b32 {high}, {high}, 0x07F007F0;",
            f"max.u16x2 largest, largest, {low};",
            f"max.u16x2 largest, largest, {high};",
            "shl.b32 even, code, 8;",
            f"lop3.b32 {low}, even, 0x80008000, {low}, 0xEA;",  # (a & b) | c
            f"lop3.b32 {high}, code, 0x80008000, {high}, 0xEA;",
        ]
    lines += [
        "add.u32 largest, largest, 0x00100010;",  # a NaN code is all ones, and carries beyond the exponent
        "and.b32 largest, largest, 0x08000800;",
        "setp.ne.u32 nan, largest, 0;",
        "selp.b32 scale, 0x7FFF7FFF, $12, nan;",
        "mov.b32 unbias, 0x7B807B80;",
    ]
    for i in range(8):
        lines += [f"mul.rn.bf16x2 ${i}, ${i}, unbias;", f"mul.rn.bf16x2 ${i}, ${i}, scale;"]
    return "{\n" + "\n".join(lines) + "\n}"


DEQUANTIZE = gl.constexpr(_dequantize_sixteen())
CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 8))  # one scale operand for every int32
