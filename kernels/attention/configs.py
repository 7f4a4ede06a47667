"""Tuned configurations of the attention kernels, by compute capability and format.

Each table has the configurations that were measured to be the fastest on one kind of device, and a portable default for
all other devices. ``python benchmarks/decode.py`` measures their speed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvcompile.compat.triton_names import PREFERS_WARPGROUPS
from kvcompile.kernels.lang.launcher import Multiprocessor, ceil_div
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.layout.operand import PackedOperand


@dataclass(frozen=True)
class AttentionConfig:
    """The launch configuration of an attention kernel.

    Attributes:
        rows: query rows of a program, a power of two and at least 4. A KV head has as many query rows as its query
            heads times q_len.
        tokens: tokens of a tile, a power of two, at least 64 and at least 16 * num_warps.
        num_warps: warps of a program.
        num_stages: tiles that are loaded ahead.
        max_registers: most registers of a thread; None leaves the number to the compiler.
        programs_per_sm: programs for each streaming multiprocessor, which determine the number of splits. A
            multiprocessor has room for at least this many at once.
        least_tiles: the least tiles of a split with which a second warp per scheduler pays. If splits would be shorter,
            there are half as many.
        spare_programs: programs for which a multiprocessor has room besides ``programs_per_sm``. They may attend to
            exact blocks.
        exact_stages: items of exact blocks whose rows are in use or loaded ahead.
    """

    rows: int
    tokens: int
    num_warps: int = 4
    num_stages: int = 2
    max_registers: int | None = None
    programs_per_sm: int = 2
    least_tiles: int = 0
    spare_programs: int = 0
    exact_stages: int = 1

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


# Decoding with up to 8 rows, by (compute capability, bits of a key code in a tile, bits of a value code in a tile).
# Codes of 8 bits take few instructions, so that four warps per multiprocessor, one per scheduler, keep the memory busy.
# Codes of at most 4 bits take more instructions, and two warps per scheduler hide their latency. Eight warps need no
# limit on registers, and with a limit of 168 a loop with a mask spills. With fewer than 64 tokens per warp, a thread
# would have a single 16-bit scale, which is too small for an asynchronous copy.
DECODE = {
    (9, 16, 16): AttentionConfig(8, 64, num_stages=3, programs_per_sm=1),
    (9, 8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=4, programs_per_sm=2),
    (9, 8, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=2),
    (9, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
    (9, 4, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8),
    (9, 2, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8),
    (9, 2, 2): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8),
    (8, 8, 8): AttentionConfig(8, 128, num_stages=2, max_registers=168, programs_per_sm=3),
    (8, 8, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (8, 4, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
}
# With 168 registers for each thread, a multiprocessor has room for twelve warps.
SIX_PROGRAMS = AttentionConfig(8, 128, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6)
# Like DECODE, for keys with scales per channel.
DECODE_CHANNEL = {
    (9, 8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=3, programs_per_sm=4),
    (9, 2, 4): SIX_PROGRAMS,
    (9, 2, 2): SIX_PROGRAMS,
}
# Like DECODE, for multiprocessors with less than NARROW bytes per second of memory bandwidth each. If two warps share a
# scheduler there, one is served first, and the other one ends later and alone.
DECODE_NARROW = {
    (9, 4, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=2),
    (9, 2, 4): SIX_PROGRAMS,
    (9, 2, 2): SIX_PROGRAMS,
}
# Decoding with up to 8 rows for planes of unequal bits, by compute capability. They take more registers: a tile of 128
# tokens spills.
DECODE_UNEQUAL = {9: AttentionConfig(8, 64, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6)}
# Like DECODE, with up to 4 rows, for keys that are multiplied as integers by a query in digits. With 200 registers,
# eight warps leave room for the kernel that merges the splits.
DECODE_DIGITS = {
    (9, 4, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
    (9, 2, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=200, programs_per_sm=7, least_tiles=8),
    (9, 2, 2): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=200, programs_per_sm=8, least_tiles=8),
}
# Like DECODE_DIGITS, for multiprocessors with less than NARROW bytes per second each. There one warp per scheduler is
# fast enough for codes of 2 and 3 bits, too.
DECODE_DIGITS_NARROW = {
    (9, 2, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
    (9, 2, 2): AttentionConfig(4, 128, num_warps=2, num_stages=3, programs_per_sm=2),
}
NARROW = 31e9
"""An H100 has 25 GB/s for each multiprocessor, and an H200 has 37."""

ROWS_OF_ANOTHER = {10: 9, 12: 8}
"""Maps a compute capability without measurements to one with as much shared memory, whose configurations it uses."""

SCRATCH_NBYTES = 8 << 10
"""Shared memory of a decode program besides its query and the tiles that it loads ahead, if its warps exchange data."""
RESERVED_NBYTES = 1 << 10
"""Shared memory that a multiprocessor reserves for each program."""

SPLITS_IN_ROUNDS = 5
"""The splits if not all programs run at once. More were not faster (H200)."""
MOST_ROUNDS = 8
"""The most rounds of KV heads that all have splits. After more rounds the last one hardly matters."""
TILES_OF_ROUND = 8
"""The least tiles of such a split: a program also has to prepare its query, and the splits must be merged."""

SCHEDULERS = 4
"""Schedulers of a multiprocessor."""
SHORT_PROGRAM = 8
"""A program of packed tokens with fewer tiles is short."""
ITEMS_OF_PROGRAM, ITEMS_OF_SHORT_PROGRAM = 4, 2
"""Items of a program that attends to exact blocks alone, if there is room for so many programs.

