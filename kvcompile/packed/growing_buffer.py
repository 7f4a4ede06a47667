"""The shared storage of caches that grow by concatenation.

In plain PyTorch ``cat([cache, new])`` copies the cache for every token. Here the append happens in place, and the
longer cache shares the storage of the shorter one. Two cases copy instead, so that sharing stays invisible: an append
that does not start at the fill mark (:meth:`GrowingBuffer.copy_of`), and a write to a token that another cache of the
same storage can see (:meth:`Lineage.make_exclusive`).

A compiled function may return a view of its input. PyTorch makes such a view from its bytes alone, so the storage has
to tell its cache (:func:`lineage_at`).

Caches with a residual also share the entries for recent tokens. When a longer cache fills its last blocks, a shorter
cache may read its own last tokens quantized, as a longer cache does.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, growing_blocks

_claiming = threading.Lock()

_buffers: weakref.WeakValueDictionary[int, GrowingBuffer] = weakref.WeakValueDictionary()
"""The live buffers by the address of their storage. A buffer keeps its storage, so an address here is not reused."""


def capacity_blocks(num_tokens: int) -> int:
    """Blocks to allocate for ``num_tokens`` tokens. A quarter of headroom makes appending amortised O(1)."""
    return growing_blocks(num_tokens + num_tokens // 4)


class GrowingBuffer:
    """A packed storage with spare room.

    Attributes:
        storage: uint8 [capacity in blocks, batch, num_kv_heads, block_bytes].
        fill: number of tokens that at least one cache uses, counted from the first block of tokens.
        header_blocks: number of blocks before the first block of tokens, see
            :mod:`kvcompile.kernels.layout.packed_layout`.
        lineages: the live caches in this buffer, held by weak references.
    """

    def __init__(self, storage: Tensor, fill: int, header_blocks: int = 0) -> None:
        self.storage = storage
        self.fill = fill
        self.header_blocks = header_blocks
        self.lineages: weakref.WeakSet[Lineage] = weakref.WeakSet()
        if address := storage.untyped_storage().data_ptr():
            _buffers[address] = self

    @classmethod
    def copy_of(cls, data: Tensor, fill: int, header_blocks: int = 0) -> GrowingBuffer:
        """A new buffer that starts with a copy of ``data`` and has room for ``fill`` tokens plus headroom.

        ``data`` is uint8 [num_blocks, batch, num_kv_heads, block_bytes]. The remaining blocks are zero. Zero bytes
        decode to zeros in every format, so nothing in a buffer decodes to NaN.
        """
        blocks = header_blocks + capacity_blocks(fill)
        storage = torch.empty((blocks, *data.shape[1:]), dtype=data.dtype, device=data.device)
        copied = min(data.shape[0], storage.shape[0])
        storage[:copied].copy_(data[:copied])
        storage[copied:].zero_()
        return cls(storage, fill, header_blocks)

    def claim(self, end: int, num_new: int) -> bool:
        """Reserve room for ``num_new`` tokens after token ``end``; False if that room is taken or the buffer is full.

        Several threads may extend one cache at the same time. One thread gets the room, and the others copy.
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
        buffer: the buffer that holds its tokens now.
        end: position in the buffer after its last token.
        is_known: whether it is known which cache this is; False for a view that :func:`lineage_at` found in the storage
            of several caches.
    """

    def __init__(self, buffer: GrowingBuffer, end: int, is_known: bool = True) -> None:
        self.buffer = buffer
        self.end = end
        self.is_known = is_known
        buffer.lineages.add(self)

    def make_exclusive(self) -> None:
        """Moves this cache to its own storage if another cache shares it, so that no other cache sees a write.

        Raises:
            NotImplementedError: the storage has a view of an unknown cache, which may have to see the write.
        """
        sharing = list(self.buffer.lineages)
        if len(sharing) > 1:
            if not all(lineage.is_known for lineage in sharing):
                raise NotImplementedError(
                    "a write in place to a growing packed cache that shares its storage with other caches and with a "
                    "view that a compiled function returned; clone the view, or return a copy from the function"
                )
            self.buffer.lineages.discard(self)
            self.buffer = GrowingBuffer.copy_of(self.buffer.storage, self.end, self.buffer.header_blocks)
            self.buffer.lineages.add(self)


def lineage_at(data: Tensor) -> Lineage | None:
    """The cache of a view that a compiled function returned; None if ``data`` lies in no growing buffer.

    If several caches share the buffer, the view may belong to any of them, and it gets a lineage of its own. It can be
    read and appended to. A write in place to it, or to a cache of this buffer, is an error while both are in use.
    """
    buffer = _buffers.get(data.untyped_storage().data_ptr())
    if buffer is None:
        return None
    sharing = list(buffer.lineages)
    return sharing[0] if len(sharing) == 1 else Lineage(buffer, buffer.fill, is_known=False)
