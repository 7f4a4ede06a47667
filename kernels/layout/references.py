"""References: packed data that is passed by an address in device memory.

A recorded CUDA graph launches its kernels with the arguments of the recording. If packed data may differ from replay to
replay, an operator gets a *reference* instead: a tensor with the shape of the data whose strides are all 0. Its storage
holds the address of the data (int64), at the offset of the tensor. The data itself is contiguous. Kernels read the
address when they run (:func:`referred`); the caller writes it before each replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.lang.triton import jit, tl

REFERENCE_NBYTES = 16
"""Bytes from one reference to the next in memory: Inductor copies inputs that are not aligned to 16 bytes."""


def reference_strides(data: Tensor) -> tuple[int, ...]:
    """The strides of a reference to ``data``."""
    return (0,) * data.dim()


def is_reference(data: Tensor) -> bool:
    """Whether ``data``, an argument of an operator, is a reference."""
    return data.stride(0) == 0 and data.stride(-1) == 0


def strides_of(data: Tensor) -> tuple[int, int, int]:
    """The strides (block, batch, head) in bytes of packed data.

    Args:
        data: uint8 [num_blocks, batch, num_kv_heads, block_bytes], or a reference to such data.
    """
    block, batch, head, _ = data.stride()
    if is_reference(data):
        _, batch_size, num_kv_heads, head = data.shape
        batch = num_kv_heads * head
        block = batch_size * batch
    return block, batch, head


class References:
    """References to packed tensors on one device. Their own addresses do not change when they refer to other data.

    Args:
        count: the number of tensors.
        device: the device of the data.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._table = torch.zeros((count, REFERENCE_NBYTES // 8), dtype=torch.int64, device=device)
        self._known: list[tuple[int, torch.Size]] = []
        self._references: list[Tensor] = []

    def refer(self, data: list[Tensor]) -> list[Tensor]:
        """Make the references refer to ``data``, and return them.

        Kernels that were launched earlier on the current stream still read the earlier data.

        Args:
            data: ``count`` packed tensors, uint8 [num_blocks, batch, num_kv_heads, block_bytes].

        Raises:
            ValueError: a tensor is not contiguous.
        """
        known = [(tensor.data_ptr(), tensor.shape) for tensor in data]
        if known != self._known:
            if not all(tensor.is_contiguous() for tensor in data):
                raise ValueError("packed data that is passed by reference must be contiguous")
            self._table[:, 0] = torch.tensor([address for address, _ in known])
            table = self._table.view(torch.uint8)
            self._references = [
                table[i].as_strided(tensor.shape, reference_strides(tensor)) for i, tensor in enumerate(data)
            ]
            self._known = known
        return self._references


@jit
def referred(ptr, OPERAND: tl.constexpr):
    """The pointer to packed data: the pointer argument of a kernel, or the address at it if it is a reference."""
    if OPERAND.by_reference:
        # Blocks start at multiples of 64 bytes. Triton knows the alignment of arguments only.
        ptr = tl.multiple_of(tl.load(ptr.to(tl.pointer_type(tl.int64))).to(tl.pointer_type(tl.uint8)), 64)
    return ptr
