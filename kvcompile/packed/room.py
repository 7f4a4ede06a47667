"""Room in caches of fixed size, plain or packed: give a longer cache the same tokens, or drop the first tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, Residual, num_blocks
from kvcompile.kernels.spec.packing import drop_first_blocks_
from kvcompile.packed.tensor import PackedTensor

_SPARE_SHARE = 8
"""A window has room for one further token for each ``_SPARE_SHARE`` of its tokens, and at least for one drop."""


def extended(cache: Tensor, num_tokens: int) -> Tensor:
    """A cache with room for ``num_tokens`` tokens that begins with the tokens of ``cache``; zeros follow.

    Args:
        cache: plain or packed, [batch, num_kv_heads, n, head_dim].
        num_tokens: at least n.
    """
    shape = (*cache.shape[:2], num_tokens, cache.shape[3])
    with torch.inference_mode(False):
        if isinstance(cache, PackedTensor):
            longer = PackedTensor.zeros(shape, cache.dtype, cache.packed_layout, cache.axes, cache.device)
            longer.packed[: cache.packed.shape[0]].copy_(cache.packed)
            return longer
        plain = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        plain[:, :, : cache.shape[2]].copy_(cache)
        return plain


def droppable_tokens(residuals: Iterable[Residual | None]) -> int:
    """The least number of tokens that caches with any of these ``residuals`` can drop, and multiples of it.

    They drop whole blocks, and the blocks that they keep exactly must keep their places in the header.
    """
    return BLOCK_TOKENS * math.lcm(*(each.recent_blocks or 1 for each in residuals if each is not None))


def room_of_window(window: int, drops: int) -> int:
    """The number of tokens for which a cache with a sliding window has room if it drops its first tokens seldom.

    Args:
        window: number of tokens of the window.
        drops: the least number of tokens that the cache can drop.
    """
    spare = -(-window // (_SPARE_SHARE * drops)) * drops
    return num_blocks(window + spare) * BLOCK_TOKENS


def drop_first_tokens_(cache: Tensor, num_tokens: int) -> None:
    """Token ``num_tokens`` of ``cache`` becomes token 0, and zeros follow the last token.

    Args:
        cache: plain or packed, [batch, num_kv_heads, n, head_dim].
        num_tokens: a multiple of :func:`droppable_tokens`.
    """
    if isinstance(cache, PackedTensor):
        drop_first_blocks_(cache.packed_for_write(), cache.packed_layout, num_tokens // BLOCK_TOKENS)
        return
    kept = cache[:, :, num_tokens:].clone()  # the copy below overlaps it
    cache[:, :, : kept.shape[2]].copy_(kept)
    cache[:, :, kept.shape[2] :].zero_()