The second number is for short programs of packed tokens. More items make programs longer, and the merge shorter.
"""
TILES_OF_EXACT_ITEM = 4
"""The least tiles of a program of packed tokens for each item of a program that attends to exact blocks alone."""
EXACT_STAGES = 2
"""On Hopper, the items of a program whose rows are in use or loaded ahead."""

PORTABLE = AttentionConfig(8, 64)
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
    mask_per_row: bool,
    float32: bool,
) -> AttentionConfig | None:
    """The configuration of :func:`kvcompile.kernels.attention.decode.attention_kernel`; None if none serves the device.

    Args:
        capability: the major compute capability; 0 for other devices.
        multiprocessor: the sizes of a multiprocessor.
        key, value: compile-time descriptions of keys and values.
        rows: query rows per KV head.
        mask_per_row: whether there is a per-row mask, which differs between the query rows of a KV head.
        float32: whether products are computed in float32.
    """
    narrow = 0 < multiprocessor.bandwidth < NARROW
    config = _tuned_config(capability, key, value, rows, mask_per_row, float32, narrow)
    if multiprocessor.bandwidth >= NARROW and max(key.head_dim, value.head_dim) < 128:
        config = _with_twice_the_programs(config, multiprocessor)
    tile_nbytes = _tile_nbytes(config, key, value, least_bits=0)
    itemsize = 4 if float32 or key.tile_bits == 32 else 2
    shared_nbytes = SCRATCH_NBYTES if config.num_warps > 1 else 0
    shared_nbytes += config.rows * (key.padded_head_dim * itemsize + value.padded_head_dim * 4)
    if capability == 9 and not float32 and key.tile_bits < 32:  # the rows of Hopper were measured with this rule
        num_tiles = max(1, (multiprocessor.of_program - SCRATCH_NBYTES) // max(1, tile_nbytes))
        num_stages, programs = min(config.num_stages, num_tiles), config.programs_per_sm
        of_program = shared_nbytes + (num_stages - 1) * tile_nbytes + RESERVED_NBYTES
        if any(operand.width != operand.padded_width for operand in (key, value)):  # they were measured without padding
            programs = max(1, min(programs, multiprocessor.shared_memory // of_program))
        config = replace(config, num_stages=num_stages, programs_per_sm=programs)
        return _with_spare_programs(config, key, value, shared_nbytes, of_program, multiprocessor)
    other_nbytes = shared_nbytes
    # Packed codes become levels in registers. Floats pass through shared memory once more, and so do levels of words,
    # levels of unequal planes without inline PTX, and levels that have been multiplied by scales.
    scaled_levels = float32 and any(operand.granularity != "token" for operand in (key, value))
    if scaled_levels or max(key.tile_bits, value.tile_bits) >= 16:
        other_nbytes += _tile_nbytes(config, key, value, least_bits=32 if float32 else 0)
    elif any(
        operand.granularity == "group" or operand.word_fields or _unpacks_without_ptx(operand)
        for operand in (key, value)
    ):
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
    """The configuration with stages for exact rows, and with the number of spare programs.

    Args:
        config, key, value, multiprocessor: as in :func:`attention_config`.
        shared_nbytes: shared memory of a program besides tiles and rows that are loaded ahead.
        of_program: shared memory of a program without exact blocks.
    """
    if key.num_entries + value.num_entries == 0:
        return config
    config = replace(config, exact_stages=EXACT_STAGES)
    of_program = max(of_program, shared_nbytes + RESERVED_NBYTES + _exact_nbytes(config, key, value, float32=False))
    room = min(multiprocessor.shared_memory // of_program, _programs_by_registers(config, multiprocessor))
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


def _tuned_config(
    capability: int,
    key: PackedOperand,
    value: PackedOperand,
    rows: int,
    mask_per_row: bool,
    float32: bool,
    narrow: bool,
) -> AttentionConfig:
    if float32:
        return FLOAT32
    padded_head_dim = max(key.padded_head_dim, value.padded_head_dim)
    if rows > 8:
        # On Hopper, tensor core products of 16 and more rows hold a whole unpacked tile in registers.
        most = 32 if mask_per_row or padded_head_dim > 128 else 64
        return AttentionConfig(min(triton.next_power_of_2(rows), most), 64)
    config = PORTABLE
    if padded_head_dim <= 128 and key is not value and not _spills_tuned(capability, key, value):
        kind = (ROWS_OF_ANOTHER.get(capability, capability), key.tile_bits, value.tile_bits)
        config = DECODE.get(kind, PORTABLE)
        config = DECODE_CHANNEL.get(kind, config) if key.granularity == "channel" else config
        config = DECODE_NARROW.get(kind, config) if narrow else config
        if _has_unequal_planes(key, value) and max(key.tile_bits, value.tile_bits) <= 4:
            config = DECODE_UNEQUAL.get(kind[0], PORTABLE)
        if rows <= 4 and key.multiplies_integers and not _is_wrong_with_one_warp(key, value):
            config = DECODE_DIGITS.get(kind, config)
            config = DECODE_DIGITS_NARROW.get(kind, config) if narrow else config
    # A tile of keys with scales per channel must be one block, or have one block per warp. With a per-row mask
    # Triton 3.6 and 3.7 fail on the second kind if the keys have zero points (``applyLinearLayout``).
    tiles = (key.block_tokens,) if mask_per_row else (key.block_tokens, key.block_tokens * config.num_warps)
    if key.granularity == "channel" and config.tokens not in tiles:
        config = PORTABLE
    if PREFERS_WARPGROUPS and capability == 9 and config.num_warps == 4 and min(key.tile_bits, value.tile_bits) < 16:
        config = _of_two_warps(config)
    # For 16-bit keys Triton's loop has a sixth more instructions with 4 rows than with 8.
    return replace(config, rows=4) if rows <= 4 and key.tile_bits < 16 else config


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
    also in short splits.
    """
    most = max(config.programs_per_sm, _programs_by_registers(config, multiprocessor))
    return replace(config, programs_per_sm=min(2 * config.programs_per_sm, most), least_tiles=0)


