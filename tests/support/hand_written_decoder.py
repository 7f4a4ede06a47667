"""A hand-written model with its cache in buffers, and the forms in which it may write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_LEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 170, 4, 2, 64

Write = Callable[[Tensor, Tensor, int], None]


def positions(x: Tensor, start: int) -> Tensor:
    return torch.arange(start, start + x.shape[2], device=x.device)


def index_copy(cache: Tensor, x: Tensor, start: int) -> None:
    cache.index_copy_(2, positions(x, start), x)


def index_assignment(cache: Tensor, x: Tensor, start: int) -> None:
    cache[:, :, positions(x, start)] = x


def slice_assignment(cache: Tensor, x: Tensor, start: int) -> None:
    cache[:, :, start : start + x.shape[2]] = x


def slice_copy(cache: Tensor, x: Tensor, start: int) -> None:
    cache[:, :, start : start + x.shape[2]].copy_(x)


def scatter(cache: Tensor, x: Tensor, start: int) -> None:
    cache.scatter_(2, positions(x, start)[None, None, :, None].expand_as(x), x)


def masked_update(cache: Tensor, x: Tensor, start: int) -> None:
    slot = torch.arange(cache.shape[2], device=x.device)
    new = x.index_select(2, (slot - start).clamp(0, x.shape[2] - 1))
    written = (slot >= start) & (slot < start + x.shape[2])
    cache.copy_(torch.where(written[:, None], new, cache))


WRITES = [index_copy, index_assignment, slice_assignment, slice_copy, scatter, masked_update]


class Decoder(nn.Module):
    """A one-layer language model that keeps its cache in two buffers."""

    def __init__(self, write: Write, batch: int) -> None:
        super().__init__()
        self.write = write
        self.embedding = nn.Embedding(97, 64)
        self.query = nn.Linear(64, NUM_HEADS * HEAD_DIM)
        self.key = nn.Linear(64, NUM_KV_HEADS * HEAD_DIM)
        self.value = nn.Linear(64, NUM_KV_HEADS * HEAD_DIM)
        self.output = nn.Linear(NUM_HEADS * HEAD_DIM, 97)
        self.register_buffer("keys", torch.zeros(batch, NUM_KV_HEADS, MAX_LEN, HEAD_DIM))
        self.register_buffer("values", torch.zeros(batch, NUM_KV_HEADS, MAX_LEN, HEAD_DIM))

    def forward(self, ids: Tensor, start: int) -> Tensor:
        x = self.embedding(ids)
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        self.write(self.keys, k, start)
        self.write(self.values, v, start)
        mask = torch.arange(MAX_LEN, device=ids.device) <= positions(q, start)[:, None]
        out = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        return self.output(out.transpose(1, 2).flatten(2))
