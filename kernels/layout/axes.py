"""Which dimension of a cache is which: a letter for each, in the order of the tensor.

``b`` is the sequence of the batch, ``h`` the KV head, ``t`` the token and ``d`` the channel: ``bhtd`` is [batch,
num_kv_heads, tokens, head_dim], ``tbhd`` is [tokens, batch, num_kv_heads, head_dim]. A pool of slots that any sequence
may own is ``thd``; where its slots lie in blocks, ``n``, it is ``nthd`` or ``nhtd``. A stack is a tensor with further
dimensions; each index of these names a part, which is a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

CACHE_AXES = ("bhtd", "bthd", "tbhd", "thbd", "hbtd", "htbd")
"""The orders that a cache may have, the likelier first: where sizes are 1, several may fit."""


RANK_3_AXES = ("btd", "tbd", "htd", "thd")
"""Those of a cache of one head, or of one sequence, that has no dimension of it."""


SLOT_AXES = "thd"


BLOCK_AXES = ("nthd", "nhtd")


def heads_first(x: Tensor, axes: str) -> Tensor:
    """[batch, heads, tokens, channels] from a tensor in the order ``axes``, of four dimensions or three."""
    if len(axes) == 3:
        x, axes = x.unsqueeze(-2), rank_4_axes(axes)
    return x if axes == "bhtd" else x.permute([axes.index(axis) for axis in "bhtd"])


def in_order(x: Tensor, axes: str) -> Tensor:
    """Inverse of :func:`heads_first`."""
    return x if axes == "bhtd" else x.permute(["bhtd".index(axis) for axis in axes])


def rank_4_axes(axes: str) -> str:
    """The order of a cache of three dimensions with a fourth in front of its channels."""
    (missing,) = set("bhtd").difference(axes)
    return f"{axes[:-1]}{missing}{axes[-1]}"


def rank_3_axes(axes: str) -> str:
    """Inverse of :func:`rank_4_axes`."""
    return axes[:-2] + axes[-1]


PartIndex = tuple[int, ...]
"""Which part of a stack: an index for each of its stacked dimensions."""


def stacked_dims_of_source(
    indexed: Sequence[int], num_index_dims: int, rank: int, stacked_dims: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The stacked dimensions of what is assigned to an indexed tensor.

    Args:
        indexed: the dimensions that have an index tensor, in ascending order; at least one, and none of the stacked.
        num_index_dims: dimensions of these, broadcast together.
        rank: of the tensor.
        stacked_dims: of the tensor.

    Returns:
        None if what goes into a part is not what remains when these are selected away: indices are side by side in
        parts, and are not in the tensor.
    """

    def layout(dims: list[int]) -> list[Any]:
        """The dimensions of a source: those of indices are in their place if they are adjacent, in front if not."""
        places = [dims.index(dim) for dim in indexed]
        begin = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
        kept = [dim for dim in dims if dim not in indexed]
        return [*kept[:begin], *["index"] * num_index_dims, *kept[begin:]]

    of_all = layout(list(range(rank)))
    of_part = layout([dim for dim in range(rank) if dim not in stacked_dims])
    if [dim for dim in of_all if dim not in stacked_dims] != of_part:
        return None
    return tuple(of_all.index(dim) for dim in stacked_dims)


CACHE_RANK = 4
