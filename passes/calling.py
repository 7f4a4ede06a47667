"""The contract between a rewritten graph and its caller: which inputs and outputs are packed, and what to do with them.

The graph's inputs keep their number and order. The caller passes packed data where a plain cache was, and makes packed
caches of the outputs that hold packed data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvcompile.kernels.layout.axes import PartIndex
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
    """

    index: int
    kind: Literal["static", "growing", "read-only"]
    layout: PackedLayout
    axes: str
    new_tokens: int | torch.SymInt = 0
    outputs: tuple[int, ...] = ()


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
