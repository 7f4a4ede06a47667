"""Sets of layers in the notation of policies: ``"0-1, 5, -2:"``."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from kvcompile.errors import PolicyError, shown

MAX_ITEMS = 200
"""The maximum number of items of one set."""

_NUMBER = r"-?[0-9]{1,9}"
_ITEM = re.compile(
    rf"(?P<index>{_NUMBER})|(?P<first>[0-9]{{1,9}})-(?P<last>[0-9]{{1,9}})|(?P<start>{_NUMBER})?:(?P<stop>{_NUMBER})?"
)


@dataclass(frozen=True)
class LayerSet:
    """A union of slices of the list of layers.

    An item of the comma-separated text is an index (``5``, ``-1`` for the last layer), an inclusive range (``0-1``), or
    a Python slice (``-2:`` for the last two, ``2:-2`` for all but two at each end). Layers beyond the depth of a model
    are ignored, so a policy can serve models of different depth.
    """

    slices: tuple[tuple[int | None, int | None], ...]

    @classmethod
    @functools.cache
    def parse(cls, text: str) -> LayerSet:
        """The layers that ``text`` lists; PolicyError names the wrong item."""
        items = text.split(",")
        if len(items) > MAX_ITEMS:
            raise PolicyError(f"layers has {len(items)} items; give at most {MAX_ITEMS}, such as ranges '0-31'")
        return cls(tuple(_parse_item(item.strip()) for item in items))

    def contains(self, layer: int, num_layers: int | None) -> bool:
        """Whether the set contains layer ``layer`` of a model of ``num_layers`` layers.

        If the number of layers is unknown, items that count from the last layer contain no layer.
        """
        layers = range(layer + 1 if num_layers is None else num_layers)
        items = self.slices if num_layers is not None else [item for item in self.slices if not _is_from_the_end(item)]
        return any(layer in layers[start:stop] for start, stop in items)

    @property
    def counts_from_the_end(self) -> bool:
        """Whether an item counts from the last layer."""
        return any(map(_is_from_the_end, self.slices))


def _is_from_the_end(item: tuple[int | None, int | None]) -> bool:
    return any(bound is not None and bound < 0 for bound in item)


def _parse_item(item: str) -> tuple[int | None, int | None]:
    """The slice of one item of the text."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise PolicyError(
            f"{shown(item)} is not a valid layer range; write an index '5', a range '0-1' or a slice '-2:'"
        )
    index, first, last, start, stop = (int(digits) if digits is not None else None for digits in match.groups())
    if index is not None:
        return index, None if index == -1 else index + 1
    if first is not None and last is not None:
        start, stop = first, last + 1
    if start is not None and stop is not None and (start < 0) == (stop < 0) and start >= stop:
        raise PolicyError(f"{item!r} is empty: it ends before it starts")
    return start, stop