def _programs_by_registers(config: AttentionConfig, multiprocessor: Multiprocessor) -> int:
    """The number of programs whose registers a multiprocessor has."""
    registers = config.max_registers or multiprocessor.registers_of_thread
    return multiprocessor.registers // (multiprocessor.warp_size * config.num_warps * registers)


def _is_wrong_with_one_warp(key: PackedOperand, value: PackedOperand) -> bool:
    """Whether a program with one warp computes wrong outputs.

    Triton 3.6 compiles it wrongly if it decodes rotated values for the exact blocks of keys: outputs are 6 % off. With
    two warps they are right, and so are programs that decode rotated keys for the exact blocks of values.
    """
    return key.num_entries > 0 and value.num_entries == 0 and value.rotated


def _has_unequal_planes(key: PackedOperand, value: PackedOperand) -> bool:
    """Whether keys or values have planes of unequal bits, or words."""
    return not (key.has_equal_planes and value.has_equal_planes)


def _unpacks_without_ptx(operand: PackedOperand) -> bool:
    """Whether the planes have unequal bits, and are unpacked without inline PTX."""
    return not operand.has_equal_planes and operand.unpack_ptx is None


def _spills_tuned(capability: int, key: PackedOperand, value: PackedOperand) -> bool:
    """Whether the tuned configuration spills.

    It spills if unequal planes are unpacked without inline PTX. It also spills if scales are per group: they take as
    many float32 registers as the levels of a plane. On Hopper it then spills 10 KiB of a thread for
    ``int4_per_group_128``, and the portable configuration spills nothing. With 8 bits, which have one plane, the tuned
    configuration spills 64 bytes.
    """
    if _has_unequal_planes(key, value) and None in (key.unpack_ptx, value.unpack_ptx):
        return True
    has_groups = "group" in (key.granularity, value.granularity)
    return has_groups and (capability != 9 or min(key.tile_bits, value.tile_bits) < 8)


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


