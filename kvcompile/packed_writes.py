"""Writes of whole token vectors to a packed cache: each one quantizes its vectors.

Every write comes down to three index tensors (sequence, head, position in the packed data) that broadcast to the
addressed vectors, and the bytes of the vectors. Indexing checks the bounds, as it does for a plain cache. Positions
must be distinct: with duplicates the bytes of a vector may come from several of its writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout import BLOCK_TOKENS, num_blocks
from kvcompile.kernels.packing import byte_index
from kvcompile.packed_op_table import handles
from kvcompile.packed_tensor import PACKED_DIM, PackedTensor
from kvcompile.tracing import ends_functional_graph

aten = torch.ops.aten

Coordinates = Sequence[Tensor]


def coordinates_of(cache: PackedTensor, axis: str = "", index: Tensor | None = None) -> Coordinates:
    """Sequence, head and position in the packed data of the vectors of ``cache``.

    They broadcast over [batch, heads, tokens]. With ``index`` (int64 [n]) only those along ``axis``; a negative index
    counts from the end.
    """
    coordinates = []
    for dim, name in enumerate("bht"):
        along = torch.arange(_extent(cache, name), device=cache.device)
        if index is not None and name == axis:
            along = along[index]
        shape = [1, 1, 1]
        shape[dim] = -1
        coordinates.append((along + cache.start if name == "t" else along).reshape(shape))
    return coordinates


def _extent(cache: PackedTensor, axis: str) -> int:
    return cache.num_tokens if axis == "t" else cache.packed.shape[PACKED_DIM[axis]]


def encoded(cache: PackedTensor, x: Tensor) -> Tensor:
    """Vectors [..., head_dim], rounded to the cache's dtype as by a plain cache -> bytes [..., bytes_per_token]."""
    layout = cache.packed_layout
    return layout.token_bytes(layout.format.encode(x.detach().to(cache.device, cache.dtype)))


def stored_bytes(cache: PackedTensor, source: Tensor) -> Tensor:
    """The bytes, [batch, heads, tokens, bytes_per_token], that storing ``source`` (axes as ``cache``) writes.

    Of a packed source with the same meaning they are its own bytes, so that nothing is quantized twice.
    """
    if isinstance(source, PackedTensor) and _meaning(source) == _meaning(cache):
        return read_bytes(source, coordinates_of(source)).to(cache.device)
    return encoded(cache, cache.to_stored_axes(plain(source)))


def _meaning(cache: PackedTensor) -> tuple[Any, ...]:
    return cache.packed_layout, cache.dtype, cache.axes


def read_bytes(cache: PackedTensor, coordinates: Coordinates) -> Tensor:
    """Bytes of the vectors at ``coordinates``, uint8 [*N, bytes_per_token]."""
    return cache.packed[byte_index(cache.packed_layout, *coordinates)]


def put(data: Tensor, cache: PackedTensor, coordinates: Coordinates, values: Tensor) -> None:
    """Writes bytes of vectors to the packed ``data`` of ``cache``."""
    data.index_put_(byte_index(cache.packed_layout, *coordinates), values)


def plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, PackedTensor) else x


@handles(aten.detach_.default)
def _detach_(cache: PackedTensor) -> PackedTensor:
    return cache


@handles(aten.record_stream.default)
def _record_stream(cache: PackedTensor, stream: Any) -> None:
    cache.packed.record_stream(stream)


