"""One decode step of attention: on caches of fixed size, and on caches that grow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Writes the tokens at positions ``pos`` [n]. Each token attends to all tokens up to its own position."""
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    visible = torch.arange(keys.shape[2], device=pos.device) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)


def growing_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Appends the tokens, attends to all, and returns the longer caches, too."""
    keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
    return F.scaled_dot_product_attention(q, keys, values), keys, values
