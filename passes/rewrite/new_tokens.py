"""Attention to the new tokens of a prompt in full precision (:mod:`kvcompile.kernels.spec.new_tokens`).

The new tokens are the tokens of the last store before attention reads the cache, even if a window drops tokens after
it. Attention reads two kinds of tokens packed: tokens of earlier stores, which a later store may overwrite, and tokens
that a move copies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.spec.new_tokens import reads_packed
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.rewrite.insert import NewNodes


class NewTokens(NamedTuple):
    """The tokens of the last write of a cache, in the normal form of the write.

    Attributes:
        x: [batch, num_kv_heads, n, head_dim], of all sequences.
        positions: int64 [n] or [batch, n].
        valid: bool of the shape of ``positions``, whether a token is written; None if all are.
    """

    x: Node
    positions: Node
    valid: Node | None

    def after_slice(self, graph: Graph, source: Node) -> NewTokens:
        """The same tokens after a slice of the cache, at the graph's insertion point.

        Args:
            graph: the graph.
            source: int64 [m], neighbouring tokens: the slice keeps these. A position below 0, of a token that the slice
                drops, has no influence on attention.
        """
        return NewTokens(self.x, inline(graph, _counted_from, self.positions, source), self.valid)

    def of_heads(self, graph: Graph, first: int, num_heads: int) -> NewNodes:
        """The nodes for attention of ``num_heads`` KV heads from ``first`` on, at the graph's insertion point."""
        x, slots = self.x, self.positions
        if shape_of(x)[1] != num_heads:
            x = inline(graph, lambda x: x.narrow(1, first, num_heads), x)
        if self.valid is not None:
            slots = inline(graph, _slots, slots, self.valid)
        return x, slots


def _counted_from(positions: Tensor, source: Tensor) -> Tensor:
    return positions - source[:1].sum()  # the sum is 0 if the slice keeps nothing


def _slots(positions: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, positions, -1)


def can_be_exact(read: Read, query: Node) -> bool:
    """Whether attention of ``query`` may be exact: it has many queries, which see all sequences of the cache."""
    sees_all = not read.gathers and not read.regroups_heads and read.first_sequence is None
    return sees_all and not reads_packed(shape_of(query)[2])
