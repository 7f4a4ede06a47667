"""Where each input of Dynamo's graph is among the inputs of the ATen graph.

AOTAutograd hands a tensor subclass, such as a distributed or a quantized weight, to the graph as the tensors that it
holds, and its symbolic sizes behind them; all inputs after it move on. Packed caches are no subclass there: AOTAutograd
sees a plain tensor in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.calling import InputAction, SplitStack

T = TypeVar("T")


class Concealed(torch.Tensor):
    """A packed cache on its way through AOTAutograd's wrapper, which takes apart every tensor that has a
    ``__tensor_flatten__``; an empty tensor without one, because the wrapper counts the writes of its inputs."""

    cache: PackedSubclass

    @classmethod
    def of(cls, cache: PackedSubclass) -> Concealed:
        concealed = torch.empty(0).as_subclass(cls)
        concealed.cache = cache
        return concealed


def revealed(values: Iterable[Any]) -> list[Any]:
    """``values``, of concealed caches the caches."""
    return [value.cache if isinstance(value, Concealed) else value for value in values]


class InputPlaces:
    """Translates positions of plain inputs and caches between Dynamo's graph and the ATen graph.

    Attributes:
        count: how many inputs the ATen graph has.
        has_subclasses: whether an input is a tensor subclass that AOTAutograd takes apart.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        """``inputs``: the fake inputs of Dynamo's graph, with anything but a subclass in the place of packed caches."""
        self._places: dict[int, int] = {}
        self.count = 0
        for index, value in enumerate(inputs):
            if not is_traceable_wrapper_subclass(value):
                self._places[index] = self.count
            self.count += _num_parts(value)
        self._num_dynamo = len(inputs)
        self.has_subclasses = len(self._places) < len(inputs)

    def in_aten(self, by_index: Mapping[int, T]) -> dict[int, T]:
        """What is known by position among Dynamo's inputs, by position in the ATen graph; subclasses are left out."""
        return {self._places[index]: value for index, value in by_index.items() if index in self._places}

    def in_dynamo(
        self, actions: Iterable[InputAction], stacks: Iterable[SplitStack]
    ) -> tuple[tuple[InputAction, ...], tuple[SplitStack, ...]]:
        """Actions on inputs of the ATen graph and the stacks that were split there, as those of Dynamo's graph.

        What stands behind all inputs, parts of stacks, stands behind all of them there, too.
        """
        indices = {place: index for index, place in self._places.items()}

        def index_of(place: int) -> int:
            return indices[place] if place < self.count else place - self.count + self._num_dynamo

        return (
            tuple(replace(action, index=index_of(action.index)) for action in actions),
            tuple(
                replace(
                    stack,
                    index=index_of(stack.index),
                    places={part: index_of(place) for part, place in stack.places.items()},
                )
                for stack in stacks
            ),
        )


def _num_parts(value: Any) -> int:
    """How many inputs AOTAutograd makes of one: the parts of subclasses, which may be such themselves, and symbols."""
    if not is_traceable_wrapper_subclass(value):
        return 1
    parts, _ = value.__tensor_flatten__()
    symbols = sum(isinstance(size, torch.SymInt) for size in (*value.size(), *value.stride()))
    return sum(_num_parts(getattr(value, part)) for part in parts) + symbols
