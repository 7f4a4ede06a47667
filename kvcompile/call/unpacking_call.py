"""Calls of a compiled graph that moves the tokens of packed caches whose formats cannot move tokens.

A sliding window is packed while it fills. When it is full, a step moves its tokens, and its graph takes plain values.
If the window stayed packed, every step would quantize all its tokens again, and the error would grow. The first step
that moves them therefore unpacks the window, once, for every holder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvcompile.call.adoption import AdoptionError, unpack
from kvcompile.call.leftovers import Leftovers
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.graph.names import in_words
from kvcompile.report import report
from kvcompile.report.data import enumerate_modules


class UnpackingCall:
    """The compiled function that Dynamo calls: unpacks some packed caches, then runs the graph.

    The code was compiled for plain inputs that share no memory, and may write them in place. The swap comes first and
    gives each cache memory of its own, so the code finds what it was compiled for, and its writes reach the cache. A
    CUDA graph finds the plain tensor at one address in all steps, until another request packs the cache again.
    """

    def __init__(
        self, compiled: Callable[..., Any], caches: Mapping[int, str], while_packed: Callable[..., Any] | None = None
    ) -> None:
        """
        Args:
            compiled: the compiled graph.
            caches: the inputs that must be unpacked, with their sources.
            while_packed: runs calls in which one of them must stay packed; by default the compiled graph, too.
        """
        self._compiled = compiled
        self._caches = caches
        self._while_packed = while_packed if while_packed is not None else compiled
        self._leftovers = Leftovers()
        self._noted: set[str] = set()

    def __call__(self, *args: Any) -> Any:
        if not self._packed_among(args):
            return self._compiled(*args)
        self._unpack(args)
        return (self._while_packed if self._packed_among(args) else self._compiled)(*args)

    def _packed_among(self, args: tuple[Any, ...]) -> list[int]:
        return [index for index in self._caches if isinstance(args[index], PackedSubclass)]

    def _unpack(self, args: tuple[Any, ...]) -> None:
        """Unpack each cache for itself: the graph takes plain values of those that stay packed."""
        unpacked = []
        for index in self._packed_among(args):
            source = in_words(self._caches[index]) or self._caches[index]
            cache = args[index]
            try:
                self._leftovers.retry([cache], partial(unpack, cache))
                unpacked.append(source)
            except AdoptionError as error:
                self._note(f"every step that moves the tokens of {source} quantizes all of them again: {error}")
        if unpacked:
            names = enumerate_modules(unpacked)
            self._note(
                f"{names} became plain caches: a step moves the tokens of a window, and its format cannot move them"
            )

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            report.note(text)
