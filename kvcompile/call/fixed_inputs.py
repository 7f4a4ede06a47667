"""State that a compiled graph keeps between calls: the caller's caches, and inputs at fixed addresses.

All steps of a request pass the same caches. Later steps recognise them and skip the checks of the first step.

A CUDA graph replays the addresses of its recording. References to packed caches, and buffers for inputs that the graph
changes, stay at their addresses while the caller may pass other tensors at every call. Inductor takes all of them as
static inputs, so it neither checks nor copies them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.tensors import copy_each
from kvcompile.kernels.layout.references import References
from kvcompile.packed.tensor import PackedTensor


class KnownCaches(threading.local):
    """Weak references to the caches of the last call in this thread."""

    def __init__(self) -> None:
        self._known: list[tuple[weakref.ref[Tensor], int]] = []

    def remember(self, caches: Sequence[Any], data: Sequence[Tensor]) -> None:
        """Recognise ``caches`` from now on, if the graph gets their own ``data`` (no copy) and the data cannot move."""
        pairs = zip(caches, data, strict=True)
        are_fixed = all(type(cache) is PackedTensor and cache.fixed_data is own for cache, own in pairs)
        self._known = [(weakref.ref(own), own.data_ptr()) for own in data] if are_fixed else []

    def data_of(self, caches: Sequence[Any]) -> list[Tensor] | None:
        """The packed data of ``caches`` if :meth:`remember` was last called for the same caches; otherwise None."""
        if not caches or len(caches) != len(self._known):
            return None
        result = []
        for cache, (known, address) in zip(caches, self._known, strict=True):
            data = cache.fixed_data if type(cache) is PackedTensor else None
            if data is None or data is not known() or data.data_ptr() != address:
                return None
            result.append(data)
        return result


class FixedInputs(threading.local):
    """The inputs of one compiled graph at fixed addresses, separate for each thread.

    Threads may call the same graph with different caches at the same time. CUDA graphs are recorded for each thread.
    """

    def __init__(self) -> None:
        self._references: References | None = None
        self._buffers: dict[tuple[torch.Size, ...], list[Tensor]] = {}
        self.referred: list[Tensor] = []
        """The result of the last call of :meth:`refer`."""

    def refer(self, data: list[Tensor]) -> list[Tensor]:
        """Make the references refer to packed ``data``, and return them.

        References do not keep the data alive. The caller's caches keep the data alive during a call. Kernels may
        still run after the call. If the data is freed before they end, the allocator reuses its memory in stream order.
        """
        if self._references is None:
            self._references = References(len(data), data[0].device)
        self.referred = self._references.refer(data)
        return self.referred

    def buffers_of(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Buffers that hold ``values``; values of the same shapes always get the same buffers."""
        shapes = tuple(value.shape for value in values)
        if shapes not in self._buffers:
            self._buffers[shapes] = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                for value in values
            ]
        buffers = self._buffers[shapes]
        copy_each(buffers, values)
        return buffers
