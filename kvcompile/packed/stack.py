"""A packed tensor of several KV caches, such as the keys and values of a layer, or the caches of all layers.

``PackedStack`` looks like a plain tensor with the dimensions of a cache and additional *stacked* dimensions. Each part
is a packed cache with its own format, or a plain tensor. A selected part (``kv[0]``, ``cache[layer, 1]``, ``kv[:, 0]``,
``unbind``) is a view of its cache, and is read and written like any :class:`~kvcompile.packed.tensor.PackedTensor`.
:mod:`kvcompile.packed.stack_ops` defines operators on the whole stack. :class:`PackedRanges` is a stack whose last
stacked dimension shares a dimension with the channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.dimension_marks import mark_weakly_dynamic, pass_marks_on
from kvcompile.compat.tensors import new_wrapper
from kvcompile.kernels.layout.axes import CACHE_RANK, PartIndex, with_ranges, without_ranges
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool, packed_of, slots_of
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.tracing import is_traced

PackedParts = Mapping[PartIndex, tuple[PackedLayout, str]]
"""Maps the index of each packed part of a stack to its layout and the order of its dimensions.

A single cache, which has no stacked dimensions, has the index ``()``."""


class PackedStack(PackedSubclass):
    """Several caches in one tensor, or a view of such a tensor.

    Attributes:
        parts: packed or plain caches of one shape, in row-major order of the stacked dimensions.
        stacked_dims: the dimensions of this tensor that the parts lack, in ascending order.
        stack_shape: the sizes of the stacked dimensions.
        num_ranges: how many parts share the last dimension of this tensor; 0 if it holds the channels of one part.
    """

    num_ranges = 0

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], size: Sequence[int], stacked_dims: Sequence[int] | None = None
    ) -> PackedStack:
        """A stack of logical ``size`` that shares ``parts``. By default the first dimensions are stacked."""
        return new_wrapper(cls, size, dtype=parts[0].dtype, device=parts[0].device)

    def __init__(self, parts: Sequence[Tensor], size: Sequence[int], stacked_dims: Sequence[int] | None = None) -> None:
        self.stacked_dims = tuple(range(len(size) - parts[0].dim()) if stacked_dims is None else stacked_dims)
        self.stack_shape = tuple(int(size[dim]) for dim in self.stacked_dims)
        if math.prod(self.stack_shape) != len(parts):
            raise ValueError(f"{len(parts)} parts do not make a stack of sizes {self.stack_shape}")
        for name, part in zip(self._names, parts, strict=True):
            self.__dict__[name] = part
        growing = next((part for part in parts if isinstance(part, PackedTensor) and part.growing), None)
        if growing is not None and "t" in growing.axes:
            mark_weakly_dynamic(self, self.dims_of_parts[growing.token_dim])

    @classmethod
    def from_dense(
        cls,
        x: Tensor,
        packed: PackedParts,
        stacked_dims: Sequence[int] | None = None,
        num_written: Mapping[PartIndex, Tensor] | None = None,
    ) -> PackedStack:
        """Quantizes the parts of a plain stack that ``packed`` names, and copies the others to contiguous memory.

        Args:
            x: the stack, of any float dtype. A part is a cache, in any order of dimensions, or a pool of blocks.
            packed: the layout and the order of dimensions of each part to quantize, by its index.
            stacked_dims: the dimensions along which the parts lie; by default all but the last four.
            num_written: as in :meth:`PackedTensor.from_dense`, for each part whose number is known.

        Raises:
            ValueError: a part cannot have its layout.
        """
        dims = tuple(range(x.dim() - CACHE_RANK) if stacked_dims is None else stacked_dims)
        known = num_written or {}
        places = itertools.product(*(range(x.shape[dim]) for dim in dims))
        parts = [
            packed_of(part, *packed[place], num_written=known.get(place))
            if place in packed
            else part.clone(memory_format=torch.contiguous_format)
            for place, part in zip(places, unstacked(x.detach(), dims), strict=True)
        ]
        return cls(parts, x.shape, dims)

    @classmethod
    def of_parts(cls, parts: Sequence[Tensor], stack_shape: Sequence[int], stacked_dims: Sequence[int]) -> PackedStack:
        """The stack of ``parts``, with additional dimensions ``stacked_dims`` of sizes ``stack_shape``."""
        size = list(parts[0].shape)
        for dim, extent in zip(stacked_dims, stack_shape, strict=True):
            size.insert(dim, extent)
        return cls(parts, size, stacked_dims)

    @property
    def _names(self) -> list[str]:
        return [f"part{number}" for number in range(math.prod(self.stack_shape))]

    @property
    def parts(self) -> list[Tensor]:
        return [self.__dict__[name] for name in self._names]

    @property
    def dims_of_parts(self) -> list[int]:
        """The dimensions of this tensor that are dimensions of the parts, in ascending order."""
        return [dim for dim in range(self.dim()) if dim not in self.stacked_dims]

    def dim_of_part(self, dim: int) -> int:
        """The dimension of the parts that corresponds to dimension ``dim``, which must not be stacked."""
        return dim - sum(stacked < dim for stacked in self.stacked_dims)

    def items(self) -> Iterable[tuple[PartIndex, Tensor]]:
        """Pairs of an index and the part with that index (the part itself, not a view)."""
        return zip(itertools.product(*map(range, self.stack_shape)), self.parts, strict=True)

    @property
    def data_is_traced(self) -> bool:
        return any(part.data_is_traced if isinstance(part, PackedSubclass) else is_traced(part) for part in self.parts)

    @property
    def divided(self) -> PackedStack:
        """The same parts as a stack whose last dimension holds the channels of one part. Both share their bytes."""
        return self

    def unstacked(self, x: Tensor) -> list[Tensor]:
        """Views of the parts of ``x``, a plain tensor of this shape, in the order of ``parts``."""
        return unstacked(with_ranges(x, self.num_ranges), self.stacked_dims)

    def dequantize(self) -> Tensor:
        values = [part.dequantize() if isinstance(part, PackedSubclass) else part for part in self.parts]
        return without_ranges(stacked(values, self.stack_shape, self.stacked_dims), self.num_ranges)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # Dynamo guards on the context, so it says how each part is packed.
        caches = [slots_of(part) for part in self.parts]
        metas = tuple(cache.cache_meta if isinstance(cache, PackedTensor) else None for cache in caches)
        for part in self.parts:
            pass_marks_on(self, part, {dim: self.dim_of_part(dim) for dim in self.dims_of_parts})
        return self._names, (self.stacked_dims, metas)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedStack:
        own = [extent for dim, extent in enumerate(size) if dim not in context[0]]
        parts = [part.of_size(own) if isinstance(part, (PackedTensor, PackedPool)) else part for part in inner.values()]
        return PackedStack(parts, size, context[0])

    def _stable_hash_for_caching(self) -> str:
        """The key of this input in AOTAutograd's cache of traced graphs. AOTAutograd calls this method."""
        parts = [
            part._stable_hash_for_caching()
            if isinstance(part, (PackedTensor, PackedPool))
            else (part.shape, part.stride())
            for part in self.parts
        ]
        return str((self.stack_shape, self.stacked_dims, self.num_ranges, self.dtype, self.device, parts))

    def __repr__(self) -> str:  # type: ignore[override]
        parts = "\n".join(f"  {name}: {part!r}" for name, part in zip(self._names, self.parts, strict=True))
        kind = type(self).__name__
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}',\n{parts})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_packed_stack, (tuple(self.parts), tuple(self.shape), self.stacked_dims)


