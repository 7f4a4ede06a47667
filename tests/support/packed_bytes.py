"""Initial packed bytes of tests."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout


def empty_packed(layout: PackedLayout, num_tokens: int, batch: int, num_kv_heads: int, device: torch.device) -> Tensor:
    """Packed data of a cache of zeros, uint8 [num_blocks, batch, num_kv_heads, block_bytes]."""
    return torch.zeros(layout.shape(num_tokens, batch, num_kv_heads), dtype=torch.uint8, device=device)
