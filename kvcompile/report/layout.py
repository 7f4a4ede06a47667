"""A layout of the boxes of a small graph: columns from left to right, short edges, no overlaps.

This is the layered drawing of Sugiyama, Tagawa and Toda (1981). It assigns boxes to ranks, routes long edges through
the ranks between, orders every rank by the mean place of its neighbours, and aligns boxes with their neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GAP_X, GAP_Y = 44.0, 16.0
_SWEEPS = 8


@dataclass
class Cell:
    """The place of a box, or of an edge that passes a rank: the upper left corner and the size."""

    box: int | None
    width: float
    height: float
    x: float = 0.0
    y: float = 0.0

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True)
class Layout:
    """Places of all boxes, and for every edge the places that it passes, from box to box."""

    boxes: tuple[Cell, ...]
    edges: tuple[tuple[Cell, ...], ...]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of the given (width, height).

    Args:
        sizes: the sizes of the boxes.
        edges: pairs of positions in ``sizes``. All edges lead to the right, except edges that close a cycle. In a
            cycle, only edges to an earlier position in ``sizes`` lead to the left.
    """
    boxes = [Cell(index, *size) for index, size in enumerate(sizes)]
    ranks = _ranks(_sorted(len(sizes), edges), edges)
    columns: list[list[Cell]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for cell, rank in zip(boxes, ranks, strict=True):
        columns[rank].append(cell)
    paths = []
    for source, target in edges:
        passed = [Cell(None, 0.0, 0.0) for _ in range(ranks[source] + 1, ranks[target])]
        for rank, cell in enumerate(passed, start=ranks[source] + 1):
            columns[rank].append(cell)
        paths.append((boxes[source], *passed, boxes[target]))
    _order(columns, paths)
    _place(columns, paths)
    width = max((cell.x + cell.width for cell in boxes), default=0.0)
    height = max((cell.y + cell.height for column in columns for cell in column), default=0.0)
    return Layout(tuple(boxes), tuple(paths), width, height)


def _sorted(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The boxes, each after the boxes that it uses. If a cycle leaves no such box, the first remaining box is next."""
    order: list[int] = []
    remaining = dict.fromkeys(range(count))
    while remaining:
        waiting = {target for source, target in edges if source in remaining}
        box = next((box for box in remaining if box not in waiting), next(iter(remaining)))
        del remaining[box]
        order.append(box)
    return order


def _ranks(order: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The column of every box: behind all boxes that it uses, or right before its first user if it uses none."""
    places = {box: place for place, box in enumerate(order)}
    edges = [(source, target) for source, target in edges if places[source] < places[target]]
    ranks = [0] * len(order)
    for source, target in sorted(edges, key=lambda edge: places[edge[0]]):
        ranks[target] = max(ranks[target], ranks[source] + 1)
    targets = {target for _, target in edges}
    for box in order:
        users = [ranks[target] for source, target in edges if source == box]
        if box not in targets and users:
            ranks[box] = min(users) - 1
    return ranks


def _neighbours(paths: Sequence[tuple[Cell, ...]]) -> dict[int, list[Cell]]:
    neighbours: dict[int, list[Cell]] = {}
    for path in paths:
        for one, other in itertools.pairwise(path):
            neighbours.setdefault(id(one), []).append(other)
            neighbours.setdefault(id(other), []).append(one)
    return neighbours


def _order(columns: list[list[Cell]], paths: Sequence[tuple[Cell, ...]]) -> None:
    """Sort every column by the mean place of its neighbours, in forward and backward sweeps."""
    neighbours = _neighbours(paths)
    places = {id(cell): (place + 0.5) / len(column) for column in columns for place, cell in enumerate(column)}
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            means = {}
            for cell in column:
                near = [places[id(other)] for other in neighbours.get(id(cell), ()) if other not in column]
                means[id(cell)] = sum(near) / len(near) if near else places[id(cell)]
            column.sort(key=lambda cell: means[id(cell)])
            for place, cell in enumerate(column):
                places[id(cell)] = (place + 0.5) / len(column)


def _place(columns: list[list[Cell]], paths: Sequence[tuple[Cell, ...]]) -> None:
    x = 0.0
    for column in columns:
        width = max(cell.width for cell in column)
        for cell in column:
            if cell.box is None:
                cell.width = width
            cell.x = x + (width - cell.width) / 2
        x += width + GAP_X
        _stack(column, [0.0] * len(column))
    neighbours = _neighbours(paths)
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wanted = []
            for cell in column:
                near = [other.middle for other in neighbours.get(id(cell), ())]
                wanted.append((sum(near) / len(near) if near else cell.middle) - cell.height / 2)
            _stack(column, wanted)
    top = min((cell.y for column in columns for cell in column), default=0.0)
    for column in columns:
        for cell in column:
            cell.y -= top


def _stack(column: list[Cell], wanted: Sequence[float]) -> None:
    """Stack the boxes of a column in their order, as near to their wanted heights as possible.

    Boxes that would overlap form a group, which is placed at the mean of their wanted heights.
    """
    blocks: list[list[float]] = []  # sum of the wanted tops, number of boxes, height
    for cell, top in zip(column, wanted, strict=True):
        blocks.append([top, 1.0, cell.height + GAP_Y])
        while len(blocks) > 1 and _top(blocks[-2]) + blocks[-2][2] > _top(blocks[-1]):
            total, number, height = blocks.pop()
            blocks[-1][0] += total - number * blocks[-1][2]
            blocks[-1][1] += number
            blocks[-1][2] += height
    cells = iter(column)
    for block in blocks:
        y = _top(block)
        for _ in range(int(block[1])):
            cell = next(cells)
            cell.y = y
            y += cell.height + GAP_Y


def _top(block: Sequence[float]) -> float:
    return block[0] / block[1]
