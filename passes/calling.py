"""The contract between a rewritten graph and its caller: packed inputs and outputs, and their handling.

The graph's inputs keep their number and order. The caller passes packed data in the place of a plain cache. It wraps
outputs that hold packed data in packed caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.kernels.layout.axes import PartIndex, with_ranges
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout


@dataclass(frozen=True)
class PackedInput:
    """A graph input that is packed already.

    Attributes:
        layout: the layout of its packed data.
        axes: the order of its dimensions (:mod:`kvcompile.passes.graph.permutations`).
        growing: whether it grows by concatenation.
        is_cache: whether the caller can pass it as the packed data of a whole cache. False for other views of a cache.
        shard: the tokens that it holds, if several ranks hold the cache together.
    """

    layout: PackedLayout
    axes: str
    growing: bool
    is_cache: bool = True
    shard: ContextShard | None = None


@dataclass(frozen=True)
class StackInput:
    """A packed stack that the caller passes, with a record for each part.

    ``dims`` and ``num_ranges`` are as in :class:`SplitStack`.
    """

    dims: tuple[int, ...]
    parts: Mapping[PartIndex, GraphInput]
    num_ranges: int = 0


@dataclass(frozen=True)
class GraphInput:
    """One input of the ATen graph, as the caller knows it.

    A list of inputs, in the order of the graph's placeholders, is the only record of positions. The place in the list
    is the position in AOTAutograd's graph. The list also has the parts of each stack that is split.

    Attributes:
        source: Dynamo's name of the input, such as ``L['cache'].layers[0].keys``.
        dynamo_index: its position among the inputs of Dynamo's graph. None for a tensor that AOTAutograd took out of a
            tensor subclass, and for a part of a stack that was appended to the inputs.
        packed: the packed cache that the caller passes, if the passes may use its data.
        stack: the packed stack that the caller passes.
        arrives_packed: whether the caller passes a packed tensor of any kind.
        is_persistent: whether the plain tensor may be packed although the graph only reads it.
        is_static: whether its address is the same at every call.
    """

    source: str
    dynamo_index: int | None = None
    packed: PackedInput | None = None
    stack: StackInput | None = None
    arrives_packed: bool = False
    is_persistent: bool = False
    is_static: bool = False

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of a module."""
        return "._parameters[" in self.source


@dataclass(frozen=True)
class FirstPosition:
    """Computes the first position that a call writes, before the call runs.

    Attributes:
        positions: a graph that maps ``inputs`` to the positions of the new tokens (int64 [n] or [batch, n]) and to a
            bool tensor of the valid positions (None if all are valid).
        inputs: the inputs of the call that ``positions`` takes.
    """

    positions: GraphModule
    inputs: tuple[int, ...]

    def __call__(self, args: Sequence[Any], num_tokens: int) -> Tensor:
        """The first position, int64 [] or [batch]; 0 where the call writes nothing within ``num_tokens`` tokens."""
        positions, valid = self.positions(*(args[index] for index in self.inputs))
        is_written = positions < num_tokens if valid is None else (positions < num_tokens) & valid
        first = torch.where(is_written, positions, num_tokens).amin(-1) if positions.shape[-1] else positions.sum(-1)
        return torch.where(first < num_tokens, first, 0)

    def moved(self, place_of: Callable[[int], int]) -> FirstPosition:
        """The same computation for a caller whose input ``place_of(i)`` is input ``i`` of the graph."""
        return replace(self, inputs=tuple(place_of(index) for index in self.inputs))


@dataclass(frozen=True)
class InputAction:
    """The caller's duty for input ``index`` before the compiled graph runs.

    Attributes:
        index: position among the graph's inputs.
        kind: the kind of the cache. The caller passes packed data. For ``growing`` it first reserves room for
            ``new_tokens``. For ``functional`` it passes a copy, which becomes an output; its own cache does not change.
        layout: the layout of the packed cache.
        axes: the order of its dimensions (:mod:`kvcompile.passes.graph.permutations`).
        new_tokens: tokens that the graph appends, an int or SymInt.
        num_sequences: for ``growing`` and ``functional``, how often the only sequence of the caller's cache is
            repeated in the packed data, an int or SymInt; None if it is not repeated.
        outputs: for ``growing`` and ``functional``, the outputs that are the new cache.
        first_position: for ``static`` and ``functional``, the first position that the graph writes. None if it is not
            known before the graph runs.
        in_growing_buffer: whether the packed data of a ``static`` or ``read-only`` cache lies in a growing buffer,
            which has more blocks than its tokens need.
    """

    index: int
    kind: Literal["static", "functional", "growing", "read-only"]
    layout: PackedLayout
    axes: str
    new_tokens: int | torch.SymInt = 0
    num_sequences: int | torch.SymInt | None = None
    outputs: tuple[int, ...] = ()
    first_position: FirstPosition | None = None
    in_growing_buffer: bool = False

    @property
    def makes_cache(self) -> bool:
        """Whether the call makes a new cache from the caller's cache, which it neither changes nor adopts."""
        return self.kind in ("functional", "growing")

    @property
    def without_symbols(self) -> InputAction:
        """The same action without symbolic sizes, which belong to one compilation."""
        return replace(self, new_tokens=0, num_sequences=None)


@dataclass(frozen=True)
class OutputAction:
    """Output ``index`` of the compiled graph is packed data of a new cache.

    Attributes:
        index: position among the graph's outputs.
        growing: whether later calls may append to the cache.
        shape: logical shape, ints or SymInts.
        dtype: logical dtype.
        layout: the layout of the packed cache.
        axes: the order of its dimensions.
    """

    index: int
    growing: bool
    shape: tuple[int | torch.SymInt, ...]
    dtype: torch.dtype
    layout: PackedLayout
    axes: str


