"""The positions of the tokens that a write or a move of a cache changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.passes.graph.aten import shape_of

BEHIND = BLOCK_TOKENS * 2**16
"""A position that is so far behind the end of a cache is behind the data of every rank, for up to 65,536 ranks."""


def num_tokens_of(node: Node, axes: str) -> Any:
    """The number of tokens of a cache value in the order ``axes``, an int or SymInt."""
    return shape_of(node)[axes.index("t")]


def wrapped(positions: Tensor, num_tokens: Any) -> Tensor:
    """Positions, all counted from the first token. Negative ``positions`` count from the end, as in Python.

    A position outside the cache becomes a position behind its packed data. The last block may have room for more
    tokens than the model's cache, and ranks that divide the tokens have room for further blocks. A write there must not
    go unnoticed. Behind the data, the store checks bounds: generated C++ raises, and the Triton store fails an
    assertion.
    """
    positions = positions.long()
    positions = torch.where(positions < 0, positions + num_tokens, positions)
    inside = (positions >= 0) & (positions < num_tokens)
    return torch.where(inside, positions, num_tokens + BEHIND)


def first_of_slice(start: Any, size: Any) -> Any:
    """The first index of a slice. If it is a node, it may be negative and count from the end."""
    start = 0 if start is None else start
    return torch.sym_max(start + size, 0) if isinstance(start, int) and start < 0 else start
