"""Find out which values of a graph share memory: a write to one of them changes the others.

Views are followed back to the tensor that an operation made. Two views of one tensor share no memory if they take
disjoint ranges of it, as the keys and the values of one projection do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.aten import LIST_OPS, SELECTIONS, VIEW_OPS, Size, arguments, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow

aten = torch.ops.aten

_REPEATING = (aten.expand.default, aten.unfold.default, aten.as_strided.default)

Path = list[Node]
"""A value and then views, each of the node before it."""


def share_memory(one: Node, other: Node) -> bool:
    """Whether an element of ``one`` may be an element of ``other``."""
    paths = _views_to(one), _views_to(other)
    return paths[0][0] is paths[1][0] and not lead_apart(*paths)


def viewed_by(node: Node) -> Node:
    """The tensor that ``node`` views, directly or through other views; ``node`` itself if it is not a view."""
    return _views_to(node)[0]


def lead_apart(one: Path, other: Path) -> bool:
    """Whether two paths from one value lead to disjoint ranges of it."""
    while len(one) > 1 and len(other) > 1 and _are_alike(one[1], other[1]):
        one, other = one[1:], other[1:]
    leaves_its_operand = any(node.target is aten.as_strided.default for node in (*one[1:], *other[1:]))
    if leaves_its_operand or not isinstance(one[0].meta["val"], torch.Tensor):
        return False
    maps = _reached(one), _reached(other)
    return any(_are_disjoint(*maps, axis) for axis in range(len(maps[0].base)))


def _are_alike(view: Node, other: Node) -> bool:
    """Whether two views of one value are the same view and have no element twice."""
    if view.target in _REPEATING or view.target in LIST_OPS:
        return False
    if view.target is operator.getitem:
        return other.target is operator.getitem and view.args[1] == other.args[1]
    return view.target is other.target and arguments(view)[1:] == arguments(other)[1:]


def _views_to(node: Node) -> Path:
    """The tensor that ``node`` is a view of, the views in between, and ``node``."""
    path = [node]
    while _is_view(path[0]):
        path.insert(0, path[0].args[0])
    return path


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.args[0].target in LIST_OPS
    return isinstance(node.target, OpOverload) and node.target.is_view


def _reached(path: Path) -> IndexMap:
    """The map of the last node of a path that has a map. Later nodes of the path read no other elements."""
    reached = IndexMap.identity(shape_of(path[0]))
    for node in path[1:]:
        further = follow(reached, node)
        if further is None:
            break
        reached = further
    return reached


def _are_disjoint(one: IndexMap, other: IndexMap, axis: int) -> bool:
    """Whether two maps take disjoint ranges of an axis."""
    (first, end), (other_first, other_end) = (_range(index_map, axis) for index_map in (one, other))
    return statically_known_true(end <= other_first) or statically_known_true(other_end <= first)


def _range(index_map: IndexMap, axis: int) -> tuple[Size, Size]:
    """The first and the end index along an axis."""
    first = index_map.starts[axis]
    return first, first + sum(factor.step * (factor.size - 1) for factor in index_map.factors(axis)) + 1


def may_leave(node: Node) -> bool:
    """Whether the memory of ``node`` may be that of an output, or of the source of a copy into an input."""
    return any(user.op == "output" or user.target is aten.copy_.default for user in users_through_views(node))


def users_through_views(node: Node) -> Iterator[Node]:
    """The users of ``node`` and of its views, each at least once.

    Later passes replace a copy over a whole tensor by its source, and packed caches share the bytes of a clone. Both
    count as views here.
    """
    reached = [node]
    for value in reached:
        for user in value.users:
            yield user
            if user.op != "output" and user not in reached and _may_share_memory(user):
                reached.append(user)


def _may_share_memory(node: Node) -> bool:
    """Whether the result of ``node`` may be a view of one of its operands, now or after later passes."""
    if not isinstance(node.target, OpOverload):
        return True
    return node.target.is_view or node.target in VIEW_OPS | SELECTIONS or node.target is aten.copy.default
