"""A packed pool of blocks: the tensor [num_blocks, block_size, num_kv_heads, head_dim] of a paged KV cache.

Its slots, block after block, are the tokens of one packed sequence (:class:`~kvcompile.packed_tensor.PackedTensor`),
whatever ``block_size`` is: blocks of the packed data hold another number of tokens. Who views the pool as
[num_slots, num_kv_heads, head_dim] is given those slots. :mod:`kvcompile.packed_pool_ops` says what is done to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout import PackedLayout
from kvcompile.packed_subclass import PackedSubclass
from kvcompile.packed_tensor import PackedTensor


class PackedPool(PackedSubclass):
    """A packed pool of blocks, or a view of some of its blocks.

    Attributes:
        slots: its slots, [num_slots, num_kv_heads, head_dim].
    """

    slots: PackedTensor

    @staticmethod
    def __new__(cls, slots: PackedTensor, size: Sequence[int]) -> PackedPool:
        """A pool of logical ``size`` over ``slots``, which it shares."""
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=slots.dtype, device=slots.device)

    def __init__(self, slots: PackedTensor, size: Sequence[int]) -> None:
        self.slots = slots

    @classmethod
    def from_dense(cls, x: Tensor, layout: PackedLayout) -> PackedPool:
        """Quantizes a plain pool [num_blocks, block_size, num_kv_heads, head_dim]."""
        return cls(PackedTensor.from_dense(x.flatten(0, 1), layout, 0), x.shape)

    @classmethod
    def zeros(
        cls, shape: Sequence[int], dtype: torch.dtype, layout: PackedLayout, device: torch.device | str | None = None
    ) -> PackedPool:
        """A pool of zeros of logical ``shape``."""
        num_blocks, block_size, *vector_shape = shape
        slots = PackedTensor.zeros((num_blocks * block_size, *vector_shape), dtype, layout, 0, device)
        return cls(slots, shape)

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.shape[1]

    def dequantize(self) -> Tensor:
        return self.slots.dequantize().view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["slots"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedPool:
        slots = inner["slots"]
        assert isinstance(slots, PackedTensor)
        return PackedPool(slots, size)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache of traced graphs must know of this input (it calls this)."""
        return str((tuple(self.shape), self.slots._stable_hash_for_caching()))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        from kvcompile.packed_pool_ops import dispatch_pool

        return dispatch_pool(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedPool(shape={tuple(self.shape)}, slots={self.slots!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_packed_pool, (self.slots, tuple(self.shape))


def packed_of(x: Tensor, layout: PackedLayout, token_dim: int, *, growing: bool = False) -> PackedTensor | PackedPool:
    """Quantizes a plain cache; ``token_dim`` is that of :meth:`PackedTensor.from_dense`, 0 for pools of blocks too."""
    if token_dim == 0 and x.dim() == 4:
        return PackedPool.from_dense(x, layout)
    return PackedTensor.from_dense(x, layout, token_dim, growing=growing)


def slots_of(cache: Any) -> Any:
    """The packed cache that a pool of blocks is made of; anything else as it is."""
    return cache.slots if isinstance(cache, PackedPool) else cache


def rebuild_packed_pool(slots: PackedTensor, size: tuple[int, ...]) -> PackedPool:
    """What ``torch.load`` calls to make a saved pool again."""
    return PackedPool(slots, size)


torch.serialization.add_safe_globals([rebuild_packed_pool])
