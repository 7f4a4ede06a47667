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

from kvcompile.packed_tensor import PackedTensor
from kvcompile.passes.rewrite_caches import InputAction

T = TypeVar("T")


class Concealed(torch.Tensor):
    """A packed cache on its way through AOTAutograd's wrapper, which takes apart every tensor that has a
    ``__tensor_flatten__``; an empty tensor without one, because the wrapper counts the writes of its inputs."""

    cache: PackedTensor

    @classmethod
    def of(cls, cache: PackedTensor) -> Concealed:
        concealed = torch.empty(0).as_subclass(cls)
        concealed.cache = cache
        return concealed


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
        self.has_subclasses = len(self._places) < len(inputs)

    def in_aten(self, by_index: Mapping[int, T]) -> dict[int, T]:
        """What is known by position among Dynamo's inputs, by position in the ATen graph; subclasses are left out."""
        return {self._places[index]: value for index, value in by_index.items() if index in self._places}

    def in_dynamo(self, actions: Iterable[InputAction]) -> tuple[InputAction, ...]:
        """Actions on inputs of the ATen graph, as actions on those of Dynamo's."""
        indices = {place: index for index, place in self._places.items()}
        return tuple(replace(action, index=indices[action.index]) for action in actions)


def _num_parts(value: Any) -> int:
    """How many inputs AOTAutograd makes of one: the parts of subclasses, which may be such themselves, and symbols."""
    if not is_traceable_wrapper_subclass(value):
        return 1
    parts, _ = value.__tensor_flatten__()
    symbols = sum(isinstance(size, torch.SymInt) for size in (*value.size(), *value.stride()))
    return sum(_num_parts(getattr(value, part)) for part in parts) + symbols
