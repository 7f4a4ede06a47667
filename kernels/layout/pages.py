"""The places of the bytes in a paged cache of packed keys and values, whose layers share one flat tensor.

The tensor is uint8 [num_bytes], a row of blocks. A block holds BLOCK_TOKENS consecutive slots of every layer::

    [ layer 0: keys of head 0, 1, ... | values of head 0, 1, ... | layer 1: keys ... | values ... | ... ]

The bytes of one head in a block are a block of :class:`~kvcompile.kernels.layout.packed_layout.PackedLayout`. The keys
of a layer are therefore packed data of one sequence, [num_blocks, 1, num_kv_heads, key bytes], with the stride
``block_bytes`` between blocks; so are its values. Each layer may have its own formats. A page is a fixed number of
blocks, and slot ``page * page_size + i`` is token ``i`` of a page, in every layer. A copy of the bytes of a page copies
its tokens in all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout


@dataclass(frozen=True)
class PagedLayer:
    """The keys and values of one layer in a paged cache.

    Attributes:
        key: the layout of the keys, without a residual.
        value: the layout of the values, without a residual.
        first_byte: where the keys of the layer begin in a block.
        block_bytes: bytes of a block, all layers included.
    """

    key: PackedLayout
    value: PackedLayout
    first_byte: int
    block_bytes: int


@dataclass(frozen=True)
class PagesLayout:
    """The layout of a paged cache.

    Attributes:
        layers: the layers in their order in a block, which need not be all layers of a model.
        block_bytes: bytes of a block, all layers included.
    """

    layers: tuple[PagedLayer, ...]
    block_bytes: int

    @classmethod
    def of(cls, formats: Sequence[tuple[PackedLayout, PackedLayout]], num_kv_heads: int) -> PagesLayout:
        """The layout for layers with ``num_kv_heads`` KV heads, whose keys and values have the layouts ``formats``."""
        sizes = [num_kv_heads * (key.block_bytes + value.block_bytes) for key, value in formats]
        total, layers, begin = sum(sizes), [], 0
        for (key, value), size in zip(formats, sizes, strict=True):
            layers.append(PagedLayer(key, value, begin, total))
            begin += size
        return cls(tuple(layers), total)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens, a multiple of BLOCK_TOKENS, in all layers."""
        return page_size // BLOCK_TOKENS * self.block_bytes


def data_of_layer(
    pool: Tensor, key: PackedLayout, value: PackedLayout, num_kv_heads: int, first_byte: int, block_bytes: int
) -> tuple[Tensor, Tensor]:
    """Views of the packed keys and values of a layer, each uint8 [num_blocks, 1, num_kv_heads, block_bytes].

    Args:
        pool: uint8 [num_bytes], contiguous; ``num_bytes`` is a multiple of ``block_bytes``.
        key, value, first_byte, block_bytes: see :class:`PagedLayer`.
        num_kv_heads: KV heads of the layer.
    """
    blocks = pool.view(-1, block_bytes)
    key_bytes, value_bytes = num_kv_heads * key.block_bytes, num_kv_heads * value.block_bytes
    keys = blocks.narrow(1, first_byte, key_bytes)
    values = blocks.narrow(1, first_byte + key_bytes, value_bytes)
    return keys.unflatten(1, (1, num_kv_heads, -1)), values.unflatten(1, (1, num_kv_heads, -1))
