"""Copies parts of packed data in words of 8 bytes. PyTorch copies one element per thread, so bytes are slow."""

from __future__ import annotations

import torch
from torch import Tensor

WORD = torch.int64


def select(data: Tensor, dim: int, index: Tensor) -> Tensor:
    """``data.index_select(dim, index)``.

    Args:
        data: packed data, uint8 [num_blocks, batch, num_kv_heads, block_bytes], not a fake tensor.
        dim: a dimension before the bytes of a block.
        index: int64 [n].
    """
    words = data.view(WORD) if _has_words(data) else data
    return words.index_select(dim, index).view(data.dtype)


def _has_words(data: Tensor) -> bool:
    """Whether ``data`` consists of whole words of 8 bytes at aligned addresses."""
    sizes = (data.shape[-1], data.data_ptr(), data.storage_offset(), *data.stride()[:-1])
    return data.stride(-1) == 1 and all(size % WORD.itemsize == 0 for size in sizes)
