"""The contract between a rewritten graph and its caller: which inputs and outputs are packed, and what to do with them.

The graph's inputs keep their number and order. The caller passes packed data where a plain cache was, and makes packed
caches of the outputs that hold packed data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule

from kvcompile.kernels.layout.axes import BLOCK_AXES, PartIndex
from kvcompile.kernels.layout.packed_layout import PackedLayout


@dataclass(frozen=True)
class PackedInput:
    """A graph input that is packed already.

    Attributes:
        layout: of its packed data.
        axes: the order of its dimensions (:mod:`kvcompile.passes.graph.permutations`).
        growing: whether it grows by concatenation.
        is_cache: whether its caller can pass the data of a cache; not if it is a view of other parts of one.
    """

    layout: PackedLayout
    axes: str
    growing: bool
    is_cache: bool = True

    @property
    def is_pool_of_blocks(self) -> bool:
        """Whether it is a pool of blocks, not a cache or a pool of slots."""
        return self.axes in BLOCK_AXES

    @property
    def heads_first(self) -> bool:
        """Whether the blocks of a pool hold heads before tokens."""
        return BLOCK_AXES.index(self.axes) == 1


@dataclass(frozen=True)
class StackInput:
    """A packed stack that the caller passes: its stacked dimensions, and each part as an input of its own."""

    dims: tuple[int, ...]
    parts: Mapping[PartIndex, GraphInput]


@dataclass(frozen=True)
class GraphInput:
    """One input of the ATen graph, as the caller knows it.

    A list of these in the order of the graph's placeholders is the one record of positions: Dynamo's is an attribute,
    AOTAutograd's is the place in the list, and splitting a stack puts its parts in the list.

    Attributes:
        source: what the user calls it.
        dynamo_index: its position among the inputs of Dynamo's graph; None for a tensor that AOTAutograd took out of a
            tensor subclass, and for a part that stands behind all inputs.
        packed: the packed cache that the caller passes, if passes may use its data.
        stack: the packed stack that the caller passes.
        arrives_packed: whether the caller passes a packed tensor of any kind.
        is_persistent: whether an object of the caller holds the plain tensor, as a cache holds its keys.
        is_static: whether its address is the same at every call.
    """

    source: str
    dynamo_index: int | None = None
    packed: PackedInput | None = None
    stack: StackInput | None = None
    arrives_packed: bool = False
    is_persistent: bool = False
    is_static: bool = False


@dataclass(frozen=True)
class FirstPosition:
    """The first position that a call writes, from the inputs of the call.

    Attributes:
        positions: from the inputs, where tokens go (int64 [n] or [batch, n]) and which of them are valid (bool, or
            None for all).
        inputs: which inputs of the graph it takes.
    """

    positions: GraphModule
    inputs: tuple[int, ...]

    def __call__(self, args: Sequence[Any], num_tokens: int) -> Tensor:
        """int64 [] or [batch]; 0 where nothing is written within ``num_tokens`` tokens."""
        positions, valid = self.positions(*(args[index] for index in self.inputs))
        is_written = positions < num_tokens if valid is None else (positions < num_tokens) & valid
        first = torch.where(is_written, positions, num_tokens).amin(-1) if positions.shape[-1] else positions.sum(-1)
        return torch.where(first < num_tokens, first, 0)

    def moved(self, place_of: Callable[[int], int]) -> FirstPosition:
        """The same where input ``i`` of the graph is input ``place_of(i)``."""
        return replace(self, inputs=tuple(place_of(index) for index in self.inputs))


@dataclass(frozen=True)
class InputAction:
    """What the caller does with input ``index`` before the compiled graph runs.

    Attributes:
        index: position among the graph's inputs.
        kind: ``static`` and ``read-only`` pass packed data; ``growing`` first reserves ``new_tokens``.
        layout: of the packed cache.
        axes: the order of its dimensions (:mod:`kvcompile.passes.graph.permutations`).
        new_tokens: tokens that the graph appends, an int or SymInt.
        outputs: for ``growing``, the outputs that receive the longer cache.
        first_position: for ``static``, where the graph writes first; None if that is not known before it runs.
    """

    index: int
    kind: Literal["static", "growing", "read-only"]
    layout: PackedLayout
    axes: str
    new_tokens: int | torch.SymInt = 0
    outputs: tuple[int, ...] = ()
    first_position: FirstPosition | None = None


@dataclass(frozen=True)
class OutputAction:
    """Output ``index`` of the compiled graph is packed data of a new cache.

    Attributes:
        index: position among the graph's outputs.
        growing: whether the cache may be concatenated to later.
        shape: logical shape, ints or SymInts.
        dtype: logical dtype.
        layout: of the packed cache.
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
        inputs: what to do with caches before the graph runs.
        outputs: what to do with caches that it returns.
        example_inputs: fake inputs of the rewritten graph.
        by_reference: whether packed data is passed as references.
        returned_inputs: the inputs into which the last outputs of the graph are to be copied, in their order.
        stacks: the inputs that were split into parts before; all other positions are those after.
    """

    inputs: tuple[InputAction, ...]
    outputs: tuple[OutputAction, ...]
    example_inputs: list[Any]
    by_reference: bool = False
    returned_inputs: tuple[int, ...] = ()
    stacks: tuple[SplitStack, ...] = ()

    @property
    def on_cuda(self) -> bool:
        """Whether the caches that it is given are on a GPU."""
        return all(self.example_inputs[action.index].is_cuda for action in self.inputs)


@dataclass(frozen=True)
class JoinedOutput:
    """An output that is a stack, and became several.

    Attributes:
        index: its position among the outputs before.
        dims: its stacked dimensions.
        places: positions of its parts among the outputs after: the first part takes the place of the stack, the others
            come behind all outputs that were there.
    """

    index: int
    dims: tuple[int, ...]
    places: Mapping[PartIndex, int]


@dataclass(frozen=True)
class SplitStack:
    """An input that became several.

    Attributes:
        index: its position among the inputs before.
        dims: its stacked dimensions.
        places: positions of the parts that the graph uses among the inputs after: the first part takes the place of
            the stack, the others come behind all inputs that were there.
        returned: the outputs that are later states of it.
    """

    index: int
    dims: tuple[int, ...]
    places: Mapping[PartIndex, int]
    returned: tuple[JoinedOutput, ...] = ()

    def view_of(self, x: torch.Tensor, part: PartIndex) -> torch.Tensor:
        """A part of a plain tensor."""
        indices: dict[int, Any] = dict(zip(self.dims, part, strict=True))
        return x[tuple(indices.get(dim, slice(None)) for dim in range(x.dim()))]


def with_parts_of_stacks(inputs: Sequence[GraphInput], stacks: Sequence[SplitStack]) -> list[GraphInput]:
    """The record of a graph's inputs after stacks were split; a part is called ``kv[0]`` or ``kv[:, 0]``."""
    result: dict[int, GraphInput] = dict(enumerate(inputs))
    for split in stacks:
        whole = inputs[split.index]
        for part, place in split.places.items():
            own = whole.stack.parts[part] if whole.stack is not None else GraphInput("")
            result[place] = replace(
                own,
                source=f"{whole.source}[{_subscript(split.dims, part)}]",
                dynamo_index=whole.dynamo_index if place == split.index else None,
                is_persistent=whole.is_persistent,
                is_static=whole.is_static,
            )
    return [result[place] for place in sorted(result)]


def _subscript(dims: tuple[int, ...], part: PartIndex) -> str:
    indices = dict(zip(dims, map(str, part), strict=True))
    return ", ".join(indices.get(dim, ":") for dim in range(dims[-1] + 1))


def in_dynamo_order(
    inputs: Sequence[GraphInput], num_aten: int, num_dynamo: int, rewritten: Rewritten
) -> tuple[tuple[InputAction, ...], tuple[SplitStack, ...]]:
    """Actions and split stacks of ``rewritten`` with the positions of Dynamo's inputs.

    Parts of stacks that stand behind all inputs stand behind all of Dynamo's inputs, too.

    Args:
        inputs: the record of the graph's inputs, after stacks were split.
        num_aten: inputs of the ATen graph before that.
        num_dynamo: inputs of Dynamo's graph.
        rewritten: what the caller has to do.
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
