"""Reads and writes whole tokens of packed data: with Triton kernels on a GPU, elsewhere with the PyTorch specification.

Traced code runs the specification on every device, so that Inductor can fuse it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

import kvcompile.kernels.ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks
from kvcompile.kernels.spec.new_tokens import NewTokens
from kvcompile.kernels.spec.packing import pack_blocks, read_tokens, to_cache_dtype
from kvcompile.kernels.spec.residual import header_of
from kvcompile.kernels.store.launch import store_header, store_whole_blocks
from kvcompile.packed.tracing import has_no_values, is_traced

_CHUNK_BYTES = 64 << 20


class ExactTokens:
    """New tokens that views of a cache read in full precision. The views share this object.

    Attributes:
        new: the tokens; if None, the views read the stored (quantized) tokens.
    """

    def __init__(self, new: NewTokens) -> None:
        self.new: NewTokens | None = new


def runs_kernels(data: Tensor) -> bool:
    """Whether reads and writes of packed ``data`` launch Triton kernels."""
    return data.is_cuda and not is_traced(data)


def read_packed(data: Tensor, layout: PackedLayout, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Dequantizes the first ``num_tokens`` tokens to ``dtype``: [batch, num_kv_heads, num_tokens, head_dim]."""
    if runs_kernels(data):
        return torch.ops.kvcompile.dequantize(data, num_tokens, dtype, layout.spec, layout.role, layout.head_dim)
    if has_no_values(data):
        empty = data.new_empty((num_tokens, *data.shape[1:3], layout.head_dim), dtype=dtype)
        return empty.permute(1, 2, 0, 3)  # the strides of :func:`read_tokens`
    return to_cache_dtype(read_tokens(data, layout, num_tokens), dtype)


def launch_write(data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor) -> None:
    """Quantize ``x`` [batch, num_kv_heads, n, head_dim] into tokens ``positions`` (int64 [n], distinct) on a GPU."""
    torch.ops.kvcompile.store(data, x, positions, None, layout.spec, layout.role)


def pack(data: Tensor, layout: PackedLayout, x: Tensor, num_written: Tensor | None) -> None:
    """Quantize ``x`` [batch, num_kv_heads, n, head_dim] into ``data``, which is zero, from its first token on.

    Args:
        num_written: as in :func:`kvcompile.kernels.spec.residual.header_of`.
    """
    blocks = data[layout.header_blocks :]
    if not runs_kernels(data):
        pack_in_chunks(blocks, layout, x)
        if layout.residual is not None:
            data[: layout.header_blocks].copy_(header_of(layout, x, num_written))
    elif x.numel() > 0:
        _launch_pack(data, layout, x)
        if layout.residual is not None:
            store_header(data, x, num_written, layout)


def _launch_pack(data: Tensor, layout: PackedLayout, x: Tensor) -> None:
    """:func:`pack` on a GPU, without the header."""
    blocks, without_header = data[layout.header_blocks :], replace(layout, residual=None)
    num_tokens = x.shape[2]
    if layout.format.granularity != "channel":
        launch_write(blocks, without_header, x, torch.arange(num_tokens, device=x.device))
        return
    # The last block may have tokens that no one writes. They share its scales.
    whole = num_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    if whole > 0:
        store_whole_blocks(blocks, x[:, :, :whole], without_header)
    if whole < num_tokens:
        launch_write(data, layout, x[:, :, whole:], torch.arange(whole, num_tokens, device=x.device))


def pack_in_chunks(blocks: Tensor, layout: PackedLayout, x: Tensor) -> None:
    """Quantize ``x`` [batch, num_kv_heads, n, head_dim] into ``blocks`` in chunks.

    Encoding allocates float32 temporaries, which chunks keep small compared with a long cache.
    """
    at_once = max(1, _CHUNK_BYTES * x.shape[2] // max(4 * x.numel(), 1) // BLOCK_TOKENS)
    for first in range(0, num_blocks(x.shape[2]), at_once):
        packed = pack_blocks(layout, x[:, :, first * BLOCK_TOKENS : (first + at_once) * BLOCK_TOKENS])
        blocks[first : first + packed.shape[0]].copy_(packed)
