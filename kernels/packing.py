"""The plain-PyTorch meaning of a packed cache: writing and reading it. The specification of every fast path.

All functions are traceable: no data-dependent Python, sizes may be symbolic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.layout import BLOCK_TOKENS, PackedLayout


def empty_packed(layout: PackedLayout, num_tokens: int, batch: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """Packed data of a cache of zeros, uint8 [num_blocks, batch, num_kv_heads, block_bytes]."""
    return torch.zeros(layout.shape(num_tokens, batch, num_kv_heads), dtype=torch.uint8, device=device)


def write_tokens(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None = None
) -> Tensor:
    """``data`` with the tokens ``x`` encoded at ``positions``; ``data`` itself is not changed.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes].
        x: [batch, num_kv_heads, n, head_dim], any float dtype, any strides.
        positions: int64 [n], or [batch, n] for positions of each sequence; every one within the cache and, within a
            sequence, distinct.
        valid: optional bool, same shape as ``positions``; where False the slot keeps its bytes.
    """
    return data.index_put(*_byte_update(data, layout, x, positions, valid))


def write_tokens_(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None = None
) -> None:
    """In-place :func:`write_tokens`."""
    data.index_put_(*_byte_update(data, layout, x, positions, valid))


def _byte_update(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices and values of the one ``index_put`` that writes tokens: values [batch, heads, n, bytes_per_token]."""
    batch, heads, n, _ = x.shape
    values = layout.token_bytes(layout.format.encode(x))
    positions = positions.reshape(-1, n)
    offsets = layout.byte_offsets(positions.reshape(-1) % BLOCK_TOKENS).reshape(positions.shape[0], 1, n, -1)
    index = (
        (positions // BLOCK_TOKENS)[:, None, :, None],
        torch.arange(batch, device=x.device)[:, None, None, None],
        torch.arange(heads, device=x.device)[None, :, None, None],
        offsets,
    )
    if valid is not None:
        values = torch.where(valid.reshape(-1, 1, n, 1), values, data[index])
    return index, values


def read_tokens(data: Tensor, layout: PackedLayout, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` tokens, dequantized: float32 [batch, num_kv_heads, num_tokens, head_dim]."""
    x = layout.format.decode(layout.split(data))
    x = x.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return x[:, :, :num_tokens]
