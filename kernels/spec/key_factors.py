"""Key factors: attention applies RoPE to pre-RoPE keys by two factors for each token and channel.

RoPE (a rotary position embedding, RoFormer, arXiv:2104.09864) rotates pairs of channels by an angle of the token. With
the partner ``p(i)`` of channel ``i``,

    rope(k)[t, i] = a[t, i] * k[t, i] + b[t, i] * k[t, p(i)]

and ``p(p(i)) = i``. The score of a key after RoPE is therefore a sum over the channels of the pre-RoPE key:

    q . rope(k)[t] = sum_j k[t, j] * (a[t, j] * q[j] + b[t, p(j)] * q[p(j)])

Attention needs no keys after RoPE: it takes the query, the query with its channels in the order ``p``, and two factors
for each token and channel. Scales and zero points of a format are applied first, so that this holds for every format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeyFactors(NamedTuple):
    """The factors of keys in attention: scores are ``sum_j k[t, j] * (f[0, t, j] * q[j] + f[1, t, j] * paired[j])``.

    Attributes:
        paired: [batch, num_heads, q_len, head_dim], the query with its channels in the order of their partners.
        factors: [2, kv_len, head_dim], any float dtype, finite: the factors ``f`` of every token.
    """

    paired: Tensor
    factors: Tensor


def paired_query(query: Tensor, partners: tuple[int, ...]) -> Tensor:
    """The query whose channel ``j`` is channel ``partners[j]`` of ``query``, [..., len(partners)], in its dtype.

    It is joined from slices and needs no tensor of indices, so that it can be traced into a graph.
    """
    parts: list[Tensor] = []
    begin = 0
    while begin < len(partners):
        count = _exchanged_neighbours(partners, begin)
        if count:
            pairs = query[..., begin : begin + count].unflatten(-1, (-1, 2))
            parts.append(torch.stack([pairs[..., 1], pairs[..., 0]], -1).flatten(-2))
        else:
            first = partners[begin]
            while begin + count < len(partners) and partners[begin + count] == first + count:
                count += 1
            parts.append(query[..., first : first + count])
        begin += count
    return torch.cat(parts, -1)


def _exchanged_neighbours(partners: tuple[int, ...], begin: int) -> int:
    """The number of channels from ``begin`` on that form pairs of neighbours, each the partner of the other."""
    end = begin
    while end + 1 < len(partners) and partners[end : end + 2] == (end + 1, end):
        end += 2
    return end - begin


def with_factors(q: Tensor, k: Tensor, factors: KeyFactors) -> tuple[Tensor, Tensor]:
    """Queries and keys of twice as many channels, whose products are the scores of :class:`KeyFactors`.

    Args:
        q: scaled queries, float32 [batch, num_heads, q_len, head_dim].
        k: dequantized keys, float32 [batch, num_kv_heads, kv_len, head_dim].
        factors: its ``paired`` is scaled as ``q`` is.

    Returns:
        [batch, num_heads, q_len, 2 * head_dim] and [batch, num_kv_heads, kv_len, 2 * head_dim], float32.
    """
    of_query, of_paired = factors.factors.float().unbind(0)
    return torch.cat([q, factors.paired], -1), torch.cat([k * of_query, k * of_paired], -1)
