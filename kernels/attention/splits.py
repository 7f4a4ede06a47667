"""Outputs of splits of the tokens: how programs of the decode kernel store them, and the kernel that merges them.

The decode kernel is :func:`kvcompile.kernels.attention.decode.attention_kernel`.
"""

from __future__ import annotations

from kvcompile.compat.triton_names import gdc_wait
from kvcompile.kernels.attention.query import first_columns
from kvcompile.kernels.attention.softmax_tile import store_log_sum, weighs_scales
from kvcompile.kernels.lang.planes import channels_of_plane
from kvcompile.kernels.lang.triton import jit, tl
from kvcompile.kernels.tiles.rotation import unrotate
from kvcompile.kernels.tiles.visible_range import num_visible_tiles


@jit
def out_rows(
    program, head, position, split, num_whole, GROUP_SIZE: tl.constexpr, PARTIAL: tl.constexpr, HAS_EXACT: tl.constexpr
):  # fmt: skip
    """The rows of the output that belong to the query rows, [ROWS].

    Args:
        program: the argument of :func:`kvcompile.kernels.attention.query.rows_of_program`.
        split: the number of the output: first the splits of packed tokens, then the splits of exact blocks.
        num_whole: an argument of the kernel.
        HAS_EXACT: whether there are splits of exact blocks.
    """
    batch, num_kv_heads, q_len = program[1], program[3], program[4]
    row = (batch * num_kv_heads * GROUP_SIZE + head) * q_len + position
    if PARTIAL:
        # The first output of all rows, the second of whole KV heads, then the second and further ones of the others.
        later = split.to(tl.int64)
        if HAS_EXACT:
            later += tl.minimum(later, 1) * num_whole
        row += later * tl.num_programs(0) * GROUP_SIZE * q_len
    return row


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
    zero = tl.sum(tl.sum(zero_sum, 0), 0)[None, :]
    channel, exists = channels_of_plane(tl.arange(0, VALUE.padded_width), VALUE)
    in_bounds = in_query[None, :] & exists[:, None]
    out_ptrs = out_ptr + out_row[None, :] * VALUE.head_dim + channel[:, None]
    NUM_PLANES: tl.constexpr = VALUE.num_planes
    for plane in tl.static_range(NUM_PLANES):
        acc = first_columns(accs[plane], inverse.shape[0])
        if VALUE.planes_above[plane] is not None:
            acc -= first_columns(accs[VALUE.planes_above[plane]], inverse.shape[0])
        out = (acc * VALUE.gains[plane] + zero) * inverse[None, :]
        tl.store(out_ptrs + plane * VALUE.width, out, mask=in_bounds)


@jit(
    do_not_specialize=[
        "num_rows", "whole_rows", "num_splits", "exact_splits", "exact_items", "num_heads", "q_len", "tile_tokens",
    ]
)  # fmt: skip
def combine_kernel(
    partial_ptr, lse_ptr, sinks_ptr, range_ptr, out_ptr, out_lse_ptr,
    num_rows, whole_rows, num_splits, exact_splits, exact_items, num_heads, q_len, tile_tokens,
    VALUE: tl.constexpr, HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, CHANNELS: tl.constexpr,
    POSITIONS: tl.constexpr, STARTS_EARLY: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of ROWS query rows by their log-sum-exp, and undo the rotation.

    Grid (num_rows / ROWS, head_dim / CHANNELS). The programs of a row store the same log-sum-exp.

    Args:
        partial_ptr: float32 [outputs, head_dim], in the order of :func:`out_rows`. Rows are [batch, num_heads, q_len].
            The outputs of the last ``exact_splits`` splits of a row are in the original basis.
        lse_ptr: float32 [outputs, 2], in units of log2: the largest score, -inf for a split that saw no token; and the
            log of the sum of exponentials relative to the largest score.
        sinks_ptr: with HAS_SINKS [num_heads], any float dtype: a further score of each row of a head, with a value of
            zero.
        range_ptr: if POSITIONS is not 0, the ranges of the decode kernel. In a long cache with few visible tokens only
            the first splits have a tile, and only they are merged.
        whole_rows: the first rows, which have one split instead of ``num_splits`` and at most one of ``exact_splits``;
            a multiple of ROWS.
        exact_items: EXACT_ITEMS of the decode kernel, at which the splits take turns.
        out_ptr: [num_rows, head_dim], any float dtype; zeros for a row that saw no token.
        out_lse_ptr: with WITH_LSE float32 [num_rows, 2], the log-sum-exp of all splits, in the form of ``lse_ptr``.
        tile_tokens: tokens of a tile of the decode kernel.
        SPLITS: splits that are read at once.
        CHANNELS: channels that a program merges, a power of two; all channels if the format is rotated.
        POSITIONS: 0 without ranges; otherwise at least ``q_len``, and the ROWS rows are of one sequence.
        STARTS_EARLY: whether the kernel may start before the kernel that computes the splits has ended.
    """
    later_rows = num_rows - whole_rows, tl.where(exact_splits > 0, whole_rows, 0)
    if tl.program_id(0) * ROWS < whole_rows:
        num_splits = 1
        exact_splits = tl.minimum(exact_splits, 1)
    merged_splits = num_splits
    if POSITIONS > 0:
        # Ranges may be read before the wait: they existed before the kernel that computes the splits started.
        sequence = (tl.program_id(0) * ROWS // (num_heads * q_len)).to(tl.int64)
        tiles = num_visible_tiles(range_ptr + sequence * q_len * 3, q_len, tile_tokens, POSITIONS)
        merged_splits = tl.minimum(num_splits, tiles + exact_items)
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
        state, partial_ptr, lse_ptr, row, channel, num_rows, later_rows, 0, merged_splits, VALUE, SPLITS
    )
    maximum, total, acc = state
    if VALUE.rotated:
        tl.static_assert(VALUE.padded_head_dim == CHANNELS)
        acc = unrotate(acc, VALUE)
    state = (maximum, total, acc)
    state = _add_splits(
        state, partial_ptr, lse_ptr, row, channel, num_rows, later_rows, num_splits, num_splits + exact_splits, VALUE,
        SPLITS,
    )  # fmt: skip
    maximum, total, acc = state
    if WITH_LSE:
        store_log_sum(out_lse_ptr, row, maximum, tl.log2(total), total > 0, row < num_rows)
    out = acc * tl.where(total > 0, 1.0 / total, 0.0)[:, None]
    out_ptrs = out_ptr + row[:, None] * VALUE.head_dim + channel[None, :]
    tl.store(out_ptrs, out, mask=(row < num_rows)[:, None] & (channel < VALUE.head_dim)[None, :])


@jit
def _add_splits(
    state, partial_ptr, lse_ptr, row, channel, num_rows, later_rows, first_split, end_split,
    VALUE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The state (maximum, total, acc) of :func:`combine_kernel` after the splits from first_split to end_split.

    ``later_rows`` are the distance of a row's outputs, and the additional distance of the first two.
    """
    maximum, total, acc = state
    in_head = (channel < VALUE.head_dim)[None, :]
    for first in range(first_split, end_split, SPLITS):
        split = first + tl.arange(0, SPLITS)[None, :]
        in_bounds = (split < end_split) & (row < num_rows)[:, None]
        index = split.to(tl.int64) * later_rows[0] + tl.minimum(split, 1) * later_rows[1] + row[:, None]
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
