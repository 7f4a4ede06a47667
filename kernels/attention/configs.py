"""How attention runs on a device: the one table of tuned configurations, by compute capability and format.

What is measured to be fast on one kind of device stands beside a portable default for all others.
``python benchmarks/decode.py`` measures what they reach.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from kvcompile.kernels.lang.launcher import ceil_div
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.layout.operand import PackedOperand


@dataclass(frozen=True)
class AttentionConfig:
    """How to run the attention kernel.

    Attributes:
        rows: query rows of a program, a power of two from 4; the rows of a KV head are its query heads times q_len.
        tokens: tokens of a tile, a power of two from 64 and from 16 * num_warps.
        num_warps: warps of a program.
        num_stages: tiles in flight.
        max_registers: cap on registers a thread, or None.
        programs_per_sm: programs that a streaming multiprocessor runs at once; splits aim at this.
    """

    rows: int
    tokens: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    programs_per_sm: int = 2

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


# Decoding, up to 8 rows: (compute capability, bits of the key in a tile, and of the value) -> configuration. Twelve
# warps with 168 registers fill a register file, and their tiles in flight fit into shared memory; most formats are
# faster with eight, two a scheduler. With fewer than 64 tokens for each warp a thread has one 16-bit
# scale, too little to copy asynchronously.
DECODE = {
    (9, 16, 16): AttentionConfig(8, 64, num_stages=3, programs_per_sm=2),
    (9, 8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=4, max_registers=168, programs_per_sm=4),
    (9, 8, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, max_registers=168, programs_per_sm=4),
    (9, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
    (9, 4, 4): AttentionConfig(8, 256, num_stages=3, max_registers=168, programs_per_sm=2),
    (9, 2, 4): AttentionConfig(8, 128, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6),
    (9, 2, 2): AttentionConfig(8, 128, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6),
    (8, 8, 8): AttentionConfig(8, 128, num_stages=2, max_registers=168, programs_per_sm=3),
    (8, 8, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
}
# The same for keys that are multiplied as integers by a query in digits, of up to 4 rows.
DECODE_DIGITS = {
    (9, 4, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=168, programs_per_sm=8),
    (9, 2, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=168, programs_per_sm=8),
    (9, 2, 2): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=168, programs_per_sm=8),
}
PORTABLE = AttentionConfig(8, 64)
FLOAT32 = AttentionConfig(16, 64, num_stages=1)


@functools.cache
def attention_config(
    capability: int, key: PackedOperand, value: PackedOperand, rows: int, mask_per_row: bool, float32: bool
) -> AttentionConfig:
    """The configuration for a device of compute capability ``capability`` (major) and ``rows`` query rows a KV head."""
    if float32:
        return FLOAT32
    padded_head_dim = max(key.padded_head_dim, value.padded_head_dim)
    if rows > 8:
        # Tensor core products of 16 rows and more hold a whole unpacked tile in registers on Hopper.
        most = 32 if mask_per_row or padded_head_dim > 128 else 64
        return AttentionConfig(min(triton.next_power_of_2(rows), most), 64)
    config = PORTABLE
    if padded_head_dim <= 128 and key is not value:
        kind = (capability, key.tile_bits, value.tile_bits)
        config = DECODE.get(kind, PORTABLE)
        if rows <= 4 and key.multiplies_integers:
            config = DECODE_DIGITS.get(kind, config)
    if key.granularity == "channel" and config.tokens not in (key.block_tokens, key.block_tokens * config.num_warps):
        config = PORTABLE  # a tile has one block for every warp, or is a block
    # With 4 rows Triton's loop for a cache that is not packed has a sixth more instructions than with 8.
    return replace(config, rows=4) if rows <= 4 and key.tile_bits < 16 else config


# Latents, by compute capability and query rows of a program: 64 are what the tensor cores of Hopper take at least, and
# their outputs half of a register file; programs of 16 have time for them while tokens are read.
LATENTS = {
    (9, 16): AttentionConfig(16, 32, num_stages=3, programs_per_sm=2),
    (9, 64): AttentionConfig(64, 64, num_warps=8, num_stages=2, programs_per_sm=1),
}
PORTABLE_LATENTS = AttentionConfig(16, 32, num_stages=1)
# The kernel in Gluon, which has its own warps beyond four: a multiprocessor has room for one program.
WARP_SPECIALIZED_LATENTS = AttentionConfig(64, 64, programs_per_sm=1)
FLOAT32_LATENTS = AttentionConfig(16, 16, num_stages=1, programs_per_sm=1)


@functools.cache
def latent_config(capability: int, rows: int, float32: bool, has_gluon: bool) -> AttentionConfig:
    """The configuration of attention to latents for ``rows`` query rows a sequence.

    ``has_gluon`` says whether :mod:`kvcompile.kernels.latent.hopper` can be compiled.
    """
    if float32:
        return FLOAT32_LATENTS
    if capability == 9 and has_gluon:
        return WARP_SPECIALIZED_LATENTS
    return LATENTS.get((capability, 16 if rows <= 16 else 64), PORTABLE_LATENTS)


def num_splits(config: AttentionConfig, programs: int, kv_len: int, num_sms: int) -> int:
    """Splits of the tokens for a grid of ``programs`` without splits: one wave of programs, no split without a tile."""
    tiles = max(1, ceil_div(kv_len, config.tokens))
    splits = max(1, min(tiles, config.programs_per_sm * num_sms // programs))
    return ceil_div(tiles, ceil_div(tiles, splits))
