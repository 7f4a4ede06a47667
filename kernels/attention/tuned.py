"""Configurations of decode attention that were measured to be the fastest on one kind of device.

The channels and the query rows of a KV head choose the table, and the bits of a key code and of a value code in a tile
choose the entry. 3-bit codes have 2 low bits in a tile. ``python benchmarks/decode.py`` measures the speed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

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


Table = dict[tuple[int, int], AttentionConfig]
"""Configurations by (bits of a key code in a tile, bits of a value code in a tile)."""

AMPERE: Table = {
    (8, 8): AttentionConfig(8, 128, num_stages=2, max_registers=168, programs_per_sm=3),
    (8, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (4, 8): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=2),
    (4, 4): AttentionConfig(8, 256, num_stages=2, max_registers=168, programs_per_sm=3),
}
"""Compute capability 8, up to 128 channels and 8 rows."""


def _same(config: AttentionConfig, *codes: tuple[int, int]) -> Table:
    """A table with the same configuration for all ``codes``."""
    return dict.fromkeys(codes, config)


FEW_BITS = ((4, 4), (4, 2), (2, 4), (2, 2))
"""Codes of at most 4 bits."""
ONE_OF_8_BITS = ((8, 4), (8, 2), (4, 8), (2, 8))
ONE_OF_16_BITS = ((16, 8), (16, 4), (16, 2), (8, 16), (4, 16), (2, 16))

# Hopper. The keys of these dictionaries are (most channels, most rows). A program with 4 rows has two columns for each
# row; a program with 8 or 16 rows has one.
#
# Codes of 8 bits take few instructions, so that one warp for each scheduler of a multiprocessor keeps the memory busy.
# Codes of at most 4 bits take more instructions, and two warps hide their latency. They need no limit on registers, and
# with a limit of 168 a loop with a mask spills. With fewer than 64 tokens per warp, a thread would have a single 16-bit
# scale, which is too small for an asynchronous copy.
#
# Four warps are a warpgroup. Its products of 16 and more rows hold a whole unpacked tile in registers, and each of its
# warps repeats the work that is the same for all tokens. With 16 rows of 128 channels two warps, or one, take 0.34 to
# 0.57 of the time for all formats without 16-bit codes (H200).
HOPPER: dict[tuple[int, int], Table] = {
    (64, 8): _same(
        AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (8, 8),
        *ONE_OF_8_BITS,
        *FEW_BITS,
        *ONE_OF_16_BITS,
    ),
    (64, 16): {
        (8, 8): AttentionConfig(16, 128, num_warps=2, num_stages=3, programs_per_sm=2),
        **_same(
            AttentionConfig(16, 64, num_warps=1, num_stages=3, programs_per_sm=4),
            *ONE_OF_8_BITS,
            *FEW_BITS,
        ),
    },
    (128, 4): _same(AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4), (16, 4), (16, 2), (2, 16)),
    (128, 8): {
        (16, 16): AttentionConfig(8, 64, num_stages=3, programs_per_sm=1),
        **_same(AttentionConfig(8, 64, num_stages=3, programs_per_sm=2), (16, 8), (8, 16), (4, 16), (2, 16)),
        (8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=4, programs_per_sm=2),
        **_same(
            AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4),
            (16, 4),
            (16, 2),
            *ONE_OF_8_BITS,
        ),
        **_same(AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8), *FEW_BITS),
    },
    (128, 16): {
        **_same(AttentionConfig(16, 64, num_stages=3, programs_per_sm=2), (16, 16), *ONE_OF_16_BITS),
        (8, 8): AttentionConfig(16, 64, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8),
        (8, 4): AttentionConfig(16, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        **_same(AttentionConfig(16, 128, num_warps=2, num_stages=2, programs_per_sm=4, least_tiles=8), (4, 8), (2, 8)),
        **_same(
            AttentionConfig(16, 128, num_warps=2, num_stages=3, programs_per_sm=4, least_tiles=8), (8, 2), *FEW_BITS
        ),
    },
    (128, 32): {(8, 8): AttentionConfig(32, 64, num_warps=2, num_stages=2, programs_per_sm=4)},
    (256, 4): {
        **_same(AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4), *ONE_OF_8_BITS, *FEW_BITS),
        **_same(AttentionConfig(4, 64, num_warps=1, num_stages=2, programs_per_sm=4), (16, 4), (16, 2)),
    },
    (256, 8): {
        (8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=3, programs_per_sm=2),
        **_same(AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4), (8, 4), (8, 2), *FEW_BITS),
        **_same(AttentionConfig(8, 64, num_warps=2, num_stages=2, programs_per_sm=3), (4, 8), (2, 8)),
        **_same(AttentionConfig(8, 64, num_warps=1, num_stages=2, programs_per_sm=4), (16, 4), (16, 2)),
    },
    (256, 16): {
        (8, 8): AttentionConfig(16, 64, num_warps=2, num_stages=3, programs_per_sm=2),
        **_same(AttentionConfig(16, 64, num_warps=2, num_stages=2, programs_per_sm=4), *ONE_OF_8_BITS, *FEW_BITS),
    },
}

TWO_WARPS: Table = _same(
    AttentionConfig(8, 64, num_warps=2, num_stages=2, programs_per_sm=4), (4, 8), (2, 8), *FEW_BITS
)
LOOKUP_TWO_WARPS: Table = {(4, 4): TWO_WARPS[4, 4], (2, 4): TWO_WARPS[2, 4]}

HOPPER_LOOKUP: dict[tuple[int, int], Table] = {(256, 4): LOOKUP_TWO_WARPS, (256, 8): LOOKUP_TWO_WARPS}
"""Like HOPPER, for values whose levels are looked up in a table. Two warps share the registers for 16 levels."""

HOPPER_CHANNEL: dict[tuple[int, int], Table] = {
    (64, 8): {
        **_same(AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=2), (4, 8), (2, 8)),
        **_same(AttentionConfig(8, 64, num_warps=1, num_stages=2, programs_per_sm=2), (4, 16), (2, 16)),
        **_same(AttentionConfig(8, 64, num_warps=1, num_stages=2, programs_per_sm=4), (2, 4), (2, 2)),
    },
    (128, 4): {
        (4, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        **_same(AttentionConfig(4, 64, num_warps=1, num_stages=2, programs_per_sm=4), (8, 16), (4, 16)),
        (2, 16): AttentionConfig(4, 64),  # as without a table: one warp takes 515 us
    },
    (128, 8): {
        (8, 8): AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (2, 8): AttentionConfig(8, 64, num_warps=1, num_stages=2, programs_per_sm=6),
        (2, 4): AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (2, 2): AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=8),
    },
    (256, 4): {
        **_same(AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4), (8, 8), (8, 4), (8, 2), (4, 4)),
        **_same(AttentionConfig(4, 64, num_warps=1, num_stages=2, programs_per_sm=8, least_tiles=8), (2, 4), (2, 2)),
        **_same(TWO_WARPS[4, 8], (4, 8), (2, 8), (4, 2)),
    },
    (256, 8): {
        **_same(AttentionConfig(8, 64, num_warps=2, num_stages=3, programs_per_sm=3), (8, 8), (8, 4), (8, 2)),
        **TWO_WARPS,
    },
}
"""Like HOPPER, for keys with scales per channel."""

HOPPER_CHANNEL_LOOKUP: dict[tuple[int, int], Table] = {
    (128, 4): {(4, 4): HOPPER[128, 8][4, 4]},
    (256, 4): LOOKUP_TWO_WARPS,
}
"""Like HOPPER_CHANNEL, for values whose levels are looked up in a table."""

# With 168 registers for each thread, a multiprocessor has room for twelve warps.
SIX_PROGRAMS = AttentionConfig(8, 128, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6)

HOPPER_CHANNEL_PADDED: dict[tuple[int, int], Table] = {
    (128, 8): {
        (8, 8): AttentionConfig(8, 64, num_warps=2, num_stages=3, programs_per_sm=4),
        **_same(AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=2), *ONE_OF_8_BITS),
        **_same(HOPPER[128, 8][4, 4], (4, 4), (4, 2)),
        **_same(SIX_PROGRAMS, (2, 4), (2, 2)),
    },
    (256, 4): HOPPER_CHANNEL[256, 8],
    (256, 8): HOPPER_CHANNEL[256, 8],
}
"""Like HOPPER_CHANNEL, for planes that are padded to a power of two. One warp takes 115 instead of 95 us (H200)."""

HOPPER_DIGITS: dict[tuple[int, int], Table] = {
    (128, 4): {
        (4, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (2, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=200, programs_per_sm=7, least_tiles=8),
        (2, 2): AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=200, programs_per_sm=8, least_tiles=8),
    },
    (128, 8): _same(
        AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=8, least_tiles=8), (4, 4), (2, 4), (2, 2)
    ),
}
"""Like HOPPER, for keys that are multiplied as integers by a query in digits.

