"""Packed inputs of one call that share memory.

The compiler assumes that a write to one input never changes another input. AOTAutograd ensures this for plain tensors,
but it does not see the memory of packed tensors, nor that of the plain parts of a packed stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from kvcompile.compat.tensors import storage_id
from kvcompile.errors import AliasedCacheError
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.pool import slots_of
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor


def check_distinct(written: Iterable[Tensor], read: Iterable[Tensor]) -> None:
    """Raises AliasedCacheError if an input in ``written`` shares memory with another input of either list.

    This runs at every call. In nearly all calls every cache has its own storage, and the check ends early.
    """
    parts = [part for cache in written for part in _parts_of(cache)]
    num_written = len(parts)
    if not parts:
        return
    parts += [part for cache in read for part in _parts_of(cache)]
    storages = {_data_of(part).untyped_storage().data_ptr() for part in parts}
    if len(storages) == len(parts):
        return
    for part in parts[:num_written]:
        if isinstance(part, PackedTensor):
            part.packed_for_write()  # moves a growing cache to its own memory if another cache shares it
    for one, other in _meeting([_addresses(_data_of(part)) for part in parts]):
        if min(one, other) < num_written and _overlap(parts[one], parts[other]):
            raise AliasedCacheError(
                "two caches that this compiled graph takes share their storage (one is a view of the other, or both "
                "are views of a third), and the graph writes one of them; pass the whole cache only and slice it "
                "inside the compiled function, or pass a clone() of one of them"
            )


@dataclass(frozen=True)
class PlainInputs:
    """The inputs of a compiled graph in which a stack has plain parts. All positions are counted after the split.

    Attributes:
        parts: the positions of the plain parts.
        mutated: the positions of all inputs, other than packed caches, that the graph changes.
    """

    parts: tuple[int, ...]
    mutated: frozenset[int]

    def check(self, args: Sequence[Any]) -> None:
        """Raise AliasedCacheError if a plain part shares memory with another input, and the graph changes one of them.

        AOTAutograd does not see this memory, because it sees a packed stack as one tensor.
        """
        parts = [args[place] for place in self.parts]
        storages = _storages(parts)
        others = [
            (place, x)
            for place, arg in enumerate(args)
            if place not in self.parts
            for x in _plain_parts_of(arg)
            if x.untyped_storage().data_ptr() in storages
        ]
        changed = [args[place] for place in self.parts if place in self.mutated]
        kept = [args[place] for place in self.parts if place not in self.mutated]
        check_distinct(changed, [*kept, *(x for _, x in others)])
        check_distinct([x for place, x in others if place in self.mutated], parts)


def shares_plain_part(args: Sequence[Any]) -> bool:
    """Whether a plain part of a packed stack may share memory with another argument."""
    taken = _storages(part for x in args if not isinstance(x, PackedStack) for part in _plain_parts_of(x))
    for stack in (x for x in args if isinstance(x, PackedStack)):
        own = _storages(_plain_parts_of(stack))
        if taken & own:
            return True
        taken |= own
    return False


def _plain_parts_of(x: Any) -> list[Tensor]:
    """The plain tensors among the parts of a stack, or ``x`` itself if it is a plain tensor."""
    parts = x.parts if isinstance(x, PackedStack) else [x]
    return [part for part in parts if isinstance(part, Tensor) and not isinstance(part, PackedSubclass)]


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the storages of plain tensors. Tensors without elements share nothing."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()}


def _parts_of(cache: Tensor) -> Sequence[Tensor]:
    """The packed caches and plain tensors that make up an input."""
    if isinstance(cache, PackedTensor):
        return (cache,)
    if isinstance(cache, PackedShard):
        return (cache.local,)
    if isinstance(cache, LiveView):
        return _parts_of(cache.source)
    return [slots_of(part) for part in (cache.parts if isinstance(cache, PackedStack) else [cache])]


def _data_of(part: Tensor) -> Tensor:
    return part.packed if isinstance(part, PackedTensor) else part


def _addresses(data: Tensor) -> range:
    """The addresses from the first to the last byte of ``data``, including any gaps."""
    begin = data.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride(), strict=True))
    return range(begin, begin + (last + 1) * data.element_size() if data.numel() else begin)


def _meeting(ranges: Sequence[range]) -> Iterator[tuple[int, int]]:
    """The pairs of positions whose ranges overlap."""
    order = sorted(range(len(ranges)), key=lambda place: ranges[place].start)
    for rank, one in enumerate(order):
        for other in islice(order, rank + 1, None):
            if ranges[other].start >= ranges[one].stop:
                break
            yield one, other


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two parts whose address ranges overlap may share an element."""
    data, other_data = _data_of(one), _data_of(other)
    same_storage = storage_id(data) == storage_id(other_data)
    if not (same_storage and data.stride() == other_data.stride() and _is_box(one) and _is_box(other)):
        return True
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(_box(one), _box(other), strict=True))


def _box(part: Tensor) -> list[range]:
    """A range of indices for each dimension: the box that a part covers.

    The indices refer to a tensor that has the strides of the part and fills its whole storage. Boxes tell whether two
    views of one tensor overlap, also for slices along several dimensions. The first dimension of packed data counts
    tokens, not blocks, because two views may share a block. With a residual, every view includes the header of the
    cache.
    """
    data, ranges = _data_of(part), []
    offset = int(data.storage_offset())
    for size, stride in zip(data.shape, data.stride(), strict=True):
        begin, offset = divmod(offset, max(stride, 1))
        ranges.append(range(begin, begin + size))
    if isinstance(part, PackedTensor) and part.packed_layout.residual is None:
        begin = ranges[0].start * BLOCK_TOKENS + part.start
        ranges[0] = range(begin, begin + part.num_tokens)
    return ranges


def _is_box(part: Tensor) -> bool:
    """Whether :func:`_box` is exact: no range runs over into the next index of the previous dimension."""
    strides = _data_of(part).stride()
    reach = [along.stop * stride for along, stride in zip(_box(part), strides, strict=True)]
    return all(inner <= outer for inner, outer in zip(reach[1:], strides, strict=False))
