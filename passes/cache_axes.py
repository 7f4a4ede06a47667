"""Which dimension of a cache is which: a letter for each, in the order of the tensor.

``b`` is the sequence of the batch, ``h`` the KV head, ``t`` the token and ``d`` the channel: ``bhtd`` is [batch,
num_kv_heads, tokens, head_dim], ``tbhd`` is [tokens, batch, num_kv_heads, head_dim]. A pool of slots that any sequence
may own is ``thd``; where its slots lie in blocks, ``n``, it is ``nthd`` or ``nhtd``.
"""

from __future__ import annotations

from torch import Tensor, ops
from torch.fx import Node

aten = ops.aten

CACHE_AXES = ("bhtd", "bthd", "tbhd", "thbd", "hbtd", "htbd")
"""The orders that a cache may have, the likelier first: where sizes are 1, several may fit."""

RANK_3_AXES = ("btd", "tbd", "htd", "thd")
"""Those of a cache of one head, or of one sequence, that has no dimension of it."""

SLOT_AXES = "thd"
BLOCK_AXES = ("nthd", "nhtd")

_SWAPPED = (0, 2, 1, 3)


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


def permutes_vectors(node: Node) -> bool:
    """Whether ``node`` brings the vectors of a tensor of four dimensions in another order, and not their channels."""
    order = _permutation(node)
    return len(order) == 4 and order[3] == 3


def swaps_axes(node: Node) -> bool:
    """Whether ``node`` exchanges the middle two of four axes: [B, H, S, D] from [B, S, H, D], or the reverse."""
    return _permutation(node) == _SWAPPED


def axes_before(node: Node, axes: str) -> str:
    """The order of the tensor of which ``node``, in the order ``axes``, is a permutation or has the values."""
    order = _permutation(node)
    return "".join(axes[order.index(dim)] for dim in range(len(order))) or axes


def axes_after(node: Node, axes: str) -> str:
    """The order of ``node``, a permutation of a tensor in the order ``axes`` or one with its values."""
    return "".join(axes[dim] for dim in _permutation(node)) or axes


def _permutation(node: Node) -> tuple[int, ...]:
    """For every dimension of ``node`` that of its input which it is; () if it does not permute dimensions."""
    rank = node.meta["val"].dim() if node.target in (aten.permute.default, aten.transpose.int) else 0
    order = list(range(rank))
    if node.target is aten.permute.default:
        order = node.args[1]
    elif node.target is aten.transpose.int:
        first, second = node.args[1:]
        order[first], order[second] = order[second], order[first]
    return tuple(order)