With 200 registers, eight warps leave room for the kernel that merges the splits.
"""

HOPPER_UNEQUAL: dict[int, AttentionConfig] = {
    8: AttentionConfig(8, 64, num_warps=2, num_stages=2, max_registers=168, programs_per_sm=6),
    16: AttentionConfig(16, 64, num_warps=2, num_stages=2, programs_per_sm=4),
}
"""By the most rows, up to 128 channels, for planes of unequal bits. More registers are needed: 128 tokens spill."""
HOPPER_WORDS: dict[int, AttentionConfig] = {
    4: AttentionConfig(4, 64, num_warps=1, num_stages=3, max_registers=248, programs_per_sm=8),
    8: AttentionConfig(8, 64, num_warps=1, num_stages=3, max_registers=248, programs_per_sm=8),
    16: HOPPER_UNEQUAL[16],
}
"""Like HOPPER_UNEQUAL, for keys and values in words."""
HOPPER_UNEQUAL_BESIDE_8_BITS = AttentionConfig(8, 64, num_warps=2, num_stages=2, programs_per_sm=3)
"""For up to 8 rows."""

HOPPER_GROUP: dict[tuple[int, int], Table] = {
    (128, 8): {(8, 8): AttentionConfig(8, 64, num_warps=1, num_stages=3, programs_per_sm=4)},
}
"""Like HOPPER, for scales per group."""

HOPPER_NARROW: dict[tuple[int, int], Table] = {
    (128, 8): {
        (4, 4): AttentionConfig(8, 128, num_warps=2, num_stages=3, programs_per_sm=2),
        **_same(SIX_PROGRAMS, (2, 4), (2, 2)),
    },
}
"""Like HOPPER, for multiprocessors with less than NARROW bytes per second of memory bandwidth each.

