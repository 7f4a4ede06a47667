"""Attention to the new tokens of a prompt in full precision.

A call that writes many tokens still has their unquantized keys and values. Attention then reads these in place of
dequantized tokens. Quantization therefore costs no precision until the first decode step reads the prompt. Tokens of
earlier calls are read packed.

Attention of few queries, as in decode steps and in the verification of draft tokens, reads new tokens packed, too. A
step of one token and a step that verifies several tokens then give equal results, and decode kernels read nothing but
packed bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PACKED_QUERIES = 16
"""Up to this many queries of a sequence read new tokens packed."""


class NewTokens(NamedTuple):
    """Keys or values that the same call has written.

    Attributes:
        x: [batch, num_kv_heads, n, head_dim], any float dtype, any strides.
        slots: int64 [n] or [batch, n]: the place of each token in the cache. Tokens with a slot outside of
            0 <= slot < kv_len have no influence; -1 marks tokens that were not written.
    """

    x: Tensor
    slots: Tensor


def reads_packed(q_len: int) -> bool:
    """Whether attention of ``q_len`` queries reads new tokens packed.

    False if ``q_len`` is symbolic: :func:`with_new_tokens` then decides when the graph runs.
    """
    return isinstance(q_len, int) and q_len <= MAX_PACKED_QUERIES


def with_new_tokens(tokens: Tensor, new: NewTokens | None, q_len: int) -> Tensor:
    """``tokens`` with the new tokens in their slots, unless few queries read them.

    Args:
        tokens: [batch, num_kv_heads, kv_len, head_dim], read from a cache.
        new: the new tokens, in the basis of ``tokens``.
        q_len: the number of queries of a sequence.

    Returns:
        [batch, num_kv_heads, kv_len, head_dim] in the dtype of ``tokens``, which is not changed.
    """
    if new is None or reads_packed(q_len):
        return tokens
    kv_len, slots = tokens.shape[2], torch.atleast_2d(new.slots)
    seen = (slots >= 0) & (slots < kv_len)
    if not isinstance(q_len, int):
        seen = seen & (torch.scalar_tensor(q_len, dtype=torch.int64, device=slots.device) > MAX_PACKED_QUERIES)
    # Skipped tokens go to a row after the last token.
    index = torch.where(seen, slots, kv_len)[:, None, :, None].expand(new.x.shape)
    return F.pad(tokens, (0, 0, 0, 1)).scatter(2, index, new.x.to(tokens.dtype))[:, :, :kv_len]
