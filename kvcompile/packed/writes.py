"""Writes of whole token vectors to a packed cache. Each write quantizes its vectors.

Every write reduces to values and three index tensors (sequence, head, position in the packed data), which broadcast to
the addressed vectors. The values are encoded bytes. A cache with a residual takes the vectors themselves, because its
bytes also depend on the other tokens of a block. Indexing checks the bounds, as for a plain cache. Positions must be
distinct: with duplicates, a vector may mix bytes from several writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, num_blocks
from kvcompile.kernels.spec.packing import (
    byte_index,
    replace_blocks_,
    write_tokens_,
    write_vectors_,
)
from kvcompile.kernels.spec.residual import blocks_of
from kvcompile.packed.op_table import handles
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import CHANNELS, PACKED_DIM, PackedTensor
from kvcompile.packed.tokens import launch_write, read_packed, runs_kernels
from kvcompile.packed.tracing import ends_functional_graph, has_no_values, is_traced

aten = torch.ops.aten

Coordinates = Sequence[Tensor]

ROOM = "make a cache with room for more tokens (max_len of kvcompile.static_cache), or reset this cache"
"""The remedy for a write past the end of a cache of fixed size."""


_NAMES = {"b": "sequences", "h": "KV heads", "t": "tokens"}


def coordinates_of(cache: PackedTensor, axis: str = "", index: Tensor | None = None) -> Coordinates:
    """Sequence, head and position in the packed data of the vectors of ``cache``.

    They broadcast over [batch, heads, tokens]. ``index`` (int64 [n]) restricts them along ``axis``. A negative
    index counts from the end.
    """
    coordinates = []
    for dim, name in enumerate("bht"):
        shape = [1, 1, 1]
        shape[dim] = -1
        coordinates.append(_places(cache, name, index if name == axis else None).reshape(shape))
    return coordinates


def _places(cache: PackedTensor, axis: str, index: Tensor | None) -> Tensor:
    """The places ``index`` along ``axis`` in the packed data, int64 [n]; without ``index`` all places of ``cache``."""
    along = torch.arange(_extent(cache, axis), device=cache.device)
    if index is not None:
        along = _indexed(along, index, cache, axis)
    return along + cache.start if axis == "t" else along


def _indexed(along: Tensor, index: Tensor, cache: PackedTensor, axis: str) -> Tensor:
    try:
        return along[index]
    except IndexError as error:
        count = f"{along.numel()} {_NAMES[axis]}"
        raise IndexError(f"a write to the packed cache {list(cache.shape)} of {count}: {error}; {ROOM}") from error


def _extent(cache: PackedTensor, axis: str) -> int:
    return cache.num_tokens if axis == "t" else cache.packed.shape[PACKED_DIM[axis]]


def encoded(cache: PackedTensor, x: Tensor, head: Tensor | None = None) -> Tensor:
    """Encodes vectors, rounded to the cache's dtype, to the values for :func:`put`, [..., width].

    Args:
        cache: the cache to which the vectors will be written.
        x: [batch, heads, tokens, head_dim]; or [*N, head_dim] with their ``head``.
        head: int64, broadcasts to [*N]: the head of each vector, for formats that treat heads differently.
    """
    layout = cache.packed_layout
    x = x.detach().to(cache.device, cache.dtype)
    if layout.residual is not None:
        return x
    if has_no_values(cache.packed) and x.shape[-1] == layout.head_dim:
        return cache.packed.new_empty((*x.shape[:-1], layout.bytes_per_token))
    if head is None or not layout.format.is_calibrated:
        return layout.token_bytes(layout.format.encode(x))
    # Encode the value for every head, and then select.
    vectors = x.reshape(1, 1, -1, x.shape[-1]).expand(1, _extent(cache, "h"), -1, -1)
    values = layout.token_bytes(layout.format.encode(vectors))[0]
    index = torch.arange(values.shape[1], device=x.device)
    return values[head.expand(x.shape[:-1]).reshape(-1), index].view(*x.shape[:-1], -1)


def stored(cache: PackedTensor, source: Tensor) -> Tensor:
    """Encodes ``source`` (axes as ``cache``) to the values that :func:`put` takes, [batch, heads, tokens, width].

    A packed source with the same layout, dtype and axes keeps its bytes, so nothing is quantized twice.
    """
    if isinstance(source, PackedTensor) and _meaning(source) == _meaning(cache):
        return read(source, coordinates_of(source)).to(cache.device)
    return encoded(cache, cache.to_stored_axes(plain(source)))


def _meaning(x: Tensor) -> tuple[Any, ...] | None:
    """Layout, dtype and axes of a packed cache; None for other tensors."""
    return (x.packed_layout, x.dtype, x.axes) if isinstance(x, PackedTensor) else None


def read(cache: PackedTensor, coordinates: Coordinates) -> Tensor:
    """Reads the stored values at ``coordinates``, [*N, width], as :func:`put` takes them."""
    layout = cache.packed_layout
    if layout.residual is None:
        return cache.packed[byte_index(layout, *coordinates)]
    return read_packed(cache.packed, layout, cache.start + cache.num_tokens, cache.dtype)[tuple(coordinates)]


def put(
    cache: PackedTensor, data: Tensor, coordinates: Coordinates, values: Tensor, valid: Tensor | None = None
) -> None:
    """Stores ``values`` in the packed ``data`` of ``cache``, except where ``valid`` [*N] is False."""
    if has_no_values(data):
        _check_shape(cache, coordinates, values)
        return
    if cache.packed_layout.residual is not None:
        vectors = values.expand(*torch.broadcast_shapes(*(c.shape for c in coordinates)), values.shape[-1])
        sequence, head, position = coordinates
        write_vectors_(data, cache.packed_layout, vectors, sequence, head, position, valid, _blocks_of(position))
        return
    index = byte_index(cache.packed_layout, *coordinates)
    data.index_put_(index, values if valid is None else torch.where(valid[..., None], values, data[index]))


def _check_shape(cache: PackedTensor, coordinates: Coordinates, values: Tensor) -> None:
    """Raises if ``values`` do not fit into the vectors at ``coordinates``."""
    layout = cache.packed_layout
    width = layout.bytes_per_token if layout.residual is None else layout.head_dim
    values.expand(*torch.broadcast_shapes(*(c.shape for c in coordinates)), width)


def put_along(cache: PackedTensor, data: Tensor, axis: str, index: Tensor | None, values: Tensor) -> None:
    """Stores ``values`` in all vectors whose index along ``axis`` is in ``index``, int64 [n] (None: all vectors)."""
    coordinates = coordinates_of(cache, axis, index)
    if cache.packed_layout.residual is None or axis in ("b", "h") or has_no_values(data):
        put(cache, data, coordinates, values)
        return
    positions = coordinates[2].reshape(-1)
    x = values.expand(*data.shape[1:3], positions.shape[0], values.shape[-1])
    write_tokens_(data, cache.packed_layout, x, positions, blocks=_blocks_of(positions))


def put_tokens(cache: PackedTensor, data: Tensor, index: Tensor | None, source: Tensor) -> None:
    """Stores ``source`` (axes as ``cache``) in the tokens ``index``, int64 [n] (None: all tokens).

    ``source`` may be a view of ``cache``, because all reads precede the first write.
    """
    if not runs_kernels(data) or _meaning(source) == _meaning(cache):
        put_along(cache, data, "t", index, stored(cache, source))
        return
    positions = _places(cache, "t", index)
    x = cache.to_stored_axes(plain(source).detach()).to(cache.device, cache.dtype)
    launch_write(data, cache.packed_layout, x, positions)


def takes_pairs(keys: Tensor, values: Tensor) -> bool:
    """Whether :func:`put_pair` serves two caches: kernels write them, and both are whole and have the same size.

    The size must be a number of whole blocks, because kernels do not see where a cache ends within a block.
    """
    return (
        isinstance(keys, PackedTensor)
        and isinstance(values, PackedTensor)
        and all(runs_kernels(cache.packed) and cache.is_whole for cache in (keys, values))
        and keys.axes == values.axes == "bhtd"
        and keys.shape[:3] == values.shape[:3]
        and keys.num_tokens % BLOCK_TOKENS == 0
    )


def put_pair(keys: PackedTensor, values: PackedTensor, index: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Stores new keys and values [batch, num_kv_heads, n, head_dim] in the tokens ``index``, int64 [n], by one launch.

    An index beyond the cache fails an assertion on the device.
    """
    torch.ops.kvcompile.store_pair(
        keys.packed_for_write(),
        values.packed_for_write(),
        new_keys.detach().to(keys.dtype),
        new_values.detach().to(values.dtype),
        index,
        None,
        keys.packed_layout.spec,
        values.packed_layout.spec,
    )


