"""Parameters that a compiled graph takes as one tensor, which holds them one after another.

The first call moves the parameters into this tensor. Their objects, names and values stay, and their old memory is
freed, so the model has no second copy of its weights. Each parameter gets a storage of its own, which covers a part of
the tensor. PyTorch saves such a parameter alone, and a distributed parameter must keep the offset in its storage: its
DTensor has a copy of that number.

A parameter is only moved if nothing else uses its memory: writes through another tensor, or by another process, would
no longer change the parameter. If parameters that cannot be moved replace others later, each call copies them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvcompile.compat.tensors import num_users
from kvcompile.report import report


@dataclass(frozen=True)
class Adjacent:
    """Parameters that were moved into one tensor.

    Attributes:
        whole: the tensor; its first dimension is the sum of the first dimensions of the parameters.
        parameters: references to the parameters, in the order of memory.
    """

    whole: Tensor
    parameters: tuple[weakref.ref[Tensor], ...]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ``whole`` holds the memory of ``tensors``, in this order."""
        return self.is_of(tensors) and _addresses(self.whole, tensors) == [tensor.data_ptr() for tensor in tensors]

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        known = [parameter() for parameter in self.parameters]
        return len(known) == len(tensors) and all(a is b for a, b in zip(known, tensors, strict=True))

    @property
    def is_complete(self) -> bool:
        """Whether all its parameters are alive."""
        return all(parameter() is not None for parameter in self.parameters)


_adjacent: Any = WeakTensorKeyDictionary()
"""The :class:`Adjacent` of every parameter that was moved."""

_moving = threading.RLock()


def adjacent_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The tensor that holds ``tensors`` one after another; None if there is none."""
    known = _adjacent.get(tensors[0])
    return known.whole if known is not None and known.holds(tensors) else None


def why_not_adjacent(tensors: Sequence[Any]) -> str | None:
    """Why ``tensors`` are not adjacent and cannot be moved; None if they are or can be."""
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.is_contiguous() for tensor in tensors):
        return "they are not all contiguous plain tensors"
    if any(tensor.is_inference() for tensor in tensors):
        return "some were made in inference mode; load the model outside of torch.inference_mode()"
    if any(not tensor.is_cuda and tensor.is_shared() for tensor in tensors):
        return "some lie in memory that other processes may share"
    if any(tensor.untyped_storage().nbytes() > tensor.nbytes for tensor in tensors):
        return "some are parts of larger tensors; replace them by clones"
    known = [_adjacent[tensor] for tensor in tensors if tensor in _adjacent]
    if any(other.is_complete and not other.is_of(tensors) for other in known):
        return "another compiled graph merges them with other projections"
    if adjacent_of(tensors) is None and any(num_users(tensor) > 1 for tensor in tensors):
        return "another tensor uses their memory, such as the tensors of a state_dict() that is still referenced"
    return None


def move_together(tensors: Sequence[Tensor]) -> Tensor:
    """Move ``tensors`` of the same trailing sizes into one new tensor, which is returned."""
    whole = _joined(tensors)
    adjacent = Adjacent(whole, tuple(map(weakref.ref, tensors)))
    with torch.inference_mode(False), torch.no_grad():
        for tensor, part in zip(tensors, whole.split([len(tensor) for tensor in tensors]), strict=True):
            tensor.data = torch.from_dlpack(part.detach())  # on a storage of its own
            _adjacent[tensor] = adjacent
    return whole


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of ``tensors``, one after another."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.cat([tensor.detach() for tensor in tensors])


def _addresses(whole: Tensor, tensors: Sequence[Tensor]) -> list[int]:
    """The addresses of ``tensors`` in ``whole``."""
    address, result = whole.data_ptr(), []
    for tensor in tensors:
        result.append(address)
        address += tensor.nbytes
    return result


_Known: TypeAlias = tuple[list[int], dict[int, weakref.ref[Tensor]]]
"""The addresses of all parameters at the last call that moved some, and the tensors that hold them."""


class AdjacentParameters:
    """The parameters that one compiled graph takes as tensors which hold several."""

    def __init__(self, groups: Mapping[int, tuple[int, ...]]) -> None:
        """Takes the inputs whose place such a tensor takes, each with the positions of its parameters."""
        self._groups = groups
        self._places = [place for group in groups.values() for place in group]
        self._known: _Known = [], {}
        self._copies: dict[int, Tensor] = {}
        self._noted: set[str] = set()

    def put(self, args: list[Any]) -> None:
        """Replace parameters among the inputs of a call by the tensors that hold them.

        If all parameters have the addresses of an earlier call, they lie in the same tensors.
        """
        addresses, known = self._known  # read at once: another thread may replace it
        wholes = {first: whole() for first, whole in known.items()}
        if addresses != self._addresses(args) or any(whole is None for whole in wholes.values()):
            with _moving:
                wholes = self._moved(args)
        for first, whole in wholes.items():
            args[first] = whole

    def _moved(self, args: Sequence[Any]) -> dict[int, Tensor | None]:
        """The tensor of each group, after parameters were moved or copied."""
        wholes: dict[int, Tensor | None] = {}
        copies: dict[int, Tensor] = {}
        for first, group in self._groups.items():
            tensors = [args[place] for place in group]
            reason = why_not_adjacent(tensors)
            if reason is None:
                whole = adjacent_of(tensors)
                wholes[first] = move_together(tensors) if whole is None else whole
            else:
                wholes[first] = copies[first] = self._copy(first, tensors, reason)
        self._copies = copies
        known = {first: weakref.ref(whole) for first, whole in wholes.items() if whole is not None}
        self._known = [] if copies else self._addresses(args), known
        return wholes

    def _addresses(self, args: Sequence[Any]) -> list[int]:
        return [args[place].data_ptr() for place in self._places]

    def _copy(self, first: int, tensors: Sequence[Tensor], reason: str) -> Tensor:
        """A copy of a group, at the same address at every call."""
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        text = f"each call copies the merged projections of the shapes {shapes}: {reason}"
        report.note(text, logs=text not in self._noted)
        self._noted.add(text)
        if first not in self._copies:
            return _joined(tensors)
        with torch.no_grad():
            return torch.cat([tensor.detach() for tensor in tensors], out=self._copies[first])
