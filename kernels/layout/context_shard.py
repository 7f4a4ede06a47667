"""The tokens of a cache that one rank keeps under context parallelism.

The ranks take turns at blocks of BLOCK_TOKENS tokens: block ``b`` belongs to rank ``b % size``, where it is block
``b // size``. However long a sequence is, two ranks differ by at most one block of tokens. Every rank reserves the same
number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.formats.base import BLOCK_TOKENS


@dataclass(frozen=True)
class ContextShard:
    """The share of one rank.

    Attributes:
        rank: this process in its group, from 0 on.
        size: processes of the group.
        group: the name by which functional collectives find the process group.

    Raises:
        ValueError: the rank is not below the size.
    """

    rank: int
    size: int
    group: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not within a group of {self.size}")

    def num_tokens(self, num_tokens: Any) -> Any:
        """Tokens for which each rank has room, of a cache of ``num_tokens`` tokens; may be symbolic."""
        period = BLOCK_TOKENS * self.size
        return (num_tokens + period - 1) // period * BLOCK_TOKENS

    def owned_tokens(self, num_tokens: int) -> int:
        """Tokens of this rank that lie in a cache of ``num_tokens`` tokens: the first tokens that it has room for."""
        rounds, rest = divmod(num_tokens, BLOCK_TOKENS * self.size)
        return rounds * BLOCK_TOKENS + min(max(rest - self.rank * BLOCK_TOKENS, 0), BLOCK_TOKENS)

    def positions(self, num_tokens: int, device: torch.device) -> Tensor:
        """The positions in the cache of the first ``num_tokens`` tokens of this rank, int64 [num_tokens].

        The last positions may lie beyond the end of the cache.
        """
        own = torch.arange(num_tokens, device=device)
        return (own // BLOCK_TOKENS * self.size + self.rank) * BLOCK_TOKENS + own % BLOCK_TOKENS

    def owned(self, x: Tensor, positions: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens that this rank stores, as arguments of :func:`~kvcompile.kernels.spec.packing.write_tokens`.

        A token of another rank would get the same position as a token of this rank. A write that keeps the old bytes
        there would undo the write of this rank's token. Each token of another rank is therefore replaced by a token of
        this rank, which is then written several times. If this rank has no token, nothing is written.

        Args:
            x: new tokens, [batch, num_kv_heads, n, head_dim].
            positions: their positions in the cache, int64 [n] or [batch, n], at least 0.
            valid: which tokens are stored at all, bool of the shape of ``positions``; None for all.

        Returns:
            The tokens, their positions among the tokens of this rank, and which of them are valid.
        """
        block = positions // BLOCK_TOKENS
        own = block % self.size == self.rank
        own = own if valid is None else own & valid
        positions = block // self.size * BLOCK_TOKENS + positions % BLOCK_TOKENS
        if isinstance(x.shape[2], int) and x.shape[2] <= 1:
            return x, positions, own
        first = own.int().argmax(-1, keepdim=True)
        index = torch.where(own, torch.arange(x.shape[2], device=x.device), first)
        of_x = index.expand(x.shape[0], -1)[:, None, :, None].expand(x.shape)
        return x.gather(2, of_x), positions.gather(-1, index), own.any(-1, keepdim=True).expand(own.shape)

    def select(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of this rank of plain values ``x``, whose tokens lie along ``dim``; zeros beyond the cache."""
        count = x.shape[dim]
        positions = self.positions(self.num_tokens(count), x.device)
        inside = positions < count
        own = x.index_select(dim, torch.where(inside, positions, 0))
        return torch.where(inside.reshape(-1, *[1] * (x.dim() - 1 - dim % x.dim())), own, 0.0)

    def join(self, parts: Tensor, dim: int, num_tokens: int) -> Tensor:
        """Inverse of :meth:`select`: ``parts`` [size, ...] of all ranks, whose tokens lie along ``dim`` of a part."""
        blocks = parts.unflatten(dim + 1, (-1, BLOCK_TOKENS)).movedim(0, dim + 1)
        return blocks.flatten(dim, dim + 2).narrow(dim, 0, num_tokens)

    def mask(self, mask: Tensor | None, num_tokens: int, kv_len: Any, q_len: Any, device: torch.device) -> Tensor:
        """The mask for attention on the tokens of this rank.

        Args:
            mask: a mask that broadcasts to [batch, num_heads, q_len, kv_len], bool or float; None for a causal mask
                if ``q_len`` is given, and for no mask otherwise.
            num_tokens: tokens for which this rank has room.
            kv_len: the tokens of the cache that attention sees.
            q_len: query positions of a causal mask; None without a causal mask.
            device: the device of the result.

        Returns:
            A mask of the same kind that broadcasts to [batch, num_heads, q_len, num_tokens].
        """
        positions = self.positions(num_tokens, device)
        visible = positions < kv_len
        if mask is None:
            return visible if q_len is None else visible & (positions <= torch.arange(q_len, device=device)[:, None])
        own = mask.expand(*mask.shape[:-1], kv_len).index_select(-1, torch.where(visible, positions, 0))
        return own & visible if mask.dtype == torch.bool else torch.where(visible, own, -torch.inf)
