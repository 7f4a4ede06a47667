"""How the nodes of a graph change the order of a cache's dimensions.

An order is a text with one letter for each dimension (:mod:`kvcompile.kernels.layout.axes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import ops
from torch.fx import Node

from kvcompile.passes.graph.aten import SAME_OPS, same_sizes, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow

aten = ops.aten

REPETITIONS = (aten.expand.default, aten.repeat.default)


def permutes_dims(node: Node) -> bool:
    """Whether ``node`` permutes the dimensions of a cache."""
    return len(_permutation(node)) in (3, 4)


def repeats_sequence(node: Node, axes: str) -> bool:
    """Whether ``node`` repeats the only sequence of a cache in the order ``axes``, and does not change the vectors.

    A prefix that all sequences of a batch share is repeated in this way.
    """
    if node.target not in REPETITIONS or "b" not in axes:
        return False
    before, after = list(shape_of(node.args[0])), list(shape_of(node))
    batch = axes.index("b")
    return len(before) == len(after) == len(axes) and same_sizes(before, [*after[:batch], 1, *after[batch + 1 :]])


def axes_before(node: Node, axes: str) -> str:
    """The order of the operand of ``node`` if ``node`` has the order ``axes``; the same unless ``node`` permutes it."""
    order = _permutation(node)
    return "".join(axes[order.index(dim)] for dim in range(len(order))) or axes


def axes_after(node: Node, axes: str) -> str:
    """The order of ``node``, whose operand has the order ``axes``; the same unless ``node`` permutes it."""
    return "".join(axes[dim] for dim in _permutation(node)) or axes


def axes_of_last(states: Sequence[Node], axes: str) -> str:
    """The order of the last of ``states``, each of which views or writes the one before; the first has order ``axes``.

    "" if a state with another number of dimensions is permuted.
    """
    for state in states[1:]:
        order = _permutation(state)
        if len(order) not in (0, len(axes)):
            return ""
        axes = axes_after(state, axes)
    return axes


def unpermuted(state: Node, axes: str) -> tuple[Node, str, tuple[Node, ...]]:
    """The state that ``state`` is a copy or a permutation of, its order, and the nodes in between.

    ``state`` has the order ``axes``, one letter for each of its dimensions, which may be any letters; "" if only the
    state and the nodes matter.
    """
    nodes: list[Node] = []
    while state.target in SAME_OPS or _permutation(state):
        nodes.append(state)
        axes = axes_before(state, axes) if axes else axes
        state = state.args[0]
    return state, axes, tuple(nodes)


def _permutation(node: Node) -> list[int]:
    """The dimension of the input for each dimension of ``node``; [] if ``node`` does not permute dimensions."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return []
    index_map = follow(IndexMap.identity(shape_of(node)), node)
    assert index_map is not None, "every permutation has a map"
    return index_map.axes()
