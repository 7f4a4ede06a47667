"""Outputs of splits of the tokens: how programs of the decode kernel store them, and the kernel that merges them.

The decode kernel is :func:`kvcompile.kernels.attention.decode.attention_kernel`.
"""

from __future__ import annotations

from kvcompile.compat.triton_names import gdc_wait
from kvcompile.kernels.attention.query import first_columns
from kvcompile.kernels.attention.softmax_tile import store_log_sum, weighs_scales
from kvcompile.kernels.lang.planes import channels_of_plane
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.tiles.packed import groups_of_plane, has_zeros_of_groups, in_group
from kvcompile.kernels.tiles.rotation import unrotate
from kvcompile.kernels.tiles.visible_range import num_visible_tiles


@jit
def out_rows(program, head, position, split, rows_of_split, GROUP_SIZE: tl.constexpr, PARTIAL: tl.constexpr):
    """The rows of the output of a split of packed tokens that belong to the query rows, [ROWS].

    Args:
        program: the argument of :func:`kvcompile.kernels.attention.query.rows_of_program`.
        rows_of_split: the number of query rows whose tokens are split.
    """
    batch, num_kv_heads, q_len = program[1], program[3], program[4]
    row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        # The first output of all rows, then further ones of the rows whose tokens are split, which come last.
        row += split.to(tl.int64) * rows_of_split
    return row


@jit
def exact_rows(program, head, position, split, outputs, GROUP_SIZE: tl.constexpr):
    """The rows of the output of a split of exact blocks. They follow all outputs of packed tokens.

    Args:
        outputs: (out_ptr, lse_ptr, rows_of_split, first_exact_row, num_rows). The last two are the number of outputs of
            packed tokens and the number of query rows.
    """
    row = out_rows(program, head, position, split, 0, GROUP_SIZE, False)
    return outputs[3] + split.to(tl.int64) * outputs[4] + row


@jit
def store_nothing(out_ptr, lse_ptr, out_row, in_query, VALUE: tl.constexpr):
    """Store the output of a split that sees no token."""
    nothing = tl.zeros_like(out_row).to(tl.float32)
    store_log_sum(lse_ptr, out_row, nothing, nothing, nothing > 0, in_query)
    channel = tl.arange(0, VALUE.padded_head_dim)[:, None]
    in_bounds = in_query[None, :] & (channel < VALUE.head_dim)
    tl.store(out_ptr + out_row[None, :] * VALUE.head_dim + channel, 0.0, mask=in_bounds)


