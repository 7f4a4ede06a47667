"""A tensor of several KV caches that is packed inside: one for keys and values, or one for all layers of a model.

``PackedStack`` looks like a plain tensor ``[*stack_shape, *shape of a cache]``. Each of its parts is a packed cache
with a format of its own, or a plain tensor. Who selects a part (``kv[0]``, ``cache[layer, 1]``, ``unbind``) is given a
view of that cache, so that all reads and writes of parts mean what they mean for a
:class:`~kvcompile.packed_tensor.PackedTensor`; :mod:`kvcompile.packed_stack_ops` says what is done to the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout import PackedLayout
from kvcompile.packed_pool import PackedPool, packed_of, slots_of
from kvcompile.packed_subclass import PackedSubclass
from kvcompile.packed_tensor import PackedTensor
from kvcompile.passes.read_stack import CACHE_RANK, PartIndex

PackedParts = Mapping[PartIndex, tuple[PackedLayout, int]]
"""The parts of a stack that are packed: how, and along which of their dimensions tokens are (0: they are pools).

A cache that is no stack is the only part of itself, ``()``."""


class PackedStack(PackedSubclass):
    """Several caches in one tensor, or a view of such.

    Attributes:
        parts: packed or plain caches of one shape, in row-major order of the stack dimensions.
        stack_shape: sizes of the stack dimensions, which are the first of this tensor.
    """

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor], size: Sequence[int]) -> PackedStack:
        """A stack of logical ``size`` of ``parts``, which it shares."""
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=parts[0].dtype, device=parts[0].device)

    def __init__(self, parts: Sequence[Tensor], size: Sequence[int]) -> None:
        self.stack_shape = tuple(map(int, size[: len(size) - parts[0].dim()]))
        if math.prod(self.stack_shape) != len(parts):
            raise ValueError(f"{len(parts)} parts do not make a stack of sizes {self.stack_shape}")
        for name, part in zip(self._names, parts, strict=True):
            self.__dict__[name] = part

    @classmethod
    def from_dense(cls, x: Tensor, packed: PackedParts) -> PackedStack:
        """Quantizes parts of a plain stack of caches or of pools of blocks; the others are copied."""
        stack_shape = x.shape[:-CACHE_RANK]
        parts = [
            packed_of(x[index], *packed[index]) if index in packed else x.detach()[index].clone()
            for index in itertools.product(*map(range, stack_shape))
        ]
        return cls(parts, x.shape)

    @property
    def _names(self) -> list[str]:
        return [f"part{number}" for number in range(math.prod(self.stack_shape))]

    @property
    def parts(self) -> list[Tensor]:
        return [self.__dict__[name] for name in self._names]

    @property
    def num_stack_dims(self) -> int:
        return len(self.stack_shape)

    def items(self) -> Iterable[tuple[PartIndex, Tensor]]:
        """Where each part is, and the part itself, not a view of it."""
        return zip(itertools.product(*map(range, self.stack_shape)), self.parts, strict=True)

    def dequantize(self) -> Tensor:
        values = [part.dequantize() if isinstance(part, PackedSubclass) else part for part in self.parts]
        return torch.stack(values).reshape(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        # Of what they are made is part of the context for Dynamo to guard on.
        caches = [slots_of(part) for part in self.parts]
        metas = tuple(cache.cache_meta if isinstance(cache, PackedTensor) else None for cache in caches)
        return self._names, (self.stack_shape, metas)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedStack:
        return PackedStack(list(inner.values()), size)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache of traced graphs must know of this input (it calls this)."""
        parts = [
            part._stable_hash_for_caching()
            if isinstance(part, (PackedTensor, PackedPool))
            else (part.shape, part.stride())
            for part in self.parts
        ]
        return str((self.stack_shape, self.dtype, self.device, parts))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from kvcompile.packed_stack_ops import dispatch_stack

        return dispatch_stack(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        parts = "\n".join(f"  {name}: {part!r}" for name, part in zip(self._names, self.parts, strict=True))
        return f"PackedStack(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}',\n{parts})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_packed_stack, (tuple(self.parts), tuple(self.shape))


def rebuild_packed_stack(parts: tuple[Tensor, ...], size: tuple[int, ...]) -> PackedStack:
    """What ``torch.load`` calls to make a saved stack again."""
    return PackedStack(parts, size)


torch.serialization.add_safe_globals([rebuild_packed_stack])