class Division(NamedTuple):
    """How the tokens of KV heads are divided among programs of the decode kernel, see its docstring.

    Attributes:
        num_whole: KV heads whose tokens are not split, for each KV head with splits.
        num_splits: the splits of the other KV heads.
    """

    num_whole: int
    num_splits: int


def division_of(config: AttentionConfig, num_heads: int, row_tiles: int, kv_len: int, num_sms: int) -> Division:
    """The division of the tokens that should take the least time. Every split has a tile.

    If not all programs run at once, at least one round of KV heads is split, and starts last. Multiprocessors that are
    done with whole KV heads earlier then take more splits, and few outputs are merged.

    Args:
        config: the configuration of the kernel.
        num_heads: KV heads of all sequences.
        row_tiles: tiles of query rows of a KV head.
        kv_len: the number of tokens.
        num_sms: streaming multiprocessors of the device.
    """
    programs, room = num_heads * row_tiles, config.programs_per_sm * num_sms
    if programs <= room:
        return Division(0, num_splits(config, programs, kv_len, num_sms))
    splits = _splits_in_rounds(max(1, ceil_div(kv_len, config.tokens)))
    shares = range(programs // room, 0, -1) if splits > 1 else [1]
    return Division(next(count for count in shares if num_heads % count == 0) - 1, splits)


def exact_programs_of(
    config: AttentionConfig, items: int, num_heads: int, packed_programs: int, tiles: int, num_sms: int
) -> int:
    """The number of programs that attend to the exact blocks of a KV head, and to nothing else.

    They should end before the programs of packed tokens. If every scheduler has one warp of packed tokens, there is at
    most one such program for each multiprocessor. A GPU then still divides the other programs evenly among its
    multiprocessors. An H200 has 132 of them: in a grid of 640 programs, none gets more than 4 of the first 512. In a
    grid of 704 programs, 8 multiprocessors get 5 of the first 512, and end last.

    Args:
        config: the configuration of the kernel.
        items: items of the exact blocks of a KV head, see :func:`kvcompile.kernels.attention.exact_blocks.num_items`.
        num_heads: KV heads of all sequences times tiles of query rows.
        packed_programs: programs of packed tokens.
        tiles: the most tiles of such a program.
        num_sms: streaming multiprocessors of the device.

    Returns:
        0 if the programs of packed tokens attend to exact blocks after their tiles.
    """
    if items == 0 or config.spare_programs == 0:
        return 0
    if tiles < SHORT_PROGRAM:
        return max(1, min(ceil_div(items, ITEMS_OF_SHORT_PROGRAM), config.spare_programs * num_sms // num_heads))
    programs = ceil_div(items, ITEMS_OF_PROGRAM)
    if config.num_warps * config.programs_per_sm > SCHEDULERS:
        programs = min(programs, ceil_div(2 * num_sms, num_heads))
    elif packed_programs > config.programs_per_sm * num_sms:
        programs = 1
    else:
        programs = min(programs, ((config.programs_per_sm + 1) * num_sms - packed_programs) // num_heads)
    return programs if programs > 0 and TILES_OF_EXACT_ITEM * ceil_div(items, programs) <= tiles else 0


def num_splits(config: AttentionConfig, programs: int, kv_len: int, num_sms: int) -> int:
    """The number of splits that should take the least time if all KV heads have the same. Every split has a tile.

    If two splits of every sequence can run at once, all programs run in one round. Otherwise the last round may have
    few programs: 1.2 rounds of whole sequences take almost as long as two. More splits make rounds shorter, so that
    less of the device is idle in the last one: 5 splits make 6 rounds of a fifth of the length.

    Args:
        config: the configuration of the kernel.
        programs: programs of the grid for one split.
        kv_len: the number of tokens.
        num_sms: streaming multiprocessors of the device.
    """
    tiles = max(1, ceil_div(kv_len, config.tokens))
    room = config.programs_per_sm * num_sms
    if 2 * programs <= room:
        splits = room // programs
        if tiles < config.least_tiles * splits:
            splits = max(1, splits // 2)  # one warp per scheduler instead of two
    elif programs > MOST_ROUNDS * room or -programs % room <= room // 10:  # the last round is almost full
        splits = 1
    else:
        return _splits_in_rounds(tiles)
    return ceil_div(tiles, ceil_div(tiles, splits))


def _splits_in_rounds(tiles: int) -> int:
    """The number of splits of ``tiles`` tiles if not all programs run at once."""
    splits = max(1, min(SPLITS_IN_ROUNDS, tiles // TILES_OF_ROUND))
    return ceil_div(tiles, ceil_div(tiles, splits))
