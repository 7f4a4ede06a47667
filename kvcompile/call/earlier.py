"""Compilations whose first call packs plain caches. The compilation for the packed caches finds their code.

Dynamo guards on the class of a cache. If the first call packs a plain cache, Dynamo compiles the function again for the
second call. The code of the first compilation runs on packed caches, too. The second compilation therefore asks
AOTAutograd's cache for it, with the digest of the first compilation (:mod:`kvcompile.call.digest`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.call.packed_call import Parts, adopted_by_input
from kvcompile.kernels.layout.axes import PartIndex
from kvcompile.passes.calling import GraphInput, InputAction, PackedInput, SplitStack

Sizes = tuple[tuple[tuple[int, ...], torch.dtype] | int | None, ...]
"""Shapes and dtypes of the inputs of Dynamo's graph, and its integers; None for other inputs."""


@dataclass(frozen=True)
class Compilation:
    """A compilation of this process.

    Attributes:
        digest: the digest of its graph.
        inputs: the record of its inputs.
        sizes: the sizes of its inputs.
        caches: the caches that a call must pack; positions count Dynamo's inputs.
        stacks: the inputs that a call splits; positions count Dynamo's inputs.
    """

    digest: str
    inputs: list[GraphInput]
    sizes: Sizes
    caches: tuple[InputAction, ...]
    stacks: tuple[SplitStack, ...]


_recent: deque[Compilation] = deque(maxlen=64)


def remember(compilation: Compilation) -> None:
    """Let later compilations find ``compilation``."""
    _recent.append(compilation)


def earlier_digest(
    inputs: list[GraphInput], sizes: Sizes, digest_with: Callable[[list[GraphInput]], str | None]
) -> str | None:
    """The digest of the latest compilation whose calls pack caches to ``inputs``; None if there is no such compilation.

    Args:
        inputs: the record of the inputs of a graph.
        sizes: the sizes of its inputs.
        digest_with: takes another record; returns the digest that the graph would have with it.
    """
    for earlier in reversed(tuple(_recent)):
        if (
            earlier.sizes == sizes
            and earlier.inputs != inputs
            and _are_packed_by(earlier, inputs)
            and digest_with(earlier.inputs) == earlier.digest
        ):
            return earlier.digest
    return None


def sizes_of(example_inputs: Sequence[Any]) -> Sizes | None:
    """The sizes of the inputs of Dynamo's graph; None if a size is symbolic."""
    sizes = tuple(_size_of(value) for value in example_inputs)
    numbers = [number for size in sizes for number in (size[0] if isinstance(size, tuple) else (size,))]
    return None if any(isinstance(number, torch.SymInt) for number in numbers) else sizes


def _size_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return value if isinstance(value, int | torch.SymInt) else None


def _are_packed_by(earlier: Compilation, inputs: Sequence[GraphInput]) -> bool:
    """Whether a call of an earlier compilation packs caches so that the next call passes ``inputs``."""
    adopted = adopted_by_input(earlier.caches, earlier.stacks)
    stacks = {stack.index: (stack.dims, stack.num_ranges) for stack in earlier.stacks}

    def becomes(before: GraphInput, now: GraphInput) -> bool:
        index = before.dynamo_index
        if before == now:
            return True
        if index is None or before.arrives_packed or (index, before.source) != (now.dynamo_index, now.source):
            return False
        parts = adopted.get(index, {})
        if index not in stacks:
            return _is_packed(now, parts.get(()))
        stack = now.stack
        if stack is None or (stack.dims, stack.num_ranges) != stacks[index]:
            return False
        return _are_packed(stack.parts, parts)

    return len(inputs) == len(earlier.inputs) and all(map(becomes, earlier.inputs, inputs))


def _is_packed(now: GraphInput, action: InputAction | None) -> bool:
    return action is not None and now.packed == PackedInput(action.layout, action.axes, growing=False)


def _are_packed(parts: Mapping[PartIndex, GraphInput], actions: Parts) -> bool:
    """Whether exactly the parts of a stack are packed that have an action."""
    return all(
        _is_packed(own, actions.get(part)) if own.arrives_packed else part not in actions for part, own in parts.items()
    )