def _blocks_of(positions: Tensor) -> Tensor | None:
    """The blocks that contain ``positions``; None (unknown) in traced code."""
    return None if is_traced(positions) else blocks_of(positions)


def plain(x: Any) -> Any:
    return x.dequantize() if isinstance(x, PackedSubclass) else x


@handles(PackedTensor, aten.detach_.default)
def _detach_(cache: PackedTensor) -> PackedTensor:
    return cache


@handles(PackedTensor, aten.record_stream.default)
def _record_stream(cache: PackedTensor, stream: Any) -> None:
    cache.packed.record_stream(stream)


@handles(PackedTensor, aten.copy_.default)
def _copy_(cache: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(cache, PackedTensor):
        return NotImplemented
    if isinstance(source, PackedTensor) and ends_functional_graph(cache.packed):
        cache.packed.copy_(source.packed)
        return cache
    source = source if source.shape == cache.shape else plain(source).expand(cache.shape)
    if isinstance(source, PackedTensor) and _has_same_blocks(cache, source):
        _copy_blocks(cache, source)
    else:
        put_tokens(cache, cache.packed_for_write(), None, source)
    return cache


def _has_same_blocks(cache: PackedTensor, source: PackedTensor) -> bool:
    """Whether ``cache`` has a residual, and tokens with equal indices lie in the same blocks of both caches."""
    same = cache.packed_layout.residual is not None and _meaning(source) == _meaning(cache)
    return same and cache.start == source.start == 0 and "t" in cache.axes


def _copy_blocks(cache: PackedTensor, source: PackedTensor) -> None:
    """Copies whole blocks byte by byte. In a last block with tokens outside ``cache``, copies only differing vectors.

    Both may be views of one cache, because all reads precede the first write.
    """
    data = cache.packed_for_write()
    ends_together = cache.place.ends_cache and source.place.ends_cache
    blocks = num_blocks(cache.num_tokens) if ends_together else cache.num_tokens // BLOCK_TOKENS
    begin = min(blocks * BLOCK_TOKENS, cache.num_tokens)
    tail, new = (part.narrow(part.token_dim, begin, part.num_tokens - begin) for part in (cache, source))
    assert isinstance(tail, PackedTensor)
    coordinates, values = coordinates_of(tail), stored(tail, new)
    differs = (values != read(tail, coordinates)).any(-1)
    replace_blocks_(data, cache.packed_layout, 0, blocks, source.packed.to(data.device, copy=True))
    if begin < cache.num_tokens:
        put(tail, data, coordinates, values, valid=differs)


@handles(PackedTensor, aten.fill_.Scalar, aten.fill_.Tensor)
def _fill_(cache: Tensor, value: Any) -> Any:
    if not isinstance(cache, PackedTensor):
        return NotImplemented
    put_along(cache, cache.packed_for_write(), "t", None, _constant(cache, value, coordinates_of(cache)[1]))
    return cache


def _constant(cache: PackedTensor, value: Any, head: Tensor) -> Tensor:
    """Encodes, for each head, a vector whose channels all equal ``value``, a number or a 0-dimensional tensor."""
    vector = torch.empty(cache.packed_layout.head_dim, dtype=cache.dtype, device=cache.device).fill_(plain(value))
    return encoded(cache, vector.expand(*head.shape, -1), head)


@handles(PackedTensor, aten.zero_.default)
def _zero_(cache: PackedTensor) -> PackedTensor:
    """Writes zero bytes, which decode to zeros. Blocks that hold only tokens of ``cache`` are cleared as a whole."""
    begin, end = cache.start, cache.start + cache.num_tokens
    first, last = num_blocks(begin), end // BLOCK_TOKENS
    data = cache.packed_for_write()
    ranges, zeros = [(begin, end)], torch.zeros_like(_constant(cache, 0, coordinates_of(cache)[1]))
    if first < last:
        replace_blocks_(data, cache.packed_layout, first, last)
        ranges = [(begin, first * BLOCK_TOKENS), (last * BLOCK_TOKENS, end)]
    for low, high in ranges:
        if low < high:
            tokens = torch.arange(low - begin, high - begin, device=data.device)
            put_along(cache, data, "t", tokens, zeros)
    return cache


def not_from_end(index: Tensor, extent: int) -> Tensor:
    """Moves negative indices out of range, for operators that do not accept them."""
    return torch.where(index < 0, extent, index)


@handles(PackedTensor, aten.index_copy_.default)
def _index_copy_(cache: Tensor, dim: int, index: Tensor, source: Tensor) -> Any:
    if not isinstance(cache, PackedTensor) or cache.axes[dim] in CHANNELS:
        return NotImplemented
    expected = list(cache.shape)
    expected[dim] = index.numel()
    if list(source.shape) != expected or source.dtype != cache.dtype:
        raise RuntimeError(
            f"index_copy_ into a packed cache: source is {source.dtype} {tuple(source.shape)}, expected {cache.dtype} "
            f"{tuple(expected)}; make the cache for this model, its dtype and this number of sequences"
        )
    _put_along_axis(cache, cache.axes[dim], not_from_end(index.reshape(-1), cache.shape[dim]), source)
    return cache


def _put_along_axis(cache: PackedTensor, axis: str, index: Tensor, source: Tensor) -> None:
    if axis == "t":
        put_tokens(cache, cache.packed_for_write(), index, source)
    else:
        put_along(cache, cache.packed_for_write(), axis, index, stored(cache, source))


@handles(PackedTensor, aten.index_fill_.int_Scalar, aten.index_fill_.int_Tensor)
def _index_fill_(cache: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    if not isinstance(cache, PackedTensor) or cache.axes[dim] in CHANNELS:
        return NotImplemented
    axis, index = cache.axes[dim], index.reshape(-1)
    head = coordinates_of(cache, axis, index)[1]
    put_along(cache, cache.packed_for_write(), axis, index, _constant(cache, value, head))
    return cache


@handles(PackedTensor, aten.index_put_.default, aten._index_put_impl_.default)
def _index_put_(
    cache: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Any:
    if not isinstance(cache, PackedTensor) or accumulate:
        return NotImplemented
    if values.dtype != cache.dtype:
        raise RuntimeError(
            f"index_put_ into a packed cache of {cache.dtype}: the values are {values.dtype}; convert them to its dtype"
        )
    dims = _indexed_dims(indices)
    if any(cache.axes[dim] in CHANNELS for dim in dims):
        return NotImplemented
    if len(dims) == 1 and (index := indices[dims[0]]) is not None and index.dim() == 1:
        # The common form, one index vector along one axis, needs no grid.
        axis, size = cache.axes[dims[0]], list(cache.shape)
        size[dims[0]] = coordinates_of(cache, axis, index)["bht".index(axis)].numel()
        _put_along_axis(cache, axis, index, plain(values).expand(size))
        return cache
    if cache.axes[-1] != "d":
        return NotImplemented
    # Index a grid of coordinates (with one channel) in the same way to find the addressed vectors.
    grid = [_extent(cache, axis) for axis in "bht"]
    logical = [cache.from_stored_axes(c.expand(grid).unsqueeze(-1)) for c in coordinates_of(cache)]
    coordinates = [aten.index.Tensor(c, indices)[..., 0] for c in logical]
    vectors = plain(values).expand(*coordinates[0].shape, cache.packed_layout.head_dim)
    put(cache, cache.packed_for_write(), coordinates, encoded(cache, vectors, coordinates[1]))
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


@handles(PackedTensor, aten.scatter_.src, aten.scatter_.value)
def _scatter_(cache: Tensor, dim: int, index: Tensor, source: Any) -> Any:
    """Scatters whole vectors. The index must be expanded along head_dim or, in eager code, equal for all channels."""
    if not isinstance(cache, PackedTensor) or cache.axes[dim] in CHANNELS:
        return NotImplemented
    if isinstance(source, Tensor) and source.dtype != cache.dtype:
        raise RuntimeError(
            f"scatter_ into a packed cache of {cache.dtype}: the source is {source.dtype}; convert it to its dtype"
        )
    index = cache.to_stored_axes(index)
    position = index[..., 0]
    is_expanded = index.stride(3) == 0
    if not is_expanded and not is_traced(index):
        is_expanded = torch.equal(index, position.unsqueeze(3).expand_as(index))
    if index.shape[3] != cache.packed_layout.head_dim or not is_expanded:
        raise NotImplementedError(
            "aten.scatter_ would write single elements of a packed KV cache: its index differs between channels, or "
            "may do so in a compiled graph, because it is not expanded (stride 0) along head_dim; use index_copy_ or "
            "cache[:, :, positions] = x"
        )
    coordinates = [c.narrow(n, 0, position.shape[n]) for n, c in enumerate(coordinates_of(cache))]
    along = "bht".index(cache.axes[dim])
    coordinates[along] = coordinates_of(cache)[along].reshape(-1)[not_from_end(position, cache.shape[dim])]
    if isinstance(source, Tensor):
        source = cache.to_stored_axes(plain(source))[tuple(slice(extent) for extent in index.shape)]
        values = encoded(cache, source)
    else:
        values = _constant(cache, source, coordinates[1])
    put(cache, cache.packed_for_write(), coordinates, values)
    return cache
