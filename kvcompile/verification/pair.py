"""An original graph and its rewrites, which must give the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.call.adoption import adopt
from kvcompile.call.packed_call import CallPlan, InputAdoption, PackedCall, adopt_all
from kvcompile.compat.graphs import copied_graph
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.marker import expand_markers
from kvcompile.passes.notes.roles import role_of
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import DECIDED, run
from kvcompile.verification.cache_uses import CacheUses
from kvcompile.verification.differences import difference, stored_difference
from kvcompile.verification.drawing import CannotDraw
from kvcompile.verification.taps import AtTap, Run, insert_taps

Fresh = Callable[[GraphModule], Packing]
"""Makes the state in which the pipeline starts, for a copy of the graph."""


@dataclass(frozen=True)
class Mismatch:
    """A difference between a rewritten graph and its original.

    Attributes:
        sites: the positions of the sites that may have caused it; empty if any site may be the cause.
        what: what differs.
        detail: how it differs.
    """

    sites: frozenset[int]
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.what}: {self.detail}"


class Rewrite:
    """A rewritten graph that runs node by node, with the work before and after each call.

    Attributes:
        packing: the rewrite.
        uses: the caches of the graph.
        accepted: the positions of the sites that are rewritten.
        lossy: the positions of accepted sites whose caches are in lossy formats.
    """

    def __init__(self, tapped: GraphModule, fresh: Fresh, is_lossless: bool) -> None:
        """
        Args:
            tapped: the functional graph with markers and taps; it is changed.
            fresh: makes the state of the pipeline for the graph.
            is_lossless: whether caches are stored in lossless formats in place of their own formats.
        """
        self.packing = fresh(tapped)
        fakes = list(self.packing.example_inputs)
        self.uses, self.lossy = CacheUses(), set[int]()
        for step in run(self.packing):
            if step is DECIDED:
                self.uses = CacheUses.of(self.packing)
                self.lossy = _store_without_loss(self.packing) if is_lossless else set()
        self.accepted = frozenset(site for site, one in enumerate(self.packing.candidates) if one.accepted)
        rewritten = self.packing.rewritten
        assert rewritten is not None, "the same passes have already rewritten the same graph"
        # Inputs are random, so tokens after a drawn position may have been written.
        self._adoption = InputAdoption(
            [replace(action, first_position=None) for action in rewritten.inputs], rewritten.stacks
        )
        self._in_growing_buffers = [action for action in rewritten.inputs if action.in_growing_buffer]
        self._call = PackedCall(self._run, CallPlan.of(rewritten, fakes))
        self._at_tap: AtTap = lambda x, site: x
        self._running: Run | None = None

    def _run(self, args: list[Any]) -> list[Any]:
        self._running = Run(self.packing.gm, self._at_tap)
        return self._running.outputs(args)

    def outputs(self, inputs: list[Any], at_tap: AtTap) -> list[Any] | Mismatch:
        """The outputs for ``inputs``, or the error that was raised. Plain caches in ``inputs`` are packed and changed.

        Raises:
            CannotDraw: the device has too little memory.
        """
        self._at_tap, self._running = at_tap, None
        try:
            self._pack_growing(inputs)
            adopt_all(self._adoption.plain_among(inputs))
            return self._call(list(inputs))
        except torch.OutOfMemoryError as error:
            raise CannotDraw(in_one_line(error)) from None
        except Exception as error:
            node = self._running.current if self._running is not None else None
            role = role_of(node) if node is not None else None
            sites = self.accepted.intersection(role.sites) if role is not None else frozenset[int]()
            return Mismatch(sites, "the rewritten graph raises", in_one_line(error))

    def _pack_growing(self, inputs: Sequence[Any]) -> None:
        """Pack plain caches that callers keep in growing buffers, with as many blocks as the graph expects."""
        for action in self._in_growing_buffers:
            is_part = action.index >= len(inputs)  # a part of a split stack
            if not is_part and not isinstance(inputs[action.index], PackedSubclass):
                adopt(inputs[action.index], action.layout, action.axes, growing=True)


@dataclass
class State:
    """The inputs of a step for each graph, which changes only its own inputs.

    Attributes:
        plain: the inputs of the original graph.
        packed: the inputs of the rewritten graph in lossless formats.
        own: the inputs of the rewritten graph in its own formats.
    """

    plain: list[Any]
    packed: list[Any]
    own: list[Any]

    @classmethod
    def of(cls, values: Sequence[Any], changed: set[int]) -> State:
        """Inputs of equal values. Inputs that a graph may change are copied."""

        def copies() -> list[Any]:
            return [
                value.clone() if place in changed and isinstance(value, Tensor) else value
                for place, value in enumerate(values)
            ]

        return cls(copies(), copies(), copies())

    def all(self) -> tuple[list[Any], list[Any], list[Any]]:
        return self.plain, self.packed, self.own


@dataclass
class Results:
    """The results of a step.

    Attributes:
        found: the differences.
        outputs: the outputs of each graph, as in :class:`State`; None after an error.
    """

    found: list[Mismatch] = field(default_factory=list)
    outputs: State | None = None


class Pair:
    """The original graph, its rewrite in lossless formats, and its rewrite in its own formats.

    Attributes:
        original: the graph that plain Inductor would compile, with taps.
        rewrite: the rewrite in lossless formats, which must give the same results.
        own: the rewrite in its own formats, whose caches must hold the same values, quantized.
        fakes: the fake inputs of the original.
    """

    def __init__(self, before: GraphModule, fresh: Fresh) -> None:
        """
        Args:
            before: the functional graph with markers.
            fresh: makes the state of the pipeline for a copy of ``before``.
        """
        tapped = copied_graph(before)
        insert_taps(tapped.graph)
        self.original = copied_graph(tapped)
        expand_markers(self.original.graph)
        self.original.graph.eliminate_dead_code()
        self.original.recompile()
        self.rewrite = Rewrite(copied_graph(tapped), fresh, is_lossless=True)
        self.own = Rewrite(tapped, fresh, is_lossless=False)
        self.fakes = list(fresh(before).example_inputs)

    @property
    def uses(self) -> CacheUses:
        """The caches of the rewritten graph."""
        return self.rewrite.uses

    def compare(self, state: State, seed: int, is_last: bool) -> Results:
        """Run all graphs for a step, each on its own inputs.

        Args:
            state: the inputs, which the graphs change.
            seed: the seed of random numbers within the graphs.
            is_last: whether to also compare the caches in their own formats, which takes as long as packing them.

        Raises:
            CannotDraw: the original graph does not accept these inputs.
        """
        results: dict[int, Tensor] = {}
        found: list[Mismatch] = []

        def record(x: Tensor, site: int) -> Tensor:
            results[site] = x
            return x

        def compare(x: Tensor, site: int) -> Tensor:
            self._note(found, "the result of attention", {site}, x, results[site])
            return results[site]

        torch.manual_seed(seed)
        try:
            plain = Run(self.original, record).outputs(state.plain)
        except Exception as error:
            raise CannotDraw(f"the original graph raises {in_one_line(error)}") from None
        torch.manual_seed(seed)
        packed = self.rewrite.outputs(state.packed, compare)
        torch.manual_seed(seed)
        own = self.own.outputs(state.own, lambda x, site: results[site])
        for result in (packed, own):
            if isinstance(result, Mismatch):
                return Results([*found, result])
        assert not isinstance(packed, Mismatch)
        assert not isinstance(own, Mismatch)
        outputs = State(plain, packed, own)
        compare_cache = partial(self._compare_cache, found, is_last)
        for place in sorted(self.uses.inputs.keys() - self.uses.grown.keys()):
            compare_cache(f"the cache {self._name(place)}", self.uses.inputs[place], state, place)
        for place in range(len(plain)):
            if place in self.uses.outputs:
                compare_cache(f"the cache that is output {place}", self.uses.outputs[place], outputs, place)
            elif place not in self.uses.dropped:
                self._note(found, f"output {place}", set(), packed[place], plain[place])
        for place, (value, expected) in enumerate(zip(state.packed, state.plain, strict=True)):
            # A call changes no cache from which it makes a new one.
            if (place not in self.uses.inputs or place in self.uses.grown) and value is not expected:
                self._note(found, f"the state {self._name(place)}", set(), value, expected)
        return Results(found, outputs)

    def _compare_cache(
        self, found: list[Mismatch], is_last: bool, what: str, sites: set[int], values: State, place: int
    ) -> None:
        plain, packed, own = (each[place] for each in values.all())
        self._note(found, what, sites, packed, plain)
        if is_last and (detail := stored_difference(own, plain)) is not None:
            found.append(Mismatch(self.rewrite.accepted & sites, f"{what} in its own format", detail))

    def _note(self, found: list[Mismatch], what: str, sites: set[int], value: Any, expected: Any) -> None:
        value = value.dequantize() if isinstance(value, PackedSubclass) else value
        lossy = self.rewrite.lossy
        detail = difference(value, expected, bool(lossy & sites if sites else lossy))
        if detail is not None:
            found.append(Mismatch(self.rewrite.accepted & sites, what, detail))

    def _name(self, place: int) -> str:
        return self.rewrite.packing.inputs[place].source or f"that is input {place}"


def _store_without_loss(packing: Packing) -> set[int]:
    """Give the caches of accepted sites lossless formats; returns the sites for which there is no lossless format."""
    lossy = set()
    for site, candidate in enumerate(packing.candidates):
        for cache in candidate.caches if candidate.accepted else ():
            layout = without_loss(candidate.layouts[cache.role], cache.dtype)
            if layout.unsupported(cache.dtype) is not None:  # latents, which have special formats
                lossy.add(site)
            else:
                candidate.layouts[cache.role] = layout
    return lossy


def without_loss(layout: PackedLayout, dtype: torch.dtype) -> PackedLayout:
    """``layout``, including exact blocks, in the format that stores numbers of ``dtype`` exactly."""
    return replace(layout, format_name=dtype_name(dtype))


def in_one_line(error: Exception) -> str:
    """The class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
