"""A hand-written attention layer with its cache, whose heads the programs of several ranks divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, WIDTH, HIDDEN = 4, 16, 32


class CachedAttention(nn.Module):
    """Projections of HEADS query heads and ``kv_heads`` KV heads, and a cache of ``own_heads``: the heads of a rank."""

    def __init__(self, kv_heads: int, own_heads: int, capacity: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.o = nn.Linear(HIDDEN, HEADS * WIDTH, bias=False), nn.Linear(HEADS * WIDTH, HIDDEN, bias=False)
        self.k, self.v = (nn.Linear(HIDDEN, kv_heads * WIDTH, bias=False) for _ in range(2))
        self.keys, self.values = (torch.zeros(1, own_heads, capacity, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for p in (self.q, self.k, self.v))
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        visible = torch.arange(self.keys.shape[2]) <= positions[:, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, visible, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


@torch.no_grad()
def outputs(step: Callable[[Tensor, Tensor], Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """The outputs of steps with these numbers of new tokens, which are the same on every rank."""
    total = sum(lengths)
    x = torch.randn(1, total, HIDDEN, generator=torch.Generator().manual_seed(1))
    return [step(*new) for new in zip(x.split(lengths, 1), torch.arange(total).split(lengths), strict=True)]
