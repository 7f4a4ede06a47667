"""Configurations of the attention kernels, adapted to the sizes of a multiprocessor.

They are tuned (:mod:`kvcompile.kernels.attention.tuned`), or portable if none was measured.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from kvcompile.compat.triton_names import PREFERS_WARPGROUPS
from kvcompile.kernels.attention.tuned import NARROW, AttentionConfig, tuned_config
from kvcompile.kernels.lang.launcher import Multiprocessor
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.layout.operand import PackedOperand

SCRATCH_NBYTES = 8 << 10
"""Shared memory of a decode program besides its query and the tiles that it loads ahead, if its warps exchange data."""
RESERVED_NBYTES = 1 << 10
"""Shared memory that a multiprocessor reserves for each program."""

EXACT_STAGES = 2
"""On Hopper, the items of a program whose rows are in use or loaded ahead."""

PORTABLE = AttentionConfig(8, 64)
PORTABLE_WIDE = AttentionConfig(8, 64, num_stages=3)
"""For a head_dim of more than 256 channels, for any number of query rows: outputs of more rows spill."""
FACTORS = AttentionConfig(8, 64, num_stages=2)
FACTORS_ROTATED = AttentionConfig(8, 64, num_stages=1, programs_per_sm=4)
FACTORS_ROTATED_NARROW = AttentionConfig(8, 64, num_stages=1, max_registers=128, programs_per_sm=4)
"""For a head_dim of at most 64 channels, which fit 128 registers."""
FACTORS_FLOAT32 = AttentionConfig(16, 64, num_stages=1)
FLOAT32 = AttentionConfig(16, 64, num_stages=1)


@functools.cache
def attention_config(
    capability: int,
    multiprocessor: Multiprocessor,
    key: PackedOperand,
    value: PackedOperand,
    rows: int,
    row_mask: str,
    float32: bool,
) -> AttentionConfig | None:
    """The configuration of :func:`kvcompile.kernels.attention.decode.attention_kernel`; None if none serves the device.

    Args:
        capability: the major compute capability; 0 for other devices.
        multiprocessor: the sizes of a multiprocessor.
        key, value: compile-time descriptions of keys and values.
        rows: query rows per KV head.
        row_mask: "bool" or "float" if there is such a mask and it differs between the query rows of a KV head;
            otherwise "none".
        float32: whether products are computed in float32.
    """
    config = FLOAT32 if float32 else _config_of(capability, multiprocessor, key, value, rows, row_mask)
    tile_nbytes = _tile_nbytes(config, key, value, least_bits=0)
    itemsize = 4 if float32 or key.tile_bits == 32 else 2
    shared_nbytes = SCRATCH_NBYTES if config.num_warps > 1 else 0
    shared_nbytes += config.rows * (key.padded_head_dim * itemsize + value.padded_head_dim * 4)
    if capability == 9 and not float32 and key.tile_bits < 32:  # the rows of Hopper were measured with this rule
        num_tiles = max(1, (multiprocessor.of_program - SCRATCH_NBYTES) // max(1, tile_nbytes))
        num_stages, programs = min(config.num_stages, num_tiles), config.programs_per_sm
        of_program = shared_nbytes + (num_stages - 1) * tile_nbytes + RESERVED_NBYTES
        is_padded = any(operand.width != operand.padded_width for operand in (key, value))
        if is_padded or max(key.padded_head_dim, value.padded_head_dim) != 128:  # they may not have room
            needed = of_program + (num_stages - 1) * config.tokens * (_scale_nbytes(key) + _scale_nbytes(value))
            if value.tile_bits >= 16 and config.num_warps < 4:  # floats pass through shared memory once more
                needed += config.tokens * value.tile_bits * value.padded_head_dim // 8
            programs = max(1, min(programs, multiprocessor.shared_memory // needed))
        config = replace(config, num_stages=num_stages, programs_per_sm=programs)
        return _with_spare_programs(config, key, value, shared_nbytes, of_program, multiprocessor)
    other_nbytes = shared_nbytes
    # Packed codes become levels in registers. Floats pass through shared memory once more, and so do levels of words,
    # levels of unequal planes without inline PTX, and levels that have been multiplied by scales.
    scaled_levels = float32 and any(operand.granularity != "token" for operand in (key, value))
    if scaled_levels or max(key.tile_bits, value.tile_bits) >= 16:
        other_nbytes += _tile_nbytes(config, key, value, least_bits=32 if float32 else 0)
    elif any(operand.word_fields or _unpacks_without_ptx(operand) for operand in (key, value)):
        other_nbytes += _tile_nbytes(config, key, value, least_bits=16) // 2  # of keys or of values
    else:
        other_nbytes += tile_nbytes if config.num_stages == 1 else 0
    exact_nbytes = 0
    if key.num_entries + value.num_entries > 0:
        if float32 and capability == 10:
            return None  # Triton 3.7 fails on this kernel for sm_100 (``ConvertNVGPUToLLVM``)
        exact_nbytes = shared_nbytes + _exact_nbytes(config, key, value, float32)
    return _with_room(config, tile_nbytes, other_nbytes, exact_nbytes, multiprocessor)


@functools.cache
def config_with_factors(
    multiprocessor: Multiprocessor, key: PackedOperand, value: PackedOperand, rows: int, float32: bool
) -> AttentionConfig | None:
    """The configuration of :func:`kvcompile.kernels.attention.decode.attention_with_factors_kernel`.

    None if none serves the device. A program loads two tiles of factors beside each tile of keys. In half precision the
    two tiles are as large as a tile of 32-bit keys, so that fewer tiles are loaded ahead. For a rotated format no tile
    is loaded ahead: it is faster with more programs at once.

    Args:
        multiprocessor: the sizes of a multiprocessor.
        key, value: compile-time descriptions of keys and values.
        rows: query rows per KV head.
        float32: whether products are computed in float32.
    """
    rotated = FACTORS_ROTATED_NARROW if key.padded_head_dim <= 64 else FACTORS_ROTATED
    config = FACTORS_FLOAT32 if float32 else rotated if key.rotated else FACTORS
    config = replace(config, rows=min(16, max(4, triton.next_power_of_2(rows))))
    itemsize = 4 if float32 else 2
    factors_nbytes = 2 * config.tokens * key.padded_head_dim * itemsize
    tile_nbytes = _tile_nbytes(config, key, value, least_bits=0) + factors_nbytes
    query_nbytes = config.rows * (2 * key.padded_head_dim * itemsize + value.padded_head_dim * 4)
    # Levels that were multiplied by factors pass through shared memory, and so do levels of values in float32.
    other_nbytes = SCRATCH_NBYTES + query_nbytes + factors_nbytes // 2
    other_nbytes += _tile_nbytes(config, value, value, least_bits=32 if float32 else 16) // 2
    exact_nbytes = 0
    if key.num_entries + value.num_entries > 0:
        exact_nbytes = SCRATCH_NBYTES + query_nbytes + 2 * _exact_nbytes(config, key, value, float32)
    return _with_room(config, tile_nbytes, other_nbytes, exact_nbytes, multiprocessor)


def _with_spare_programs(
    config: AttentionConfig,
    key: PackedOperand,
    value: PackedOperand,
    shared_nbytes: int,
    of_program: int,
    multiprocessor: Multiprocessor,
) -> AttentionConfig:
    """The configuration with stages for exact rows, with as many programs as have room, and with the spare programs.

    Args:
        config, key, value, multiprocessor: as in :func:`attention_config`.
        shared_nbytes: shared memory of a program besides tiles and rows that are loaded ahead.
        of_program: shared memory of a program without exact blocks.
    """
    if key.num_entries + value.num_entries == 0:
        return config
    if max(key.padded_head_dim, value.padded_head_dim) <= 256:  # rows of more channels would not fit twice
        config = replace(config, exact_stages=EXACT_STAGES)
    of_program = max(of_program, shared_nbytes + RESERVED_NBYTES + _exact_nbytes(config, key, value, float32=False))
    room = min(multiprocessor.shared_memory // of_program, _programs_by_registers(config, multiprocessor))
    if max(key.padded_head_dim, value.padded_head_dim) > 128 and key.num_entries == value.num_entries:
        # Rows that are loaded ahead take more shared memory than tiles, with which the configurations were measured.
        of_exact = RESERVED_NBYTES + _exact_nbytes(config, key, value, float32=False)
        of_exact += 2 * max(8, config.rows) * key.padded_head_dim + (SCRATCH_NBYTES if config.num_warps > 1 else 0)
        programs = min(config.programs_per_sm, multiprocessor.shared_memory // of_exact)
        config = replace(config, programs_per_sm=max(1, programs))
    return replace(config, spare_programs=max(0, room - config.programs_per_sm))


def _exact_nbytes(config: AttentionConfig, key: PackedOperand, value: PackedOperand, float32: bool) -> int:
    """Shared memory for the exact rows of all warps, 16 for each warp.

    For products in float32, rows of keys and of values are in shared memory at once; otherwise only one of the two. The
    rows of items that are loaded ahead are there, too. Rows that are exact for one operand only are decoded to float32
    for the other one.
    """
    rows = 16 * config.num_warps
    if float32:
        return rows * 4 * (key.padded_head_dim + value.padded_head_dim)
    itemsize = 2 if key.num_entries == value.num_entries else 4
    ahead = 2 * (config.exact_stages - 1) * (key.padded_head_dim + value.padded_head_dim)
    return rows * (itemsize * max(key.padded_head_dim, value.padded_head_dim) + ahead)


def _tile_nbytes(config: AttentionConfig, key: PackedOperand, value: PackedOperand, least_bits: int) -> int:
    """Bytes of a tile of keys and values, with at least ``least_bits`` for each channel."""
    bits = (max(operand.loaded_bits, least_bits * operand.padded_head_dim) for operand in (key, value))
    return config.tokens * sum(bits) // 8


def _scale_nbytes(operand: PackedOperand) -> int:
    """Bytes of scales and zero points for a token, rounded up."""
    dtypes = [dtype for dtype in (operand.scale_dtype, operand.zero_dtype) if dtype is not None]
    tokens = operand.block_tokens if operand.granularity == "channel" else 1
    return -(-operand.num_scales * sum(dtype.primitive_bitwidth // 8 for dtype in dtypes) // tokens)


def _with_room(
    config: AttentionConfig, tile_nbytes: int, other_nbytes: int, exact_nbytes: int, multiprocessor: Multiprocessor
) -> AttentionConfig | None:
    """The configuration with as many programs, and as many tiles loaded ahead, as a multiprocessor has room for.

    If fewer programs have room than the configuration wants, each gets more registers.

    Args:
        config: for a multiprocessor that may have more shared memory.
        tile_nbytes: bytes of a tile that is loaded ahead.
        other_nbytes: shared memory of a program besides such tiles.
        exact_nbytes: shared memory of a program after its last tile, when it attends to exact blocks.
        multiprocessor: its sizes.

    Returns:
        None if there is no room for a program.
    """
    threads = multiprocessor.warp_size * config.num_warps
    most = max(1, min(config.programs_per_sm, _programs_by_registers(config, multiprocessor)))
    for least_stages in (min(2, config.num_stages), 1):  # a tile is loaded ahead, if possible
        for programs in range(most, 0, -1):
            of_program = min(multiprocessor.of_program, multiprocessor.shared_memory // programs - RESERVED_NBYTES)
            stages = min(config.num_stages, 1 + (of_program - other_nbytes) // max(1, tile_nbytes))
            if stages >= least_stages and of_program >= exact_nbytes:
                left = multiprocessor.registers // (threads * programs)
                limit = None if left >= multiprocessor.registers_of_thread else config.max_registers
                return replace(config, programs_per_sm=programs, num_stages=stages, max_registers=limit)
    return None


def _config_of(
    capability: int, multiprocessor: Multiprocessor, key: PackedOperand, value: PackedOperand, rows: int, row_mask: str
) -> AttentionConfig:
    """The configuration for products in half precision, before it is adapted to shared memory."""
    config = tuned_config(capability, key, value, rows, 0 < multiprocessor.bandwidth < NARROW)
    # The addresses of a float mask for each row take so many registers that the tuned configurations spill kilobytes.
    is_tuned = config is not None and _holds_whole_blocks(config, key) and (row_mask != "float" or rows <= 4)
    if config is None or not is_tuned:
        config = _portable_config(capability, key, value, rows, row_mask)
    if multiprocessor.bandwidth >= NARROW and max(key.head_dim, value.head_dim) < 128:
        config = _with_twice_the_programs(config, multiprocessor)
    is_warpgroup = capability == 9 and config.num_warps == 4
    if PREFERS_WARPGROUPS and is_warpgroup and rows <= 8 and min(key.tile_bits, value.tile_bits) < 16:
        config = _of_two_warps(config)
    # For 16-bit keys Triton's loop has a sixth more instructions with 4 rows than with 8.
    return replace(config, rows=4) if rows <= 4 and key.tile_bits < 16 else config


def _holds_whole_blocks(config: AttentionConfig, key: PackedOperand) -> bool:
    """Whether a tile of keys with scales per channel is one block, or each warp has its own blocks."""
    tiles = key.block_tokens, key.block_tokens * config.num_warps
    return key.granularity != "channel" or config.num_warps == 1 or config.tokens in tiles


def _portable_config(
    capability: int, key: PackedOperand, value: PackedOperand, rows: int, row_mask: str
) -> AttentionConfig:
    """The configuration if none was measured."""
    if max(key.padded_head_dim, value.padded_head_dim) > 256:
        return PORTABLE_WIDE
    if rows <= 8:
        return PORTABLE
    if key.granularity == "channel" and capability in (9, 10):
        # Products of a warpgroup with the scaled query of a block were wrong for int4 with 192 and 256 channels, and
        # read invalid addresses (Triton 3.6).
        return replace(_of_two_warps(PORTABLE), rows=16)
    most = 32 if row_mask != "none" or max(key.padded_head_dim, value.padded_head_dim) > 128 else 64
    return AttentionConfig(min(triton.next_power_of_2(rows), most), 64)


def _of_two_warps(config: AttentionConfig) -> AttentionConfig:
    """Change a configuration of four warps to two, with half the tokens and twice the programs, if tiles allow it.

    Two warps are not a warpgroup. For the products of a warpgroup each byte of codes is loaded alone and moved to
    another place, and the loop spills up to 0.9 KiB per thread (Triton 3.9).
    """
    tokens = max(64, config.tokens // 2)
    programs = config.programs_per_sm * config.tokens // tokens
    return replace(config, num_warps=2, tokens=tokens, programs_per_sm=programs)


def _with_twice_the_programs(config: AttentionConfig, multiprocessor: Multiprocessor) -> AttentionConfig:
    """The configuration for fewer than 128 channels: up to twice the programs, if registers suffice.

    A tile of fewer channels takes almost as many instructions. More warps must share a scheduler to hide their latency,
    also in short splits. With 200 registers a program of one warp spills if planes are padded.
    """
    if config.num_warps == 1:
        config = replace(config, max_registers=None)
    most = max(config.programs_per_sm, _programs_by_registers(config, multiprocessor))
    return replace(config, programs_per_sm=min(2 * config.programs_per_sm, most), least_tiles=0)


def _programs_by_registers(config: AttentionConfig, multiprocessor: Multiprocessor) -> int:
    """The number of programs whose registers a multiprocessor has."""
    registers = config.max_registers or multiprocessor.registers_of_thread
    return multiprocessor.registers // (multiprocessor.warp_size * config.num_warps * registers)


def _unpacks_without_ptx(operand: PackedOperand) -> bool:
    """Whether the planes have unequal bits, and are unpacked without inline PTX."""
    return not operand.has_equal_planes and operand.unpack_ptx is None


# Latents, by (compute capability, query rows of a program). A product of warpgroups on Hopper has at least 64 rows,
# whose outputs fill half of a register file. A program of 16 rows uses smaller products, and finishes them while tokens
# are loaded.
LATENTS = {
    (9, 16): AttentionConfig(16, 32, num_stages=3, programs_per_sm=2),
    (9, 64): AttentionConfig(64, 64, num_warps=8, num_stages=2, programs_per_sm=1),
}
PORTABLE_LATENTS = AttentionConfig(16, 32, num_stages=1)
PORTABLE_LATENTS_NBYTES = 72 << 10
"""Shared memory of a program of this configuration: its query, and the tile in bfloat16."""
# The kernel in Gluon adds warps to the four that are launched: a multiprocessor has room for one program.
WARP_SPECIALIZED_LATENTS = AttentionConfig(64, 64, programs_per_sm=1)
FLOAT32_LATENTS = AttentionConfig(16, 16, num_stages=1, programs_per_sm=1)


@functools.cache
def latent_config(
    capability: int, multiprocessor: Multiprocessor, rows: int, float32: bool, has_gluon: bool
) -> AttentionConfig:
    """The configuration of attention on latents.

    Args:
        capability: the major compute capability; 0 for other devices.
        multiprocessor: the sizes of a multiprocessor.
        rows: query rows per sequence.
        float32: whether products are computed in float32.
        has_gluon: whether :mod:`kvcompile.kernels.latent.hopper` can be compiled.
    """
    if float32:
        return FLOAT32_LATENTS
    if capability == 9 and has_gluon:
        return WARP_SPECIALIZED_LATENTS
    tuned = LATENTS.get((capability, 16 if rows <= 16 else 64))
    room = multiprocessor.shared_memory // (PORTABLE_LATENTS_NBYTES + RESERVED_NBYTES)
    return tuned or replace(PORTABLE_LATENTS, programs_per_sm=max(1, min(PORTABLE_LATENTS.programs_per_sm, room)))
