"""A packed pool of blocks: the tensor [num_blocks, block_size, num_kv_heads, head_dim] of a paged KV cache, or
[num_blocks, num_kv_heads, block_size, head_dim], which has heads first.

The slots of the pool, in order, are the tokens of one packed sequence
(:class:`~kvcompile.packed.tensor.PackedTensor`). A block of packed data always holds 64 tokens, whatever ``block_size``
is. A view of the pool as [num_slots, num_kv_heads, head_dim] is this sequence. :mod:`kvcompile.packed.pool_ops` defines
the operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.dimension_marks import pass_marks_on
from kvcompile.compat.tensors import new_wrapper
from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor


class PackedPool(PackedSubclass):
    """A packed pool of blocks, or a view of some of its blocks.

    Attributes:
        slots: the slots of all blocks, [num_slots, num_kv_heads, head_dim].
        heads_first: whether a block is [num_kv_heads, block_size, head_dim].
    """

    slots: PackedTensor
    heads_first: bool

    @staticmethod
    def __new__(cls, slots: PackedTensor, size: Sequence[int], heads_first: bool = False) -> PackedPool:
        """A pool of logical ``size`` that shares the storage of ``slots``."""
        return new_wrapper(cls, size, dtype=slots.dtype, device=slots.device)

    def __init__(self, slots: PackedTensor, size: Sequence[int], heads_first: bool = False) -> None:
        self.slots = slots
        self.heads_first = heads_first

    @classmethod
    def from_dense(cls, x: Tensor, layout: PackedLayout, *, heads_first: bool = False) -> PackedPool:
        """Quantizes a plain pool.

        Args:
            x: any float dtype, [num_blocks, block_size, num_kv_heads, head_dim], or [num_blocks, num_kv_heads,
                block_size, head_dim] with ``heads_first``.
            layout: format and role; its ``head_dim`` must equal the last dimension of ``x``.
            heads_first: whether heads come before the slots of a block.

        Raises:
            ValueError: a pool of this shape and dtype cannot have this layout.
        """
        slots = x.transpose(1, 2) if heads_first else x
        return cls(PackedTensor.from_dense(slots.flatten(0, 1), layout, SLOT_AXES), x.shape, heads_first)

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: PackedLayout,
        device: torch.device | str | None = None,
        *,
        heads_first: bool = False,
    ) -> PackedPool:
        """A pool of zeros.

        Args:
            shape: the shape of the plain pool, as in :meth:`from_dense`.
            dtype: the logical dtype, a floating-point type.
            layout: format and role.
            device: the device of the data; None for the default device.
            heads_first: whether heads come before the slots of a block.

        Raises:
            ValueError: as in :meth:`from_dense`.
        """
        num_blocks, num_kv_heads, block_size, head_dim = exchanged(shape) if not heads_first else shape
        slots = PackedTensor.zeros((num_blocks * block_size, num_kv_heads, head_dim), dtype, layout, SLOT_AXES, device)
        return cls(slots, shape, heads_first)

    @property
    def block_size(self) -> int:
        """Number of slots in a block."""
        return self.shape[2 if self.heads_first else 1]

    def exchanged(self) -> PackedPool:
        """The same pool with the heads and tokens of each block exchanged."""
        return PackedPool(self.slots, exchanged(self.shape), not self.heads_first)

    def of_size(self, size: Sequence[Any]) -> PackedPool:
        """The same pool with the symbolic sizes in ``size``, as :meth:`PackedTensor.of_size`."""
        num_blocks, block_size, num_kv_heads, head_dim = exchanged(size) if self.heads_first else size
        return PackedPool(self.slots.of_size((num_blocks * block_size, num_kv_heads, head_dim)), size, self.heads_first)

    @property
    def data_is_traced(self) -> bool:
        return self.slots.data_is_traced

    def dequantize(self) -> Tensor:
        if self.heads_first:
            return self.exchanged().dequantize().transpose(1, 2).contiguous()
        return self.slots.dequantize().view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        tokens, heads = (2, 1) if self.heads_first else (1, 2)
        pass_marks_on(self, self.slots, {0: 0, tokens: 0, heads: 1})
        return ["slots"], self.heads_first

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> PackedPool:
        slots = inner["slots"]
        assert isinstance(slots, PackedTensor)
        return PackedPool(slots, size, context).of_size(size)

    def _stable_hash_for_caching(self) -> str:
        """The key of this input in AOTAutograd's cache of traced graphs. AOTAutograd calls this method."""
        return str((tuple(self.shape), self.heads_first, self.slots._stable_hash_for_caching()))

    def __repr__(self) -> str:  # type: ignore[override]
        order = ", heads_first=True" if self.heads_first else ""
        return f"PackedPool(shape={tuple(self.shape)}{order}, slots={self.slots!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_packed_pool, (self.slots, tuple(self.shape), self.heads_first)


def packed_of(
    x: Tensor,
    layout: PackedLayout,
    axes: str = "bhtd",
    *,
    growing: bool = False,
    num_written: Tensor | None = None,
) -> PackedTensor | PackedPool:
    """Quantizes a plain cache. ``axes`` are the axes of a pool of blocks, or as in :meth:`PackedTensor.from_dense`.

    The other arguments are as in :meth:`PackedTensor.from_dense`. A pool ignores ``num_written``, because it is not
    filled from its start.
    """
    if axes in BLOCK_AXES:
        return PackedPool.from_dense(x, layout, heads_first=BLOCK_AXES.index(axes) == 1)
    return PackedTensor.from_dense(x, layout, axes, growing=growing, num_written=num_written)


def exchanged(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a pool of blocks with its middle dimensions exchanged."""
    return shape[0], shape[2], shape[1], shape[3]


def slots_of(cache: Any) -> Any:
    """The slots of a pool of blocks. Any other object is returned unchanged."""
    return cache.slots if isinstance(cache, PackedPool) else cache


def rebuild_packed_pool(slots: PackedTensor, size: tuple[int, ...], heads_first: bool = False) -> PackedPool:
    """Rebuilds a saved pool. ``torch.load`` calls this function."""
    return PackedPool(slots, size, heads_first)


torch.serialization.add_safe_globals([rebuild_packed_pool])
