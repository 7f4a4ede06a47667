"""The plain-PyTorch meaning of a packed cache: writing and reading it. The specification of every fast path.

All functions are traceable: no data-dependent Python, sizes may be symbolic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def pack_tokens(layout: PackedLayout, x: Tensor) -> Tensor:
    """Packed data of a cache that holds just the tokens ``x`` [batch, num_kv_heads, n, head_dim].

    The bytes are those of :func:`write_tokens` to a cache of zeros, written block by block.
    """
    batch, heads, n, _ = x.shape
    data = empty_packed(layout, n, batch, heads, x.device)
    parts = layout.format.encode(x)
    for name, blocks in layout.split(data).items():
        part = F.pad(parts[name], (0, 0, 0, -n % BLOCK_TOKENS))
        blocks.copy_(part.unflatten(2, (-1, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4))
    return data


def _byte_update(
    data: Tensor, layout: PackedLayout, x: Tensor, positions: Tensor, valid: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Indices and values of the one ``index_put`` that writes tokens: values [batch, heads, n, bytes_per_token]."""
    batch, heads = x.shape[:2]
    values = layout.token_bytes(layout.format.encode(x))
    positions = positions[..., None, :]
    sequence = torch.arange(batch, device=x.device)[:, None, None]
    head = torch.arange(heads, device=x.device)[None, :, None]
    index = byte_index(layout, sequence, head, positions)
    if valid is not None:
        values = torch.where(valid[..., None, :, None], values, data[index])
    return index, values


def byte_index(layout: PackedLayout, sequence: Tensor, head: Tensor, position: Tensor) -> tuple[Tensor, ...]:
    """Index into ``data`` of the bytes of token vectors, in the order of :meth:`PackedLayout.token_bytes`.

    ``sequence``, ``head`` and ``position`` are int64 and broadcast to the vectors [*N]; the returned tensors broadcast
    to [*N, bytes_per_token].
    """
    offsets = layout.byte_offsets(position % BLOCK_TOKENS)
    return (position // BLOCK_TOKENS)[..., None], sequence[..., None], head[..., None], offsets


def read_tokens(data: Tensor, layout: PackedLayout, num_tokens: int) -> Tensor:
    """The first ``num_tokens`` tokens, dequantized: float32 [batch, num_kv_heads, num_tokens, head_dim]."""
    return _token_major(layout.format.decode(layout.split(data)), num_tokens)


def read_stored_tokens(data: Tensor, layout: PackedLayout, num_tokens: int) -> Tensor:
    """:func:`read_tokens` in the stored basis: a rotated format stays rotated."""
    return _token_major(layout.format.decode_levels(layout.split(data)), num_tokens)


def _token_major(x: Tensor, num_tokens: int) -> Tensor:
    """[num_blocks, batch, heads, BLOCK_TOKENS, head_dim] -> [batch, heads, num_tokens, head_dim]."""
    token = torch.arange(num_tokens, device=x.device)
    return x[token // BLOCK_TOKENS, :, :, token % BLOCK_TOKENS].permute(1, 2, 0, 3)
