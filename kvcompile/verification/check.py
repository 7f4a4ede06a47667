"""Run a rewritten graph and its original for some steps on the same random inputs, and find the sites that differ."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.compat.tensors import without_modes
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.calling import GraphInput
from kvcompile.passes.rewrite.caches import is_mutated
from kvcompile.verification.drawing import CannotDraw, InputDraws, KnownInput
from kvcompile.verification.flex import uses_blocks
from kvcompile.verification.pair import Fresh, Mismatch, Pair, State
from kvcompile.verification.sizes import Sizes, Symbols

ROUNDS = 3
"""Number of rounds. Each begins with new caches. The first has the sizes and integers of the compiled call."""

STEPS = 3
"""Steps of a round. Each step continues with the caches of the previous step."""

SEED = 20
"""The seed of all random numbers. A graph is always checked with the same inputs."""

VERIFY = "verify"
"""The name of the check among the times of the passes."""


@dataclass
class Verdict:
    """The result of a check.

    Attributes:
        steps: the number of steps that ran on both graphs.
        mismatches: the differences in the last step; empty if nothing differs.
        impossible: why no step could run; None if a step ran.
        inputs: a description of the inputs of the last step, a line each.
        pair: the two graphs.
        seconds: the time of the check.
    """

    pair: Pair
    steps: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    impossible: str | None = None
    inputs: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def wrong(self) -> dict[int, Mismatch]:
        """The sites that differ, each with its first mismatch; all sites if no mismatch belongs to a site."""
        found: dict[int, Mismatch] = {}
        of_sites = [mismatch for mismatch in self.mismatches if mismatch.sites]
        for mismatch in of_sites or self.mismatches:
            for site in mismatch.sites or self.pair.rewrite.accepted:
                found.setdefault(site, mismatch)
        return found


def verify(
    before: GraphModule, fresh: Fresh, inputs: Sequence[GraphInput], examples: Sequence[Any], seed: int = SEED
) -> Verdict:
    """Check the rewrite of a graph.

    Args:
        before: the functional graph with markers, before any pass.
        fresh: makes the state in which the pipeline starts, for a copy of ``before``.
        inputs: the record of the inputs of the graph.
        examples: the inputs of Dynamo's graph, to which ``inputs`` refer.
        seed: the seed of all random numbers.
    """
    begin = time.perf_counter()
    with _eager(before):
        verdict = Verdict(Pair(before, fresh))
        _Check(verdict, inputs, examples, seed).run()
    verdict.seconds = time.perf_counter() - begin
    return verdict


@contextmanager
def _eager(gm: GraphModule) -> Iterator[None]:
    """Inside the ``with`` block, operators run in eager mode. Afterwards, random number generators are restored."""
    values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    on_gpu = {value.device for value in values if isinstance(value, Tensor) and value.device.type == "cuda"}
    with torch.random.fork_rng(list(on_gpu)), torch.inference_mode(False), torch.no_grad():
        yield


class _Check:
    def __init__(self, verdict: Verdict, inputs: Sequence[GraphInput], examples: Sequence[Any], seed: int) -> None:
        self.verdict, self.pair = verdict, verdict.pair
        placeholders = self.pair.original.graph.find_nodes(op="placeholder")
        self.caches = set(self.pair.uses.inputs)
        self.changed = {place for place, node in enumerate(placeholders) if is_mutated(node)} | self.caches
        self.fakes, self.sizes = self.pair.fakes, Sizes(self.pair.fakes)
        self.known = [self._known(place, known, examples) for place, known in enumerate(inputs)]
        self.sources = [known.source for known in inputs]
        self.rng = random.Random(seed)
        self.draws = InputDraws(self.pair.original, self.fakes, self.known, self.sizes, seed)
        self.seed = seed
        self.keeps_integers = uses_blocks(self.pair.original.graph)

    def _known(self, place: int, known: GraphInput, examples: Sequence[Any]) -> KnownInput:
        example = examples[known.dynamo_index] if known.dynamo_index is not None else None
        is_plain = isinstance(example, Tensor) and not isinstance(example, PackedSubclass)
        if not is_plain or place in self.caches:
            return KnownInput(is_cache=place in self.caches)
        of_module = "_parameters" in known.source or "_buffers" in known.source
        return KnownInput(example, isinstance(example, nn.Parameter) or (of_module and place not in self.changed))

    def run(self) -> None:
        """Run rounds until something differs."""
        if communication := _communication(self.pair.original):
            self.verdict.impossible = f"the graph calls {communication}, which waits for other processes"
            return
        reason = ""
        for number in range(ROUNDS):
            as_given = number == 0 or self.keeps_integers
            symbols = self.sizes.hints if as_given else self.sizes.drawn(self.rng)
            try:
                with without_modes():
                    self._round(symbols, as_given)
            except CannotDraw as error:
                reason = reason or str(error)
            if self.verdict.mismatches:
                return
        if not self.verdict.steps:
            self.verdict.impossible = reason

    def _round(self, symbols: Symbols, as_given: bool) -> None:
        state = State.of(self.draws.draw(symbols, {}, as_given), self.changed)
        for step in range(STEPS):
            self.verdict.inputs = list(self._described(state.plain, symbols))
            results = self.pair.compare(state, self.seed + step, is_last=step == STEPS - 1)
            self.verdict.steps += 1
            self.verdict.mismatches = results.found
            if results.found or results.outputs is None or step == STEPS - 1:
                return
            state, symbols = self._next(state, results.outputs, symbols)

    def _next(self, state: State, outputs: State, symbols: Symbols) -> tuple[State, Symbols]:
        """The inputs and sizes of the next step: caches that this step wrote, and new random values for the rest."""
        new, grown = self._grown_sizes(outputs.plain, symbols), self.pair.uses.grown
        kept = self.changed - grown.keys()
        plain = {place: state.plain[place] for place in kept}
        if new is not None:
            plain |= {place: outputs.plain[output] for place, output in grown.items()}
        symbols = symbols if new is None else new
        values = self.draws.draw(symbols, plain, self.keeps_integers)
        result = State.of(values, self.changed - plain.keys())
        for after, old, output in zip(result.all(), state.all(), outputs.all(), strict=True):
            for place in plain:
                after[place] = old[place] if place in kept else output[grown[place]]
        return result, symbols

    def _grown_sizes(self, outputs: Sequence[Any], symbols: Symbols) -> Symbols | None:
        """The sizes for a step whose inputs are the grown caches; None if the graph was not traced for them."""
        new = dict(symbols)
        for place, output in self.pair.uses.grown.items():
            found = self.sizes.matching(self.fakes[place].shape, outputs[output].shape)
            if found is None:
                return None
            new |= found
        fit = all(
            [self.sizes(size, new) for size in self.fakes[place].shape] == list(outputs[output].shape)
            for place, output in self.pair.uses.grown.items()
        )
        return new if fit and self.sizes.allow(new) else None

    def _described(self, values: Sequence[Any], symbols: Symbols) -> Iterator[str]:
        """The inputs of a step for a dump: short tensors of integers in full, all other tensors by dtype and shape."""
        yield f"sizes: {', '.join(f'{symbol} = {value}' for symbol, value in symbols.items()) or 'constant'}"
        for place, (source, value) in enumerate(zip(self.sources, values, strict=True)):
            if not isinstance(value, Tensor):
                yield f"{place}: {source}: {value}"
                continue
            kind = f"{dtype_name(value.dtype)} {list(value.shape)}, strides {list(value.stride())}"
            is_short = not value.is_floating_point() and not value.is_complex() and value.numel() <= 4096
            role = "cache" if place in self.caches else "weight" if self.known[place].is_weight else "input"
            yield f"{place}: {source}: {role}, {kind}" + (f": {value.tolist()}" if is_short else "")


def _communication(gm: GraphModule) -> str | None:
    """The first operator of a graph that waits for other processes."""
    names = (str(node.target) for node in gm.graph.nodes if node.op == "call_function")
    return next((name for name in names if "c10d" in name or "symm_mem" in name), None)
