"""The shared storage of caches that grow by concatenation.

In plain PyTorch ``cat([cache, new])`` copies the cache for every token. Here the longer cache lives in the same storage
as the shorter one, appended in place, as long as nobody can tell: an append that does not start at the fill mark copies
(:meth:`GrowingBuffer.copy_of`), and so does a write to a token that another cache of the same storage can see
(:meth:`Lineage.make_exclusive`).

With a residual the caches of a storage also share the slots that hold recent tokens: while a longer cache fills its
last blocks, the shorter ones may read their own last tokens quantized, as they would if they were longer.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, growing_blocks

_claiming = threading.Lock()


def capacity_blocks(num_tokens: int) -> int:
    """Blocks to allocate for ``num_tokens`` tokens: a quarter of headroom, so that appending is amortised O(1)."""
    return growing_blocks(num_tokens + num_tokens // 4)


class GrowingBuffer:
    """A packed storage with spare room.

    Attributes:
        storage: uint8 [capacity in blocks, batch, num_kv_heads, block_bytes].
        fill: tokens that some cache uses, counted from the first block of tokens.
        header_blocks: blocks before that of the first token, see :mod:`kvcompile.kernels.layout.packed_layout`.
        lineages: the caches that live in it, as long as they are alive.
    """

    def __init__(self, storage: Tensor, fill: int, header_blocks: int = 0) -> None:
        self.storage = storage
        self.fill = fill
        self.header_blocks = header_blocks
        self.lineages: weakref.WeakSet[Lineage] = weakref.WeakSet()

    @classmethod
    def copy_of(cls, data: Tensor, fill: int, header_blocks: int = 0) -> GrowingBuffer:
        """A new buffer with room for ``fill`` tokens and more, which starts with a copy of ``data``.

        ``data`` is uint8 [num_blocks, batch, num_kv_heads, block_bytes]. What it does not cover is zeros: they decode
        to zeros in every format, so that nothing in a buffer ever decodes to NaN.
        """
        blocks = header_blocks + capacity_blocks(fill)
        storage = torch.empty((blocks, *data.shape[1:]), dtype=data.dtype, device=data.device)
        copied = min(data.shape[0], storage.shape[0])
        storage[:copied].copy_(data[:copied])
        storage[copied:].zero_()
        return cls(storage, fill, header_blocks)

    def claim(self, end: int, num_new: int) -> bool:
        """Take the room for ``num_new`` tokens behind token ``end``; False if another cache has it, or there is none.

        Threads that continue one cache ask at the same time: to one of them the room is given, the others copy.
        """
        with _claiming:
            is_free = end == self.fill and self._has_room(end + num_new)
            if is_free:
                self.fill = end + num_new
        return is_free

    def _has_room(self, num_tokens: int) -> bool:
        """Whether the storage holds ``num_tokens`` tokens, counted from its first block of tokens."""
        return num_tokens <= (self.storage.shape[0] - self.header_blocks) * BLOCK_TOKENS


class Lineage:
    """One logical cache in a growing buffer: the tensor that ``cat`` returned and every view of it.

    Attributes:
        buffer: where its tokens lie now.
        end: where they end in the buffer.
    """

    def __init__(self, buffer: GrowingBuffer, end: int) -> None:
        self.buffer = buffer
        self.end = end
        buffer.lineages.add(self)

    def make_exclusive(self) -> None:
        """Moves this cache to a storage of its own if another cache shares it, so that a write is seen by no other."""
        if len(self.buffer.lineages) > 1:
            self.buffer.lineages.discard(self)
            self.buffer = GrowingBuffer.copy_of(self.buffer.storage, self.end, self.buffer.header_blocks)
            self.buffer.lineages.add(self)
