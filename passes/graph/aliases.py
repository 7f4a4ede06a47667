"""Which values of a graph share memory: a later write to one of them shows in the other.

Views are followed back to the tensor that an operation made. Two views of one tensor share no memory if their paths
part at disjoint ranges, as the keys and the values of one projection do.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.aten import LIST_OPS, Size, shape_of, with_defaults

aten = torch.ops.aten

Path = list[Node]
"""A value, then each a view of the one before it."""


def share_memory(one: Node, other: Node) -> bool:
    """Whether an element of ``one`` may be an element of ``other``."""
    paths = _views_to(one), _views_to(other)
    return paths[0][0] is paths[1][0] and not lead_apart(*paths)


def lead_apart(one: Path, other: Path) -> bool:
    """Whether two paths from one value part at disjoint ranges of it."""
    for step, other_step in zip(one[1:], other[1:], strict=False):
        if _view_op(step) != _view_op(other_step):
            return _are_disjoint(_range(step), _range(other_step))
    return False


def _views_to(node: Node) -> Path:
    """The tensor that ``node`` is a view of, the views in between, and ``node``."""
    path = [node]
    while _is_view(path[0]):
        path.insert(0, _whole(path[0]))
    return path


def _is_view(node: Node) -> bool:
    op = node.args[0].target if node.target is operator.getitem else node.target
    return isinstance(op, OpOverload) and op.is_view


def _whole(node: Node) -> Node:
    """The tensor that ``node`` is a view of. For an item of a list, the tensor that the list divides."""
    return node.args[0].args[0] if _is_item(node) else node.args[0]


def _is_item(node: Node) -> bool:
    return node.target is operator.getitem and node.args[0].target in LIST_OPS


def _view_op(node: Node) -> tuple[Any, ...]:
    """The operation by which ``node`` views its operand; equal for two nodes that do the same."""
    return (*_view_op(node.args[0]), node.args[1]) if _is_item(node) else (node.target, *node.args[1:])


def _range(view: Node) -> tuple[int, Size, Size] | None:
    """(dimension, first index, end index) if ``view`` takes a range of one dimension; None for other views."""
    if _is_item(view):
        return _range_of_item(*view.args)
    if view.target not in (aten.select.int, aten.slice.Tensor):
        return None
    whole, dim, first, _, step = with_defaults(view, None, 0, 0, None, 1)
    first = 0 if first is None else first
    if not isinstance(first, int):
        return None
    first = first if first >= 0 else first + shape_of(whole)[dim]
    return dim, first, first + (1 if view.target is aten.select.int else step * shape_of(view)[dim])


def _range_of_item(division: Node, index: int) -> tuple[int, Size, Size]:
    unbinds = division.target is aten.unbind.int
    *_, dim = with_defaults(division, None, 0) if unbinds else with_defaults(division, None, None, 0)
    sizes = [1 if unbinds else item.shape[dim] for item in division.meta["val"]]
    first = sum(sizes[:index])
    return dim, first, first + sizes[index]


def _are_disjoint(one: tuple[int, Size, Size] | None, other: tuple[int, Size, Size] | None) -> bool:
    if one is None or other is None or one[0] != other[0]:
        return False
    (_, first, end), (_, other_first, other_end) = one, other
    return statically_known_true(end <= other_first) or statically_known_true(other_end <= first)
