"""Which dimension of a cache is which: a letter for each, in the order of the tensor.

``b`` is the sequence of the batch, ``h`` the KV head, ``t`` the token and ``d`` the channel: ``bhtd`` is [batch,
num_kv_heads, tokens, head_dim], ``tbhd`` is [tokens, batch, num_kv_heads, head_dim]. A pool of slots that any sequence
may own is ``thd``; where its slots lie in blocks, ``n``, it is ``nthd`` or ``nhtd``.
"""

from __future__ import annotations

from torch import ops
from torch.fx import Node

aten = ops.aten


_SWAPPED = (0, 2, 1, 3)


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
