"""Where the boxes of a small graph go: columns from left to right, short edges, nothing on top of anything.

The layered drawing of Sugiyama, Tagawa and Toda (1981): rank the boxes, let long edges pass through the ranks between,
order every rank by the mean of its neighbours, then move boxes to the height of their neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GAP_X, GAP_Y = 44.0, 16.0
_SWEEPS = 8


@dataclass
class Slot:
    """The place of a box, or of an edge that passes a rank: its left upper corner and its size."""

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
    """Places of all boxes, and for every edge the slots that it goes through, from box to box."""

    boxes: tuple[Slot, ...]
    edges: tuple[tuple[Slot, ...], ...]
    width: float
    height: float


def lay_out(sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]) -> Layout:
    """Lay out boxes of the given (width, height).

    Args:
        sizes: of the boxes, which are in an order that most edges follow.
        edges: pairs of positions in ``sizes``; those against the order are drawn, but do not count for the layout.
    """
    boxes = [Slot(index, *size) for index, size in enumerate(sizes)]
    ranks = _ranks(len(sizes), [edge for edge in edges if edge[0] < edge[1]])
    columns: list[list[Slot]] = [[] for _ in range(max(ranks, default=-1) + 1)]
    for slot, rank in zip(boxes, ranks, strict=True):
        columns[rank].append(slot)
    paths = []
    for source, target in edges:
        passed = [Slot(None, 0.0, 0.0) for _ in range(ranks[source] + 1, ranks[target])]
        for rank, slot in enumerate(passed, start=ranks[source] + 1):
            columns[rank].append(slot)
        paths.append((boxes[source], *passed, boxes[target]))
    _order(columns, paths)
    _place(columns, paths)
    width = max((slot.x + slot.width for slot in boxes), default=0.0)
    height = max((slot.y + slot.height for column in columns for slot in column), default=0.0)
    return Layout(tuple(boxes), tuple(paths), width, height)


def _ranks(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The column of every box: behind all it uses; what uses nothing right before its first user."""
    ranks = [0] * count
    for source, target in sorted(edges):
        ranks[target] = max(ranks[target], ranks[source] + 1)
    targets = {target for _, target in edges}
    for box in range(count):
        users = [ranks[target] for source, target in edges if source == box]
        if box not in targets and users:
            ranks[box] = min(users) - 1
    return ranks


def _neighbours(paths: Sequence[tuple[Slot, ...]]) -> dict[int, list[Slot]]:
    neighbours: dict[int, list[Slot]] = {}
    for path in paths:
        for one, other in itertools.pairwise(path):
            neighbours.setdefault(id(one), []).append(other)
            neighbours.setdefault(id(other), []).append(one)
    return neighbours


def _order(columns: list[list[Slot]], paths: Sequence[tuple[Slot, ...]]) -> None:
    """Sort every column by the mean place of what its slots are connected to, to and fro."""
    neighbours = _neighbours(paths)
    places = {id(slot): (place + 0.5) / len(column) for column in columns for place, slot in enumerate(column)}
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            means = {}
            for slot in column:
                near = [places[id(other)] for other in neighbours.get(id(slot), ()) if other not in column]
                means[id(slot)] = sum(near) / len(near) if near else places[id(slot)]
            column.sort(key=lambda slot: means[id(slot)])
            for place, slot in enumerate(column):
                places[id(slot)] = (place + 0.5) / len(column)


def _place(columns: list[list[Slot]], paths: Sequence[tuple[Slot, ...]]) -> None:
    x = 0.0
    for column in columns:
        width = max(slot.width for slot in column)
        for slot in column:
            if slot.box is None:
                slot.width = width
            slot.x = x + (width - slot.width) / 2
        x += width + GAP_X
        _stack(column, [0.0] * len(column))
    neighbours = _neighbours(paths)
    for sweep in range(_SWEEPS):
        for column in columns if sweep % 2 == 0 else reversed(columns):
            wanted = []
            for slot in column:
                near = [other.middle for other in neighbours.get(id(slot), ())]
                wanted.append((sum(near) / len(near) if near else slot.middle) - slot.height / 2)
            _stack(column, wanted)
    top = min((slot.y for column in columns for slot in column), default=0.0)
    for column in columns:
        for slot in column:
            slot.y -= top


def _stack(column: list[Slot], wanted: Sequence[float]) -> None:
    """Put the slots of a column one under the other, in their order, as near to where they want to be as that allows.

    Slots that would overlap form a block, which goes to the mean of what its slots want.
    """
    blocks: list[list[float]] = []  # sum of wanted tops of the block itself, number of slots, height
    for slot, top in zip(column, wanted, strict=True):
        blocks.append([top, 1.0, slot.height + GAP_Y])
        while len(blocks) > 1 and _top(blocks[-2]) + blocks[-2][2] > _top(blocks[-1]):
            total, number, height = blocks.pop()
            blocks[-1][0] += total - number * blocks[-1][2]
            blocks[-1][1] += number
            blocks[-1][2] += height
    slots = iter(column)
    for block in blocks:
        y = _top(block)
        for _ in range(int(block[1])):
            slot = next(slots)
            slot.y = y
            y += slot.height + GAP_Y


def _top(block: Sequence[float]) -> float:
    return block[0] / block[1]