If two warps share a scheduler there, one is served first, and the other one ends later and alone.
"""

HOPPER_DIGITS_NARROW: dict[tuple[int, int], Table] = {
    (128, 4): {
        (4, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (2, 4): AttentionConfig(4, 64, num_warps=1, num_stages=3, programs_per_sm=4),
        (2, 2): AttentionConfig(4, 128, num_warps=2, num_stages=3, programs_per_sm=2),
    },
}
"""Like HOPPER_DIGITS, for multiprocessors with less than NARROW bytes per second each.

There one warp per scheduler is fast enough for codes of 2 and 3 bits, too.
"""

NARROW = 31e9
"""An H100 has 25 GB/s for each multiprocessor, and an H200 has 37."""

TABLES_OF = {8: 8, 9: 9, 10: 9, 12: 8}
"""The compute capability whose tables serve a device: its own, or one with as much shared memory that was measured."""


def tuned_config(
    capability: int, key: PackedOperand, value: PackedOperand, rows: int, narrow: bool
) -> AttentionConfig | None:
    """The measured configuration for packed keys and values; None if there is none.

    Args:
        capability, key, value, rows: as in :func:`kvcompile.kernels.attention.configs.attention_config`.
        narrow: whether a multiprocessor has less than NARROW bytes of memory bandwidth per second.
    """
    tables = TABLES_OF.get(capability)
    codes = key.tile_bits, value.tile_bits
    channels = max(key.padded_head_dim, value.padded_head_dim)
    if tables is None or key is value:
        return None
    if has_unequal_planes(key, value) and None in (key.unpack_ptx, value.unpack_ptx):
        return None  # they spill
    if tables == 8:
        return AMPERE.get(codes) if channels <= 128 and rows <= 8 else None
    if has_unequal_planes(key, value):
        if channels > 128 or max(codes) > 8:
            return None
        if max(codes) == 0:
            return HOPPER_WORDS[4 if rows <= 4 else 8 if rows <= 8 else 16]
        if max(codes) <= 4:
            return HOPPER_UNEQUAL[8 if rows <= 8 else 16]
        return HOPPER_UNEQUAL_BESIDE_8_BITS if rows <= 8 else None
    if rows > 16 and 16 in codes:
        return None  # more rows for each program are faster
    for size in _sizes(channels, rows):
        for table in _tables(key, value, narrow):
            config = table.get(size, {}).get(codes)
            if config is not None:
                return _with_wide_copies(config, key)
    return None


def _sizes(channels: int, rows: int) -> list[tuple[int, int]]:
    """The keys of the tables of Hopper that serve these sizes, the best first.

    Tables for more than 16 rows have only a part of the formats. For the other formats several programs have 16 rows
    each. Likewise, tables for 128 channels serve fewer channels.
    """
    most_rows = [32, 16] if rows > 16 else [16] if rows > 8 else [8] if rows > 4 else [4, 8]
    most_channels = [64, 128] if channels <= 64 else [128] if channels <= 128 else [256] if channels <= 256 else []
    return [(most, rows) for most in most_channels for rows in most_rows]


def _tables(key: PackedOperand, value: PackedOperand, narrow: bool) -> list[dict[tuple[int, int], Table]]:
    """The tables of Hopper that serve these keys and values, the best first."""
    looks_up = value.tile_bits <= 4 and value.codec.nested_ptx is None  # levels do not follow from codes
    tables = [HOPPER_LOOKUP, HOPPER] if looks_up else [HOPPER]
    if narrow:
        tables.insert(0, HOPPER_NARROW)
    if "group" in (key.granularity, value.granularity):
        tables.insert(0, HOPPER_GROUP)
    if key.multiplies_integers:
        tables.insert(0, HOPPER_DIGITS_NARROW if narrow else HOPPER_DIGITS)
    if key.granularity == "channel":
        if key.width != key.padded_width:
            return [HOPPER_CHANNEL_PADDED, *tables]
        tables = [HOPPER_CHANNEL, *tables]
        return [HOPPER_CHANNEL_LOOKUP, *tables] if looks_up else tables
    return tables


def _with_wide_copies(config: AttentionConfig, key: PackedOperand) -> AttentionConfig:
    """The configuration with so many tokens that each thread of one warp copies two scales of a plane.

    A plane has ``key.padded_width`` scales for each block of keys. A single 16-bit scale is too small for an
    asynchronous copy: without this, 2 bits take 253 us instead of 62 (H200).
    """
    if config.num_warps != 1 or key.granularity != "channel":
        return config
    return replace(config, tokens=max(config.tokens, key.block_tokens * 64 // key.padded_width))


def has_unequal_planes(key: PackedOperand, value: PackedOperand) -> bool:
    """Whether keys or values have planes of unequal bits, or words."""
    return not (key.has_equal_planes and value.has_equal_planes)
