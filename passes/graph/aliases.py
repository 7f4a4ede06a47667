"""Which values of a graph share memory: a later write to one of them shows in the other.

Views are followed back to the tensor that an operation made. Two views of one tensor share no memory if they take
disjoint ranges of it, as the keys and the values of one projection do.
"""

from __future__ import annotations

import operator

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.aten import LIST_OPS, Size, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow

Path = list[Node]
"""A value, then each a view of the one before it."""


def share_memory(one: Node, other: Node) -> bool:
    """Whether an element of ``one`` may be an element of ``other``."""
    paths = _views_to(one), _views_to(other)
    return paths[0][0] is paths[1][0] and not lead_apart(*paths)


def lead_apart(one: Path, other: Path) -> bool:
    """Whether two paths from one value lead to disjoint ranges of it."""
    maps = _reached(one), _reached(other)
    return any(_are_disjoint(*maps, axis, unit) for axis in range(len(maps[0].base)) for unit in _units(maps, axis))


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
    """The map of the last node of a path that has one. Later nodes of the path read no other elements."""
    reached = IndexMap.identity(shape_of(path[0]))
    for node in path[1:]:
        further = follow(reached, node)
        if further is None:
            break
        reached = further
    return reached


def _units(maps: tuple[IndexMap, IndexMap], axis: int) -> list[int | None]:
    """The sizes of the units into which the maps divide an axis, and None: the axis is one unit."""
    steps = [factor.step for index_map in maps for factor in index_map.factors(axis)]
    return [None, *(step for step in steps if isinstance(step, int) and step > 1)]


def _are_disjoint(one: IndexMap, other: IndexMap, axis: int, unit: int | None) -> bool:
    """Whether two maps take disjoint ranges of an axis, or of every unit of it."""
    taken, other_taken = _range(one, axis, unit), _range(other, axis, unit)
    if taken is None or other_taken is None:
        return False
    (first, end), (other_first, other_end) = taken, other_taken
    return statically_known_true(end <= other_first) or statically_known_true(other_end <= first)


def _range(index_map: IndexMap, axis: int, unit: int | None) -> tuple[Size, Size] | None:
    """The first and the end index that a map takes, in every unit of an axis; None if these are not the same."""
    first, inside = index_map.starts[axis], index_map.factors(axis)
    if unit is not None:
        if not isinstance(first, int) or not all(isinstance(factor.step, int) for factor in inside):
            return None
        first, inside = first % unit, [factor for factor in inside if factor.step % unit != 0]
    end = first + sum(factor.step * (factor.size - 1) for factor in inside) + 1
    return (first, end) if unit is None or statically_known_true(end <= unit) else None