@handles(aten.copy_.default)
def _copy_(cache: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(cache, PackedTensor):
        return NotImplemented
    if isinstance(source, PackedTensor) and ends_functional_graph(cache.packed):
        cache.packed.copy_(source.packed)
        return cache
    source = source if source.shape == cache.shape else plain(source).expand(cache.shape)
    values = stored_bytes(cache, source)
    put(cache.packed_for_write(), cache, coordinates_of(cache), values)
    return cache


@handles(aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(cache: Tensor, value: Any) -> Any:
    if not isinstance(cache, PackedTensor):
        return NotImplemented
    put(cache.packed_for_write(), cache, coordinates_of(cache), _constant(cache, value))
    return cache


def _constant(cache: PackedTensor, value: Any) -> Tensor:
    """Bytes of a vector whose channels all are ``value``, a number or a tensor of no dimensions."""
    vector = torch.empty(cache.packed_layout.head_dim, dtype=cache.dtype, device=cache.device)
    return encoded(cache, vector.fill_(plain(value)))


@handles(aten.zero_.default)
def _zero_(cache: PackedTensor) -> PackedTensor:
    """All-zero bytes decode to zeros. Blocks that hold no other tokens are cleared whole."""
    begin, end = cache.start, cache.start + cache.num_tokens
    first, last = num_blocks(begin), end // BLOCK_TOKENS
    data = cache.packed_for_write()
    ranges = [(begin, end)]
    if first < last:
        data[first:last].zero_()
        ranges = [(begin, first * BLOCK_TOKENS), (last * BLOCK_TOKENS, end)]
    for low, high in ranges:
        if low < high:
            tokens = torch.arange(low - begin, high - begin, device=data.device)
            put(data, cache, coordinates_of(cache, "t", tokens), data.new_zeros(()))
    return cache


@handles(aten.index_copy_.default)
def _index_copy_(cache: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not isinstance(cache, PackedTensor) or cache.axes[dim] == "d":
        return NotImplemented
    expected = list(cache.shape)
    expected[dim] = index.numel()
    if list(source.shape) != expected or source.dtype != cache.dtype:
        raise RuntimeError(
            f"index_copy_ into a packed cache: source is {source.dtype} {tuple(source.shape)}, expected {cache.dtype} "
            f"{tuple(expected)}"
        )
    values = stored_bytes(cache, source)
    put(cache.packed_for_write(), cache, coordinates_of(cache, cache.axes[dim], index.reshape(-1)), values)
    return cache


@handles(aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def _index_fill_(cache: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not isinstance(cache, PackedTensor) or cache.axes[dim] == "d":
        return NotImplemented
    coordinates = coordinates_of(cache, cache.axes[dim], index.reshape(-1))
    put(cache.packed_for_write(), cache, coordinates, _constant(cache, value))
    return cache


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    cache: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not isinstance(cache, PackedTensor) or accumulate or cache.axes[-1] != "d":
        return NotImplemented
    if values.dtype != cache.dtype:
        raise RuntimeError(f"index_put_ into a packed cache of {cache.dtype}: the values are {values.dtype}")
    dims = _indexed_dims(indices)
    if dims[-1] == cache.dim() - 1:
        return NotImplemented
    if len(dims) == 1 and (index := indices[dims[0]]) is not None and index.dim() == 1:
        # The common form, without a grid: one index vector along one axis.
        coordinates = coordinates_of(cache, cache.axes[dims[0]], index)
        size = list(cache.shape)
        size[dims[0]] = coordinates["bht".index(cache.axes[dims[0]])].numel()
        put(cache.packed_for_write(), cache, coordinates, stored_bytes(cache, plain(values).expand(size)))
        return cache
    # The coordinates of the addressed vectors: index a grid of coordinates (with one channel) in the same way.
    grid = [_extent(cache, axis) for axis in "bht"]
    logical = [cache.from_stored_axes(c.expand(grid).unsqueeze(-1)) for c in coordinates_of(cache)]
    coordinates = [aten.index.Tensor(c, indices)[..., 0] for c in logical]
    vectors = plain(values).expand(*coordinates[0].shape, cache.packed_layout.head_dim)
    put(cache.packed_for_write(), cache, coordinates, encoded(cache, vectors))
    return cache


def _indexed_dims(indices: Sequence[Tensor | None]) -> list[int]:
    """The dimensions that advanced indices consume; a mask of n dimensions consumes n."""
    dims: list[int] = []
    dim = 0
    for index in indices:
        consumed = index.dim() if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
        if index is not None:
            dims.extend(range(dim, dim + consumed))
        dim += consumed
    return dims


@handles(aten.scatter_.src, aten.scatter_.value)
def _scatter_(cache: Tensor, dim: int, index: Tensor, source: Any) -> Any:
    """A scatter whose index is known to be the same for all channels: expanded, with stride 0 along head_dim."""
    if not isinstance(cache, PackedTensor) or cache.axes[dim] == "d":
        return NotImplemented
    index = cache.to_stored_axes(index)
    if index.shape[3] != cache.packed_layout.head_dim or index.stride(3) != 0:
        raise NotImplementedError(
            "aten.scatter_ would write single elements of a packed KV cache: its index is not expanded (stride 0) "
            "along head_dim, so it may differ between channels; use index_copy_ or cache[:, :, positions] = x"
        )
    position = index[..., 0]
    coordinates = [c.narrow(n, 0, position.shape[n]) for n, c in enumerate(coordinates_of(cache))]
    along = "bht".index(cache.axes[dim])
    coordinates[along] = coordinates_of(cache)[along].reshape(-1)[position]
    if isinstance(source, Tensor):
        source = cache.to_stored_axes(plain(source))[tuple(slice(extent) for extent in index.shape)]
        values = encoded(cache, source)
    else:
        values = _constant(cache, source)
    put(cache.packed_for_write(), cache, coordinates, values)
    return cache
