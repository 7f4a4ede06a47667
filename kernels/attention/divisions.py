"""How the work of decode attention is divided among programs: tokens among splits, and exact blocks."""

from __future__ import annotations

from typing import NamedTuple

from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.kernels.lang.launcher import ceil_div

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
ITEMS_OF_PROGRAM, ITEMS_OF_SHORT_PROGRAM, DECODED_ITEMS_OF_SHORT_PROGRAM = 4, 2, 1
"""Items of a program that attends to exact blocks alone, if there is room for so many programs.

The other numbers are for short programs of packed tokens, and for items whose keys or values are decoded. More items
make programs longer, and the merge shorter.
"""
TILES_OF_EXACT_ITEM = 4
"""The least tiles of a program of packed tokens for each item of a program that attends to exact blocks alone."""


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
    config: AttentionConfig,
    items: int,
    decodes: bool,
    num_heads: int,
    packed_programs: int,
    tiles: int,
    num_sms: int,
) -> int:
    """The number of programs that attend to the exact blocks of a KV head, and to nothing else.

    They should end before the programs of packed tokens. If every scheduler has one warp of packed tokens, there is at
    most one such program for each multiprocessor. A GPU then still divides the other programs evenly among its
    multiprocessors. An H200 has 132 of them: in a grid of 640 programs, none gets more than 4 of the first 512. In a
    grid of 704 programs, 8 multiprocessors get 5 of the first 512, and end last.

    Args:
        config: the configuration of the kernel.
        items: items of the exact blocks of a KV head, see :func:`kvcompile.kernels.attention.exact_blocks.num_items`.
        decodes: whether blocks are exact for keys only, or for values only.
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
        items_of_program = DECODED_ITEMS_OF_SHORT_PROGRAM if decodes else ITEMS_OF_SHORT_PROGRAM
        return max(1, min(ceil_div(items, items_of_program), config.spare_programs * num_sms // num_heads))
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