@dataclass(frozen=True)
class Rewritten:
    """The caller's duties for a rewritten graph, and its new inputs.

    Attributes:
        inputs: the duties for caches before the graph runs.
        outputs: the duties for caches that the graph returns.
        example_inputs: fake inputs of the rewritten graph.
        by_reference: whether packed data is passed as references (:mod:`kvcompile.kernels.layout.references`).
        buffered_inputs: the inputs that the graph changes in a buffer at a fixed address, which the caller copies back.
        stacks: the inputs that were split into parts. All other positions are counted after that split.
        adjacent: the inputs whose place a tensor with several parameters takes, each with the positions of these
            parameters in the order of memory (:mod:`kvcompile.call.adjacent_parameters`).
    """

    inputs: tuple[InputAction, ...]
    outputs: tuple[OutputAction, ...]
    example_inputs: list[Any]
    by_reference: bool = False
    buffered_inputs: tuple[int, ...] = ()
    stacks: tuple[SplitStack, ...] = ()
    adjacent: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        """Whether all packed inputs are on a GPU."""
        return all(self.example_inputs[action.index].is_cuda for action in self.inputs)


@dataclass(frozen=True)
class JoinedOutput:
    """A stack that was one output and became one output for each part.

    Attributes:
        index: the position of the stack among the outputs before the split.
        dims: its stacked dimensions.
        places: the position of each part among the outputs after the split. The first part takes the place of the
            stack, and the others are appended to the outputs.
        num_ranges: as in :class:`SplitStack`.
    """

    index: int
    dims: tuple[int, ...]
    places: Mapping[PartIndex, int]
    num_ranges: int = 0


@dataclass(frozen=True)
class SplitStack:
    """A stack that was one input and became one input for each part.

    Attributes:
        index: the position of the stack among the inputs before the split.
        dims: its stacked dimensions.
        places: the position among the inputs after the split, for each part that the graph uses. The first part
            takes the place of the stack, and the others are appended to the inputs.
        returned: the outputs that are later states of the stack.
        num_ranges: if the parts are ranges of channels, their number. The graph has a stacked dimension for them before
            the channels; the caller's tensor has one dimension for both. 0 if no dimension is shared.
    """

    index: int
    dims: tuple[int, ...]
    places: Mapping[PartIndex, int]
    returned: tuple[JoinedOutput, ...] = ()
    num_ranges: int = 0

    def view_of(self, x: torch.Tensor, part: PartIndex) -> torch.Tensor:
        """The view of part ``part`` of the plain tensor ``x``."""
        x = with_ranges(x, self.num_ranges)
        indices: dict[int, Any] = dict(zip(self.dims, part, strict=True))
        return x[tuple(indices.get(dim, slice(None)) for dim in range(x.dim()))]

    def name_of(self, source: str, part: PartIndex) -> str:
        """The name of a part of the tensor ``source``: ``kv[0]``, ``kv[:, 0]``, or ``kv.chunk(2, -1)[0]``."""
        if not self.num_ranges:
            return f"{source}[{_subscript(self.dims, part)}]"
        name = f"{source}.chunk({self.num_ranges}, -1)[{part[-1]}]"
        return f"{name}[{_subscript(self.dims[:-1], part[:-1])}]" if part[:-1] else name


def _subscript(dims: Sequence[int], part: Sequence[int]) -> str:
    indices = dict(zip(dims, map(str, part), strict=True))
    return ", ".join(indices.get(dim, ":") for dim in range(dims[-1] + 1))


def with_parts_of_stacks(inputs: Sequence[GraphInput], stacks: Sequence[SplitStack]) -> list[GraphInput]:
    """The record of a graph's inputs after stacks were split. :meth:`SplitStack.name_of` names the parts."""
    result: dict[int, GraphInput] = dict(enumerate(inputs))
    for split in stacks:
        whole = inputs[split.index]
        for part, place in split.places.items():
            own = whole.stack.parts[part] if whole.stack is not None else GraphInput("")
            result[place] = replace(
                own,
                source=split.name_of(whole.source, part),
                dynamo_index=whole.dynamo_index if place == split.index else None,
                is_persistent=whole.is_persistent,
                is_static=whole.is_static,
            )
    return [result[place] for place in sorted(result)]


def in_dynamo_order(
    inputs: Sequence[GraphInput], num_aten: int, num_dynamo: int, rewritten: Rewritten
) -> tuple[tuple[InputAction, ...], tuple[SplitStack, ...]]:
    """The actions and split stacks of ``rewritten``, with positions among Dynamo's inputs.

    Parts of stacks that were appended to the inputs are appended to Dynamo's inputs, too.

    Args:
        inputs: the record of the graph's inputs, after stacks were split.
        num_aten: number of inputs of the ATen graph before stacks were split.
        num_dynamo: number of inputs of Dynamo's graph.
        rewritten: the caller's duties, with positions among the graph's inputs.
    """

    def index_of(place: int) -> int:
        index = inputs[place].dynamo_index
        assert index is not None or place >= num_aten, "no cache is taken out of a tensor subclass"
        return index if index is not None else place - num_aten + num_dynamo

    def moved(first: FirstPosition | None) -> FirstPosition | None:
        is_known = first is not None and all(inputs[place].dynamo_index is not None for place in first.inputs)
        return first.moved(index_of) if first is not None and is_known else None

    return (
        tuple(
            replace(action, index=index_of(action.index), first_position=moved(action.first_position))
            for action in rewritten.inputs
        ),
        tuple(
            replace(
                stack,
                index=index_of(stack.index),
                places={part: index_of(place) for part, place in stack.places.items()},
            )
            for stack in rewritten.stacks
        ),
    )
