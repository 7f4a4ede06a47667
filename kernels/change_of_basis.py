"""The change between vectors in the original basis and the stored basis of calibrated formats, in Triton.

A decode step changes a few vectors for each KV head: its new keys and values, the query, and the output. Operators of
PyTorch take about ten kernels for each change, which is more time than attention to a thousand tokens. One kernel takes
their place. Many vectors, as in a prompt, are a matrix product of PyTorch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvcompile.kernels.formats import bases
from kvcompile.kernels.formats.base import Format
from kvcompile.kernels.lang.launcher import Launcher, ceil_div
from kvcompile.kernels.lang.recipes import keep
from kvcompile.kernels.lang.rounding import finite_at
from kvcompile.kernels.lang.triton import jit, tl, triton

ROWS, COLUMNS = 16, 16
"""Vectors and channels of the results of a program."""

MOST_VECTORS = 512
"""The most vectors of a KV head that the kernel changes. More were not measured."""

MeanPlace = Literal["none", "before", "after"]
"""Whether the mean of the basis is subtracted before the product, or added after it."""


@jit(do_not_specialize=["num_rows", "q_len"])
def change_of_basis_kernel(
    x_ptr, matrix_ptr, mean_ptr, out_ptr, x_strides, num_rows, q_len,
    GROUP_SIZE: tl.constexpr, CHANNELS: tl.constexpr, OUT_CHANNELS: tl.constexpr, HAS_MATRIX: tl.constexpr,
    MEAN: tl.constexpr, PADDED_CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS vectors of a KV head, and COLUMNS channels of their results. Grid (num_kv_heads, rows, columns).

    Args:
        x_ptr: [batch, num_kv_heads * GROUP_SIZE, q_len, CHANNELS], any float dtype.
        matrix_ptr: float32 [num_kv_heads, CHANNELS, OUT_CHANNELS]; unused without HAS_MATRIX.
        mean_ptr: float32, [num_kv_heads, CHANNELS] if MEAN is "before", [num_kv_heads, OUT_CHANNELS] if it is "after".
        out_ptr: [batch, num_kv_heads * GROUP_SIZE, q_len, OUT_CHANNELS], any float dtype, contiguous.
        num_rows: batch * GROUP_SIZE * q_len, the vectors of a KV head.
        HAS_MATRIX: whether the basis has matrices; otherwise both bases have the same channels.
        MEAN: as :data:`MeanPlace`. Zeros stay zeros: they are vectors that were never written, and outputs of rows that
            see no token.
    """
    kv_head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    position = (row % q_len).to(tl.int64)
    head = kv_head * GROUP_SIZE + row // q_len % GROUP_SIZE
    batch = (row // (q_len * GROUP_SIZE)).to(tl.int64)
    channel = tl.arange(0, PADDED_CHANNELS)
    x_ptrs = x_ptr + batch * x_strides[0] + head * x_strides[1] + position * x_strides[2]
    in_bounds = exists[:, None] & (channel < CHANNELS)[None, :]
    x = tl.load(x_ptrs[:, None] + channel[None, :] * x_strides[3], mask=in_bounds, other=0.0).to(tl.float32)
    is_zero = tl.max((x != 0).to(tl.int32), 1) == 0
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    if HAS_MATRIX:
        if MEAN == "before":
            x = _plus_mean(x, is_zero, mean_ptr + kv_head * CHANNELS, channel, -1.0, CHANNELS)
        in_matrix = (channel < CHANNELS)[:, None] & (column < OUT_CHANNELS)[None, :]
        matrix_ptrs = matrix_ptr + (kv_head * CHANNELS + channel)[:, None] * OUT_CHANNELS + column[None, :]
        y = tl.dot(x, tl.load(matrix_ptrs, mask=in_matrix, other=0.0), input_precision="ieee")
    else:
        in_bounds = exists[:, None] & (column < CHANNELS)[None, :]
        y = tl.load(x_ptrs[:, None] + column[None, :] * x_strides[3], mask=in_bounds, other=0.0).to(tl.float32)
        if MEAN == "before":
            y = _plus_mean(y, is_zero, mean_ptr + kv_head * CHANNELS, column, -1.0, CHANNELS)
    if MEAN == "after":
        y = _plus_mean(y, is_zero, mean_ptr + kv_head * OUT_CHANNELS, column, 1.0, OUT_CHANNELS)
    out_row = (batch * tl.num_programs(0) * GROUP_SIZE + head) * q_len + position
    out_ptrs = out_ptr + out_row[:, None] * OUT_CHANNELS + column[None, :]
    tl.store(out_ptrs, finite_at(out_ptr, y), mask=exists[:, None] & (column < OUT_CHANNELS)[None, :])


@jit
def _plus_mean(x, is_zero, mean_ptr, column, sign, CHANNELS: tl.constexpr):
    """``x + sign * mean`` for vectors [rows, columns] that are not zero."""
    mean = tl.load(mean_ptr + column, mask=column < CHANNELS, other=0.0)
    return tl.where(is_zero[:, None], x, x + sign * mean[None, :])


launch_change_of_basis = Launcher(change_of_basis_kernel, writes=("out_ptr",))


def changed(
    x: Tensor, fmt: Format, num_kv_heads: int, matrix: bases.Matrix, mean: MeanPlace, dtype: torch.dtype
) -> Tensor:
    """Vectors in the other basis of a calibrated format, contiguous [batch, num_heads, q_len, channels].

    Args:
        x: [batch, num_heads, q_len, channels], any float dtype and strides; ``num_heads`` is a multiple of
            ``num_kv_heads``.
        fmt: the format. Without matrices, only the mean changes vectors.
        matrix: the matrix of the basis.
        mean: whether the mean is subtracted before the product, or added after it. Zeros stay zeros.
        dtype: of the results.
    """
    batch, num_heads, q_len, channels = x.shape
    basis = bases.find(fmt.basis)
    matrices = basis.matrix(matrix, x.device) if fmt.has_matrices else basis.mean_on(x.device)
    out_channels = matrices.shape[2] if fmt.has_matrices else channels
    group_size = num_heads // num_kv_heads
    num_rows = batch * group_size * q_len
    out = x.new_empty((batch, num_heads, q_len, out_channels), dtype=dtype)
    if out.numel() > 0:
        launch_change_of_basis(
            (num_kv_heads, ceil_div(num_rows, ROWS), ceil_div(out_channels, COLUMNS)),
            (x, keep(matrices), keep(basis.mean_on(x.device)), out),
            (x.stride(),),
            (num_rows, q_len),
            (
                group_size, channels, out_channels, fmt.has_matrices, mean,
                max(16, triton.next_power_of_2(channels)), ROWS, COLUMNS,
            ),
            {"num_warps": 4},
        )  # fmt: skip
    return out
