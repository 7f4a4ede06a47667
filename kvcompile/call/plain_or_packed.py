"""One compilation serves a plain cache and the packed cache that replaces it, or the reverse.

Dynamo guards on the class of a tensor. The first call packs a plain cache of the caller, or unpacks a packed one. For
the second call Dynamo would compile the function again. The code runs on both: on a cache that the call has to swap,
and on the cache after the swap. The guard of such a cache is therefore widened.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from kvcompile.call.inputs import graph_input, holds_bytes_of
from kvcompile.call.packed_call import Parts, adopted_by_input
from kvcompile.compat.dimension_marks import read_by_guards
from kvcompile.compat.guards import Check, widen_tensor_guards
from kvcompile.kernels.layout.axes import PartIndex
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.packed.cache_meta import CacheMeta
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.view_geometry import memory_order
from kvcompile.passes.calling import GraphInput, InputAction, SplitStack


def admit_packed_caches(
    placeholders: Sequence[Node],
    example_inputs: Sequence[Any],
    caches: Sequence[InputAction],
    stacks: Sequence[SplitStack],
    shard: ContextShard | None = None,
) -> None:
    """Let the code that is being compiled run with the caches that its calls pack.

    Args:
        placeholders: the inputs of Dynamo's graph.
        example_inputs: their values.
        caches, stacks, shard: as for :class:`~kvcompile.call.packed_call.AdoptingCall`.
    """
    split = {stack.index: stack for stack in stacks}
    wideners = {
        placeholders[index]: PlainOrPacked(example_inputs[index], parts, split.get(index), shard).widened
        for index, parts in adopted_by_input(caches, stacks).items()
        if not isinstance(example_inputs[index], PackedSubclass)
    }
    widen_tensor_guards(wideners, "a plain cache, or the same cache after packing")


def admit_unpacked_caches(placeholders: Sequence[Node], unpacked: Sequence[int]) -> None:
    """Let the code that is being compiled run with the caches that its calls unpack.

    Args:
        placeholders: the inputs of Dynamo's graph.
        unpacked: the positions of packed caches among them.
    """
    wideners = {}
    for index in unpacked:
        cache: PackedTensor = placeholders[index].meta["example_value"]  # its sizes may be symbols
        how = InputAction(index, "static", cache.packed_layout, cache.axes)
        wideners[placeholders[index]] = PlainOrPacked(cache, {(): how}).widened
    widen_tensor_guards(wideners, "a packed cache, or the same cache after unpacking")


class PlainOrPacked:
    """The values that an input of a compiled function may have: a plain cache, or the same cache packed."""

    def __init__(
        self, example: Any, parts: Parts, stack: SplitStack | None = None, shard: ContextShard | None = None
    ) -> None:
        """
        Args:
            example: the cache of the compilation, a real or a fake tensor, or a packed cache.
            parts: the parts of the cache that a call packs, or has packed earlier.
            stack: how a call splits the cache; None if it is not split.
            shard: the tokens of a packed cache that this process keeps.
        """
        self._dtype, self._device = example.dtype, example.device
        self._sizes = [size if isinstance(size, int) else None for size in example.shape]
        self._parts, self._stack, self._shard = parts, stack, shard
        self._order = memory_order(example)
        self._meta: CacheMeta | None = None
        self._shape: Any = None
        self._stride: Any = None

    def widened(self, is_same_plain: Check) -> Check:
        """A check that admits what ``is_same_plain`` admits, and packed caches. It runs at every call."""
        device = self._device

        @read_by_guards
        def check(value: Any) -> bool:
            if type(value) is PackedTensor and value.cache_meta is self._meta and value.shape == self._shape:
                is_whole = value.packed.is_contiguous() and value.stride() == self._stride
                return is_whole and value.device == device and not value.requires_grad
            return self.admits(value) if isinstance(value, PackedSubclass) else is_same_plain(value)

        return check

    @read_by_guards
    def admits(self, cache: PackedSubclass) -> bool:
        """Whether ``cache`` has the bytes, the sizes and the dtype that a call gives to the plain cache."""
        sizes = zip(self._sizes, cache.shape, strict=False)
        if cache.dim() != len(self._sizes) or any(size is not None and size != own for size, own in sizes):
            return False
        if cache.dtype != self._dtype or cache.device != self._device or cache.requires_grad:
            return False
        is_as_packed = self._has_strides_of_plain(cache) and self._is_packed_by_call(graph_input(cache, ""))
        if is_as_packed and type(cache) is PackedTensor:
            self._meta, self._shape, self._stride = cache.cache_meta, cache.shape, cache.stride()
        return is_as_packed

    def _has_strides_of_plain(self, cache: PackedSubclass) -> bool:
        """Whether a cache has its dimensions in the order of the plain cache, without gaps.

        With other strides ``reshape`` may copy where it was a view, so that a traced write would not reach the cache. A
        slice of tokens has other strides.
        """
        step = 1
        for dim in reversed(self._order):
            if cache.shape[dim] != 1:
                if cache.stride(dim) != step:
                    return False
                step *= cache.shape[dim]
        return True

    def _is_packed_by_call(self, now: GraphInput) -> bool:
        """Whether the packed parts of an input are exactly the parts that a call packs."""
        if self._stack is None:
            return self._is_packed(now, ())
        stack = now.stack
        if stack is None or (stack.dims, stack.num_ranges) != (self._stack.dims, self._stack.num_ranges):
            return False
        return all(
            self._is_packed(own, part) if own.arrives_packed else part not in self._parts
            for part, own in stack.parts.items()
        )

    def _is_packed(self, now: GraphInput, part: PartIndex) -> bool:
        action, found = self._parts.get(part), now.packed
        if action is None or found is None:
            return False
        return holds_bytes_of(found, action) and found.shard == self._shard
