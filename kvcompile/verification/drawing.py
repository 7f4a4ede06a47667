"""Random inputs for a graph: floats, and integers and masks that the graph allows.

The weights of the model keep their values. All other floats are normally distributed, even in unwritten parts of
caches, so that a wrong read is detected. The graph does not say whether an integer is a position, a slot, a token id or
a length. :class:`kvcompile.verification.indexing.IndexCheck` knows the sizes that bound each of them, and rejects
integers that make an index out of bounds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.errors import one_line
from kvcompile.verification.indexing import IndexCheck, IndexingError
from kvcompile.verification.sizes import Sizes, Symbols

_TRIES = 80
_LOWER, _HIGHER = 0.5, 0.25
"""The powers of two by which a limit falls after a rejected draw, and rises after an accepted one."""

_UNBOUNDED = 4
"""The limit of integers that are neither indices nor compared with a size."""


class CannotDraw(Exception):
    """No valid inputs of the original graph were found; the message says why."""


@dataclass(frozen=True)
class KnownInput:
    """Facts about an input.

    Attributes:
        example: its value in the compiled call; None if it is not known.
        is_weight: whether it is a weight, which keeps this value.
        is_cache: whether it will be packed.
    """

    example: Any = None
    is_weight: bool = False
    is_cache: bool = False


class InputDraws:
    """Draws the inputs of one graph."""

    def __init__(self, gm: GraphModule, fakes: Sequence[Any], known: Sequence[KnownInput], sizes: Sizes, seed: int):
        """
        Args:
            gm: the original graph.
            fakes: its fake inputs.
            known: the facts about each input.
            sizes: its symbolic sizes.
            seed: the seed of all random numbers.
        """
        self._placeholders: list[Node] = list(gm.graph.find_nodes(op="placeholder"))
        self._fakes, self._known, self._sizes = fakes, known, sizes
        self._indices = IndexCheck(gm, sizes)
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._lowered: dict[Node, float] = {}

    def draw(self, symbols: Symbols, kept: Mapping[int, Any], as_given: bool = False) -> list[Any]:
        """The inputs of a step.

        Args:
            symbols: the sizes.
            kept: inputs that earlier steps have written, by position.
            as_given: whether to use the integers and masks of the compiled call, where they are known.

        Raises:
            CannotDraw: no valid integers were found.
        """
        floats = {
            place: kept[place] if place in kept else self._floats(place, symbols)
            for place, fake in enumerate(self._fakes)
            if place in kept or not _is_drawn_again(fake) or self._known[place].is_weight
        }
        error: IndexingError | None = None
        for attempt in range(_TRIES):
            given = as_given and attempt == 0
            values = [
                floats[place] if place in floats else self._integers(place, symbols, given)
                for place in range(len(self._fakes))
            ]
            try:
                self._indices.check(values, symbols, may_repeat=attempt > _TRIES // 2)
            except IndexingError as found:
                error = found
                if not found.repeats and not given:
                    self._lower(found.node)
                continue
            except RuntimeError as failed:  # the sizes are at fault; other integers would not help
                sizes = ", ".join(f"{symbol} = {size}" for symbol, size in symbols.items())
                raise CannotDraw(f"the original graph fails with {sizes}: {one_line(failed)}") from failed
            self._lowered = {source: max(0.0, by - _HIGHER) for source, by in self._lowered.items()}
            return values
        raise CannotDraw(str(error))

    def _lower(self, node: Node) -> None:
        """Lower the limit of a random input among the inputs that a rejected index depends on."""
        sources = sorted(self._indices.sources.get(node, ()), key=self._placeholders.index)
        if sources:
            source = self.rng.choice(sources)
            self._lowered[source] = self._lowered.get(source, 0.0) + _LOWER

    def _floats(self, place: int, symbols: Symbols) -> Any:
        """A size, a weight, or normally distributed numbers."""
        fake, known = self._fakes[place], self._known[place]
        if not isinstance(fake, Tensor):
            return self._sizes(fake, symbols) if isinstance(fake, (int, torch.SymInt)) else fake
        if known.is_weight and known.example is not None:
            return known.example
        shape = [self._sizes(size, symbols) for size in fake.shape]
        dtype = fake.dtype if fake.is_complex() else torch.float32
        numbers = torch.randn(shape, generator=self.generator, dtype=dtype).to(fake.device, fake.dtype)
        return numbers if known.is_cache else _with_strides(numbers, [self._sizes(s, symbols) for s in fake.stride()])

    def _integers(self, place: int, symbols: Symbols, as_given: bool) -> Tensor:
        fake, example = self._fakes[place], self._known[place].example
        shape = [self._sizes(size, symbols) for size in fake.shape]
        if as_given and isinstance(example, Tensor) and list(example.shape) == shape:
            return example.detach().clone()
        make = self._bools if fake.dtype == torch.bool else self._numbers
        drawn = make(self._placeholders[place], shape, symbols).to(fake.device, fake.dtype)
        return _with_strides(drawn, [self._sizes(size, symbols) for size in fake.stride()])

    def _bools(self, source: Node, shape: list[int], symbols: Symbols) -> Tensor:
        """A mask: all True, a triangle, or random with probability 1/2 (the first of each row is always True)."""
        kind = self.rng.choice(("all", "some", "some", "triangle"))
        mask = torch.ones(shape, dtype=torch.bool)
        if kind == "some":
            mask = torch.rand(shape, generator=self.generator) < 0.5
            if mask.dim():
                mask[..., :1] = True
        return mask.tril(self.rng.randrange(3)) if kind == "triangle" and mask.dim() > 1 else mask

    def _numbers(self, source: Node, shape: list[int], symbols: Symbols) -> Tensor:
        """Consecutive, distinct or arbitrary numbers below a limit."""
        largest = max(self._indices.limits_of(source, symbols), default=_UNBOUNDED)
        limit = max(1, int(largest / 2 ** self._lowered.get(source, 0.0)))
        count = shape[-1] if shape else 1
        rows = torch.Size(shape[:-1]).numel()
        kind = self.rng.choice(("run", "run", "own runs", "own runs", "distinct", "any"))
        total = rows * count
        if kind == "distinct" and total <= limit:
            return torch.randperm(limit, generator=self.generator)[:total].view(shape)
        if kind in ("run", "own runs") and count <= limit:
            starts = torch.tensor([self._start(limit - count) for _ in range(rows if kind == "own runs" else 1)])
            return (starts[:, None] + torch.arange(count)).expand(rows, count).reshape(shape)
        return torch.randint(limit, shape, generator=self.generator)

    def _start(self, largest: int) -> int:
        """A random number up to ``largest``, often a small one: faults show most with few visible tokens."""
        return min(int((largest + 1) ** self.rng.random()) - self.rng.randrange(2), largest) if largest > 0 else 0


def _is_drawn_again(fake: Any) -> bool:
    """Whether an input consists of integers or bools, which must be drawn together."""
    return isinstance(fake, Tensor) and not fake.is_floating_point() and not fake.is_complex()


def _with_strides(values: Tensor, strides: Sequence[int]) -> Tensor:
    """``values`` with ``strides``; contiguous if elements would share memory."""
    pairs = sorted((stride, size) for stride, size in zip(strides, values.shape, strict=True) if size > 1)
    reach = 1
    for stride, size in pairs:
        if stride < reach:
            return values.contiguous()
        reach = stride * (size - 1) + reach
    result = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    return result.copy_(values)
