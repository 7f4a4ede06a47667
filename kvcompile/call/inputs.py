"""The record of a graph's inputs, and the tensors that carry packed caches through AOTAutograd.

AOTAutograd unwraps tensor subclasses, such as distributed or quantized weights. The graph gets the inner tensors,
followed by their symbolic sizes, so the positions of all later inputs shift. Packed caches are not unwrapped:
AOTAutograd sees a plain tensor in their place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from kvcompile.call.read_only import may_pack
from kvcompile.compat.tensors import is_traceable_wrapper_subclass
from kvcompile.compat.tracing import FakeTensor
from kvcompile.kernels.layout.axes import BLOCK_AXES, WHOLE_AXES
from kvcompile.packed.pool import PackedPool, slots_of
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.calling import GraphInput, InputAction, PackedInput, StackInput


class Concealed(torch.Tensor):
    """An empty tensor that carries a packed cache through AOTAutograd's wrapper.

    The wrapper unwraps every tensor that has ``__tensor_flatten__``; this class has none. It is a tensor because the
    wrapper counts the writes to its inputs.
    """

    cache: PackedSubclass

    @classmethod
    def of(cls, cache: PackedSubclass) -> Concealed:
        concealed = torch.empty(0).as_subclass(cls)
        concealed.cache = cache
        return concealed


def revealed(values: Iterable[Any]) -> list[Any]:
    """``values``, with each concealed cache replaced by the cache itself."""
    return [value.cache if isinstance(value, Concealed) else value for value in values]


def graph_inputs(gm: GraphModule, example_inputs: Sequence[Any], sources: Sequence[str]) -> list[GraphInput]:
    """The record of the inputs of the ATen graph that AOTAutograd makes from Dynamo's graph ``gm``.

    Args:
        gm: Dynamo's graph, or a copy.
        example_inputs: its inputs.
        sources: Dynamo's names of its inputs, which a copy of the graph lacks.
    """
    records: list[GraphInput] = []
    inputs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, sources, strict=True)
    for index, (node, value, source) in enumerate(inputs):
        fake = None if isinstance(value, PackedSubclass) else node.meta["example_value"]
        if is_traceable_wrapper_subclass(fake):
            records += [GraphInput(source)] * _num_parts(fake)
        else:
            records.append(graph_input(value, source, index))
    return records


def graph_input(value: Any, source: str, dynamo_index: int | None = None) -> GraphInput:
    """The record of one input. ``value`` is a packed cache, or not a tensor subclass that AOTAutograd unwraps."""
    if not isinstance(value, PackedSubclass):
        return GraphInput(source, dynamo_index, is_persistent=may_pack(value, source))
    if isinstance(value, PackedStack):
        parts = {part: graph_input(own, "") for part, own in value.items()}
        stack = StackInput(value.stacked_dims, parts, value.num_ranges)
        return GraphInput(source, dynamo_index, stack=stack, arrives_packed=True)
    return GraphInput(source, dynamo_index, packed=packed_input(value), arrives_packed=True)


def packed_input(value: PackedSubclass) -> PackedInput | None:
    """The packed cache that passes may use; None for a view that lacks an axis of a cache."""
    cache = value.local if isinstance(value, PackedShard) else slots_of(value)
    if not isinstance(cache, PackedTensor) or cache.axes not in WHOLE_AXES:
        return None
    axes = BLOCK_AXES[value.heads_first] if isinstance(value, PackedPool) else cache.axes
    shard = value.shard if isinstance(value, PackedShard) else None
    is_cache = cache.is_whole or cache.can_be_copied_whole
    return PackedInput(cache.packed_layout, axes, cache.growing, is_cache, shard)


def holds_bytes_of(found: PackedInput, action: InputAction) -> bool:
    """Whether a packed input holds the bytes that the compiled code reads, in their format and order."""
    fits_buffer = action.makes_cache or found.growing == action.in_growing_buffer
    return found.is_cache and fits_buffer and (found.layout, found.axes) == (action.layout, action.axes)


def mismatch(inputs: Sequence[GraphInput], before: Sequence[Any], after: Sequence[Any]) -> str | None:
    """How the inputs of the ATen graph differ from their record; None if they agree.

    Args:
        inputs: the record.
        before: the inputs of Dynamo's graph.
        after: the fake inputs of the ATen graph.
    """
    if len(after) != len(inputs):
        return f"{len(inputs)} became {len(after)}"
    for place, (known, now) in enumerate(zip(inputs, after, strict=True)):
        if known.dynamo_index is None:
            continue
        then = before[known.dynamo_index]
        if isinstance(then, torch.Tensor) != isinstance(now, FakeTensor):
            return f"input {place} changed its kind"
        if isinstance(then, torch.Tensor) and (then.dim() != now.dim() or then.dtype != now.dtype):
            return f"input {place} changed its shape or dtype"
    return None


def _num_parts(value: Any) -> int:
    """The number of ATen inputs for one input: its symbols and inner tensors, which may be subclasses themselves."""
    if not is_traceable_wrapper_subclass(value):
        return 1
    parts, _ = value.__tensor_flatten__()
    symbols = sum(isinstance(size, torch.SymInt) for size in (*value.size(), *value.stride()))
    return sum(_num_parts(getattr(value, part)) for part in parts) + symbols