@jit
def store_output(
    state, out_ptr, lse_ptr, out_row, in_query, value_scale,
    VALUE: tl.constexpr, WIDE_SCORES: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Normalise the accumulated output and store it; 0 for a row that saw no token."""
    maximum, scale_maximum, p_sum, zero_sum, accs = state
    total = tl.sum(tl.sum(p_sum, 0), 0)
    seen = total > 0
    inverse = tl.where(seen, 1.0 / total, 0.0) * value_scale
    if PARTIAL:
        total_log2 = tl.log2(total) - 15.0
        if WIDE_SCORES and weighs_scales(VALUE):
            total_log2 += scale_maximum
        store_log_sum(lse_ptr, out_row, maximum, total_log2, seen, in_query)
    channel, exists = channels_of_plane(tl.arange(0, VALUE.padded_width), VALUE)
    in_bounds = in_query[None, :] & exists[:, None]
    out_ptrs = out_ptr + out_row[None, :] * VALUE.head_dim + channel[:, None]
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for plane in tl.static_range(NUM_PLANES):
        acc = first_columns(accs[plane], inverse.shape[0])
        if VALUE.planes_above[plane] is not None:
            acc -= first_columns(accs[VALUE.planes_above[plane]], inverse.shape[0])
        zero = _zeros_of_plane(zero_sum, plane, VALUE)
        out = (acc * VALUE.gains[plane] + zero) * inverse[None, :]
        tl.store(out_ptrs + plane * VALUE.width, out, mask=in_bounds)


@jit
def _zeros_of_plane(zero_sum, PLANE: tl.constexpr, VALUE: tl.constexpr):
    """The sums of zero points for a plane of outputs, [columns, rows] or [1, rows]."""
    if has_zeros_of_groups(VALUE):
        column = tl.arange(0, VALUE.padded_width)[:, None]
        GROUPS: tl.constexpr = groups_of_plane(VALUE, PLANE)
        zero = tl.sum(tl.sum(zero_sum[GROUPS[0]], 0), 0)[None, :]
        for i in tl.static_range(1, len(GROUPS)):
            other = tl.sum(tl.sum(zero_sum[GROUPS[i]], 0), 0)[None, :]
            zero = tl.where(in_group(column, PLANE, GROUPS[i], VALUE), other, zero)
    else:
        zero = tl.sum(tl.sum(zero_sum, 0), 0)[None, :]
    return zero


@jit(
    do_not_specialize=[
        "num_rows", "whole_rows", "num_splits", "exact_splits", "exact_of_whole", "own_items", "num_heads", "q_len",
        "tile_tokens",
    ]
)  # fmt: skip
def combine_kernel(
    partial_ptr, lse_ptr, sinks_ptr, range_ptr, out_ptr, out_lse_ptr,
    num_rows, whole_rows, num_splits, exact_splits, exact_of_whole, own_items, num_heads, q_len, tile_tokens,
    VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, STARTS_EARLY: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS query rows by their log-sum-exp, and undo the rotation.

    Grid (num_rows / ROWS, head_dim / CHANNELS). The programs of a row store the same log-sum-exp.

    Args:
        partial_ptr: float32 [outputs, head_dim], in the order of :func:`out_rows`. Rows are [batch, num_heads, q_len].
            Outputs of exact blocks, in the order of :func:`exact_rows`, are in the original basis.
        lse_ptr: float32 [outputs, 2], in units of log2: the largest score, -inf for a split that saw no token; and the
            log of the sum of exponentials relative to the largest score.
        sinks_ptr: with HAS_SINKS [num_heads], any float dtype: a further score of each row of a head, with a value of
            zero.
        range_ptr: if POSITIONS is not 0, the ranges of the decode kernel. In a long cache with few visible tokens only
            the first splits have a tile, and only they are merged.
        whole_rows: the first rows, which have one split instead of ``num_splits``; a multiple of ROWS.
        exact_splits, exact_of_whole: splits of the exact blocks, and the same of the first ``whole_rows`` rows.
        own_items: the items of exact blocks at which the splits of packed tokens take turns.
        out_ptr: [num_rows, head_dim], any float dtype; zeros for a row that saw no token.
        out_lse_ptr: with WITH_LSE float32 [num_rows, 2], the log-sum-exp of all splits, in the form of ``lse_ptr``.
        tile_tokens: tokens of a tile of the decode kernel.
        SPLITS: splits that are read at once.
        CHANNELS: channels that a program merges, a power of two; all channels if the format is rotated.
        POSITIONS: 0 without ranges; otherwise at least ``q_len``, and the ROWS rows are of one sequence.
        STARTS_EARLY: whether the kernel may start before the kernel that computes the splits has ended.
    """
    later_rows = num_rows - whole_rows
    first_exact_row = later_rows.to(tl.int64) * num_splits + whole_rows
    if tl.program_id(0) * ROWS < whole_rows:
        num_splits, exact_splits = 1, exact_of_whole
    merged_splits = num_splits
    if POSITIONS > 0:
        # Ranges may be read before the wait: they existed before the kernel that computes the splits started.
        sequence = (tl.program_id(0) * ROWS // (num_heads * q_len)).to(tl.int64)
        tiles = num_visible_tiles(range_ptr + sequence * q_len * 3, q_len, tile_tokens, POSITIONS)
        merged_splits = tl.minimum(num_splits, tiles + own_items)
    if STARTS_EARLY:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row // q_len % num_heads, mask=row < num_rows, other=0.0)
        maximum = sink.to(tl.float32) * 1.4426950408889634
        total = tl.where(maximum > float("-inf"), 1.0, 0.0)
    else:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.full([ROWS], 0.0, tl.float32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    state = (maximum, total, tl.full([ROWS, CHANNELS], 0.0, tl.float32))
    state = _add_splits(
        state, partial_ptr, lse_ptr, row, channel, num_rows, 0, later_rows, merged_splits, VALUE, SPLITS
    )
    maximum, total, acc = state
    if VALUE.rotated:
        tl.static_assert(VALUE.padded_head_dim == CHANNELS)
        acc = unrotate(acc, VALUE)
    state = (maximum, total, acc)
    state = _add_splits(
        state, partial_ptr, lse_ptr, row, channel, num_rows, first_exact_row, num_rows, exact_splits, VALUE, SPLITS
    )
    maximum, total, acc = state
    if WITH_LSE:
        store_log_sum(out_lse_ptr, row, maximum, tl.log2(total), total > 0, row < num_rows)
    out = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * VALUE.head_dim + channel[None, :]
    tl.store(out_ptrs, out, mask=(row < num_rows)[:, None] & (channel < VALUE.head_dim)[None, :])


@jit
def _add_splits(
    state, partial_ptr, lse_ptr, row, channel, num_rows, first_row, rows_of_split, num_splits,
    VALUE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The state (maximum, total, acc) of :func:`combine_kernel` after ``num_splits`` more outputs of each row.

    The first output of row 0 is at ``first_row``; the outputs of a row are ``rows_of_split`` rows apart.
    """
    maximum, total, acc = state
    in_head = (channel < VALUE.head_dim)[None, :]
    for first in range(0, num_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)[None, :]
        in_bounds = (split < num_splits) & (row < num_rows)[:, None]
        index = first_row + split.to(tl.int64) * rows_of_split + row[:, None]
        largest = tl.load(lse_ptr + 2 * index, mask=in_bounds, other=float("-inf"))
        total_log2 = tl.load(lse_ptr + 2 * index + 1, mask=in_bounds, other=0.0)
        partial_ptrs = partial_ptr + index[:, :, None] * VALUE.head_dim + channel[None, None, :]
        partial = tl.load(partial_ptrs, mask=in_bounds[:, :, None] & in_head[None, :, :], other=0.0)
        new_maximum = tl.maximum(maximum, tl.max(largest, 1))
        finite_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight = tl.exp2((largest - finite_maximum[:, None]) + total_log2)
        decay = tl.exp2(maximum - finite_maximum)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None] + tl.sum(partial * weight[:, :, None], 1)
        maximum = new_maximum
    return maximum, total, acc
