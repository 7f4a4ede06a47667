"""``flex_attention`` with its block mask, which PyTorch's eager implementation of the operator ignores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from kvcompile.compat.operators import flex_attention

_BLOCK_MASK = 4
"""The position of the block mask among the arguments of the operator."""


def uses_blocks(graph: Graph) -> bool:
    """Whether a graph calls ``flex_attention``, whose block mask is valid only with integers of the same call."""
    return bool(graph.find_nodes(op="call_function", target=flex_attention))


def with_blocks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``flex_attention`` with a ``mask_mod`` that also hides the tokens that the block mask hides.

    Queries see all keys of full blocks, and the keys of partial blocks that ``mask_mod`` shows. The block mask is
    (q_len, kv_len, partial count, partial indices, full count, full indices, ..., q block size, kv block size,
    ``mask_mod``). Counts are int32 [batch or 1, num_heads or 1, q_blocks], and indices have a further dimension.
    """
    mask = args[_BLOCK_MASK]
    size_q, size_kv = mask[-3:-1]
    blocks = -(-args[1].shape[2] // size_kv)
    partial = _seen(mask[2], mask[3], blocks)
    full = torch.zeros_like(partial) if mask[4] is None else _seen(mask[4], mask[5], blocks)
    mask_mod: Callable[..., Tensor] = mask[-1]

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *captured: Any) -> Tensor:
        place = b % partial.shape[0], h % partial.shape[1], q // size_q, kv // size_kv
        return (partial[place] & mask_mod(b, h, q, kv, *captured)) | full[place]

    return (*args[:_BLOCK_MASK], (*mask[:-1], visible), *args[_BLOCK_MASK + 1 :])


def _seen(count: Tensor, index: Tensor, blocks: int) -> Tensor:
    """The blocks of keys that each block of queries sees, bool [batch or 1, num_heads or 1, q_blocks, blocks]."""
    is_seen = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    target = torch.where(is_seen, index, blocks).long()  # hidden blocks go to a column after the last block
    seen = torch.zeros((*index.shape[:-1], blocks + 1), dtype=torch.bool, device=index.device)
    return seen.scatter(-1, target, True)[..., :blocks]