class PackedRanges(PackedStack):
    """A stack whose last dimension holds ranges of channels, one for each part: [..., num_ranges * channels].

    Every class method and function takes the shape of :attr:`divided`, [..., num_ranges, channels].
    """

    @staticmethod
    def __new__(
        cls, parts: Sequence[Tensor], size: Sequence[int], stacked_dims: Sequence[int] | None = None
    ) -> PackedRanges:
        merged = (*size[:-2], size[-2] * size[-1])
        return new_wrapper(cls, merged, dtype=parts[0].dtype, device=parts[0].device)

    @property
    def num_ranges(self) -> int:  # type: ignore[override]
        return self.stack_shape[-1]

    @property
    def divided(self) -> PackedStack:
        return PackedStack.of_parts(self.parts, self.stack_shape, self.stacked_dims)

    @staticmethod
    def of(stack: PackedStack) -> PackedRanges:
        """The inverse of :attr:`divided`.

        Raises:
            ValueError: the last stacked dimension is not the one before the last.
        """
        if stack.stacked_dims[-1:] != (stack.dim() - 2,):
            size = list(stack.shape)
            raise ValueError(f"dimensions {stack.stacked_dims} of a stack {size} are not ranges of channels")
        return PackedRanges(stack.parts, stack.shape, stack.stacked_dims)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedRanges:
        num_ranges = len(inner) // math.prod(size[dim] for dim in context[0][:-1])
        divided = (*size[:-1], num_ranges, size[-1] // num_ranges)
        return PackedRanges.of(PackedStack.__tensor_unflatten__(inner, context, divided, stride))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_packed_ranges, (tuple(self.parts), tuple(self.divided.shape), self.stacked_dims)


def unstacked(x: Tensor, stacked_dims: Sequence[int]) -> list[Tensor]:
    """Views of the parts of a plain tensor, in row-major order of its stacked dimensions."""
    first = range(len(stacked_dims))
    parts = [x.movedim(tuple(stacked_dims), tuple(first))]
    for _ in first:
        parts = [view for part in parts for view in part.unbind()]
    return parts


def stacked(parts: Sequence[Tensor], stack_shape: Sequence[int], stacked_dims: Sequence[int]) -> Tensor:
    """The contiguous tensor with these parts. This is the inverse of :func:`unstacked`."""
    x = torch.stack(list(parts)).reshape(*stack_shape, *parts[0].shape)
    return x.movedim(tuple(range(len(stack_shape))), tuple(stacked_dims)).contiguous()


def rebuild_packed_stack(
    parts: tuple[Tensor, ...], size: tuple[int, ...], stacked_dims: tuple[int, ...] | None = None
) -> PackedStack:
    """Rebuilds a saved stack. ``torch.load`` calls this function."""
    return PackedStack(parts, size, stacked_dims)


def rebuild_packed_ranges(
    parts: tuple[Tensor, ...], size: tuple[int, ...], stacked_dims: tuple[int, ...]
) -> PackedRanges:
    """Rebuilds a saved stack of ranges. ``torch.load`` calls this function."""
    return PackedRanges.of(PackedStack(parts, size, stacked_dims))


torch.serialization.add_safe_globals([rebuild_packed_stack, rebuild_packed_ranges])
