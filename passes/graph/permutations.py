"""The order of a cache's dimensions: one letter for each dimension of the tensor.

``b`` is the sequence of the batch, ``h`` the KV head, ``t`` the token and ``d`` the channel. ``bhtd`` is [batch,
num_kv_heads, tokens, head_dim], and ``tbhd`` is [tokens, batch, num_kv_heads, head_dim]. A pool of slots that any
sequence may own is ``thd``. If its slots lie in blocks, ``n``, it is ``nthd`` or ``nhtd``.
"""

from __future__ import annotations

from torch import ops
from torch.fx import Node

from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow

aten = ops.aten


_SWAPPED = [0, 2, 1, 3]


def permutes_vectors(node: Node) -> bool:
    """Whether ``node`` permutes the first three of four dimensions, and leaves the channels last."""
    order = _permutation(node)
    return len(order) == 4 and order[3] == 3


def swaps_axes(node: Node) -> bool:
    """Whether ``node`` exchanges the middle two of four dimensions: [B, H, S, D] from [B, S, H, D], or the reverse."""
    return _permutation(node) == _SWAPPED


def axes_before(node: Node, axes: str) -> str:
    """The order of the operand of ``node``, which has the order ``axes``. Other operations keep the order."""
    order = _permutation(node)
    return "".join(axes[order.index(dim)] for dim in range(len(order))) or axes


def axes_after(node: Node, axes: str) -> str:
    """The order of ``node``, whose operand has the order ``axes``. Other operations keep the order."""
    return "".join(axes[dim] for dim in _permutation(node)) or axes


def _permutation(node: Node) -> list[int]:
    """For every dimension of ``node`` the dimension of its input; [] if it does not permute dimensions."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return []
    index_map = follow(IndexMap.identity(shape_of(node)), node)
    assert index_map is not None, "every permutation has a map"
    return index_map.axes()
