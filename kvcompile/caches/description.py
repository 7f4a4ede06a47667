"""Write and read the JSON description of a cache. A cache file holds it in addition to the tensors.

A description comes from a file. Reading it therefore checks every name, dtype, shape and length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvcompile.caches import objects
from kvcompile.errors import CacheFileError, cut, shown
from kvcompile.kernels.formats import bases
from kvcompile.kernels.formats.base import BLOCK_TOKENS
from kvcompile.kernels.layout.axes import STORED_AXES, divided_axes, sizes_by_axis
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import PackedLayout, num_blocks
from kvcompile.packed.cache_meta import CacheMeta
from kvcompile.packed.pool import PackedPool, exchanged
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.view_geometry import in_memory_order, order_of_clone

_PLAIN = (type(None), bool, int, float, str)

_DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

_BASIS = "basis/"
"""The prefix of the names of a basis's tensors, as in ``basis/3f9a0c12de45/mean``."""


class Writer:
    """Describes a cache in JSON, and collects its tensors.

    Attributes:
        tensors: copies of the tensors, by name.
        split: the names of the tensors whose tokens are divided among ranks.
    """

    def __init__(self, shard: ContextShard | None = None) -> None:
        """``shard``: this rank's share of the tokens of each packed cache; None if it holds all tokens."""
        self.tensors: dict[str, Tensor] = {}
        self.split: set[str] = set()
        self._shard = shard
        self._described: dict[int, Any] = {}

    def describe(self, value: Any, place: str) -> Any:
        """The description of ``value``, whose place in the cache is ``place``."""
        if isinstance(value, Tensor):
            # Places that share a tensor share one description, so they share one tensor after loading too.
            if id(value) not in self._described:
                self._described[id(value)] = self._tensor(value, place or "cache")
            return self._described[id(value)]
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, (list, tuple)):
            items = [self.describe(item, _join(place, index)) for index, item in enumerate(value)]
            return {"tuple" if isinstance(value, tuple) else "list": items}
        if isinstance(value, dict) and all(isinstance(key, (str, int)) for key in value):
            return {"dict": [[key, self.describe(item, _join(place, key))] for key, item in value.items()]}
        if isinstance(value, type) and objects.is_known(value):
            return {"class": value.__name__}
        if objects.is_known(type(value)):
            state = [[key, self.describe(item, _join(place, key))] for key, item in vars(value).items()]
            return {"object": type(value).__name__, "state": state}
        raise CacheFileError(
            f"save_cache: {place or 'the cache'} is a {type(value).__module__}.{type(value).__qualname__}; a file "
            "holds tensors, lists, tuples and dicts of them, and the static and dynamic caches of Transformers"
        )

    def _tensor(self, tensor: Tensor, name: str) -> Any:
        if isinstance(tensor, PackedStack):
            parts = [self.describe(part, _join(name, number)) for number, part in enumerate(tensor.parts)]
            shape, dims = list(tensor.divided.shape), list(tensor.stacked_dims)
            ranges = {"ranges": True} if tensor.num_ranges else {}
            return {"stack": name, "parts": parts, "shape": shape, "dims": dims, **ranges}
        if isinstance(tensor, PackedPool):
            return {
                "pool": name,
                "slots": self.describe(tensor.slots, _join(name, "slots")),
                "shape": list(tensor.shape),
                "heads_first": tensor.heads_first,
            }
        if isinstance(tensor, PackedShard):
            description, data = self._shard_of(tensor, name)
        elif isinstance(tensor, PackedTensor):
            if self._shard is not None:
                raise CacheFileError(
                    f"save_cache: {name} is whole on every context-parallel rank; save it without context_parallel, or "
                    "make it with static_cache(context_parallel=...)"
                )
            description, data = _packed(tensor, name), tensor.packed
            self._add_basis(tensor.packed_layout.format.basis)
        elif type(tensor) is Tensor:
            description, data = {"tensor": name, **_memory_order(tensor)}, tensor.detach()
        else:
            raise CacheFileError(
                f"save_cache: {name} is a {type(tensor).__name__}, neither packed nor a plain tensor; save a plain copy"
            )
        # Copy, because safetensors writes only contiguous tensors that share no storage.
        self.tensors[name] = data.clone(memory_format=torch.contiguous_format)
        return description

    def _shard_of(self, cache: PackedShard, name: str) -> tuple[dict[str, Any], Tensor]:
        """The description of the whole cache, and the blocks of this rank that lie in the cache."""
        if cache.shard != self._shard:
            raise CacheFileError(
                f"save_cache: {name} is part {cache.shard.rank} of {cache.shard.size} of a cache that ranks hold "
                "together; call save_cache on all of them, with the context_parallel of the cache"
            )
        self.split.add(name)
        description = {**_packed(cache.local, name), "shape": list(cache.shape)}
        blocks = range(cache.shard.rank, num_blocks(cache.shape[cache.local.token_dim]), cache.shard.size)
        return description, cache.local.packed[: len(blocks)]

    def _add_basis(self, reference: str) -> None:
        """Add the tensors of a calibrated format's basis, so that the file can be read without the transforms file."""
        for name, x in (bases.root(reference) if reference else {}).items():
            self.tensors[f"{_BASIS}{reference[: bases.DIGEST_DIGITS]}/{name}"] = x


def _packed(cache: PackedTensor, name: str) -> dict[str, Any]:
    meta = cache.cache_meta
    return {
        "packed": name,
        "layout": [meta.layout.spec, meta.layout.role, meta.layout.head_dim],
        "dtype": dtype_name(meta.dtype),
        "axes": meta.axes,
        "start": meta.start,
        "growing": meta.growing,
        "shape": list(cache.shape),
        **_memory_order(cache),
    }


def _memory_order(tensor: Tensor) -> dict[str, Any]:
    """The order of the dimensions in memory, from the outermost on, if it is not the default."""
    order = order_of_clone(tensor) if tensor.layout is torch.strided else None
    return {} if order is None else {"memory_order": order}


def places_in_blocks(content: Any) -> dict[str, Any]:
    """The places of bytes in a block, for each layout of a description and for readers without kvcompile.

    Returns:
        A dict with a key ``FORMAT ROLE HEAD_DIM`` for each layout. A value has ``block_tokens``, ``block_bytes``,
        ``header_blocks`` before the blocks of tokens, and the ``sections`` of a block. A section has ``offset``,
        ``nbytes``, the ``dtype`` of its elements and its ``shape``. The shape is row-major: [64, ...] by token,
        [..., 64] by channel, or one row that all tokens share.
    """
    layouts: dict[str, Any] = {}
    pending = [content]
    while pending:
        one = pending.pop()
        if isinstance(one, dict) and "packed" in one and "layout" in one:
            layout = PackedLayout.parse(*one["layout"])
            layouts.setdefault(" ".join(map(str, one["layout"])), _places(layout))
        elif isinstance(one, (dict, list)):
            pending.extend(one.values() if isinstance(one, dict) else one)
    return dict(sorted(layouts.items()))


def _places(layout: PackedLayout) -> dict[str, Any]:
    sections = []
    for section in layout.sections:
        rows = 1 if section.shared else BLOCK_TOKENS
        sections.append(
            {
                "name": section.name,
                "offset": layout.section_offsets[section.name],
                "nbytes": rows * section.nbytes,
                "dtype": dtype_name(section.dtype),
                "shape": [section.width, rows] if layout.column_major(section) else [rows, section.width],
            }
        )
    return {
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": layout.block_bytes,
        "header_blocks": layout.header_blocks,
        "sections": sections,
    }


class Reader:
    """Rebuilds a cache from its description and the tensors of a file."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        header: Mapping[str, str],
        device: torch.device,
        path: Any,
        shard: ContextShard | None = None,
    ) -> None:
        """
        Args:
            tensors: the tensors by name. Each is removed when it is used.
            header: the metadata of the file.
            device: the device of the result.
            path: the file, for messages.
            shard: this rank's share of the tokens, for tensors whose description says ``split``.
        """
        self._shard = shard
        self._tensors = tensors
        self._header = header
        self._device = device
        self._path = path
        self._made: dict[str, Tensor] = {}
        self._register_bases()

    def _register_bases(self) -> None:
        tensors: dict[str, dict[str, Tensor]] = {}
        for name in [name for name in self._tensors if name.startswith(_BASIS)]:
            _, digest, part = name.split("/")
            tensors.setdefault(digest, {})[part] = self._tensors.pop(name)
        for digest, parts in tensors.items():
            if bases.register(bases.Basis(**parts)) != digest:
                raise self._contradiction(f"{_BASIS}{digest}", f"the digest {digest}", "other numbers")

    def check_all_used(self) -> None:
        """Raise CacheFileError if the file has a tensor that the description does not use."""
        if self._tensors:
            raise self._contradiction("the cache", "a part of the file", f"the further tensor {min(self._tensors)}")

    def make(self, content: Any) -> Any:
        """The object that ``content`` describes.

        Raises:
            CacheFileError: the description names an unknown class, or contradicts a tensor.
            KeyError, TypeError, ValueError, StopIteration: the description is malformed.
        """
        if isinstance(content, _PLAIN):
            return content
        kind = next(iter(content))
        if kind in ("tensor", "packed", "stack", "pool"):
            name = content[kind]
            if name not in self._made:
                self._made[name] = self._tensor(kind, name, content)
            return self._made[name]
        if kind == "dtype":
            return _DTYPES[content["dtype"]]
        if kind == "device":
            return self._device
        if kind in ("list", "tuple"):
            items = [self.make(item) for item in content[kind]]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {key: self.make(item) for key, item in content["dict"]}
        objects.check_version(self._header, self._path)
        if kind == "class":
            return objects.known_class(content["class"], self._path)
        state = {key: self.make(item) for key, item in content["state"]}
        return objects.restored(objects.known_class(content["object"], self._path), state)

    def _tensor(self, kind: str, name: str, content: Mapping[str, Any]) -> Tensor:
        if kind == "stack":
            return self._stack([self.make(part) for part in content["parts"]], content)
        if kind == "pool":
            return self._pool(self.make(content["slots"]), content)
        data = self._tensors.pop(name).to(self._device)
        if kind == "tensor":
            if not data.untyped_storage().resizable():
                data = data.clone()  # memory of the file, which a compiled call could not swap for a packed cache
            return in_memory_order(data, _order(content, data.dim())) if "memory_order" in content else data
        return self._packed(data, content) if self._shard is None else self._split(data, content, self._shard)

    def _stack(self, parts: list[Any], content: Mapping[str, Any]) -> PackedStack:
        shape = [_count(size) for size in content["shape"]]
        dims = [_count(dim) for dim in content.get("dims", range(len(shape) - parts[0].dim()))]
        rest = [size for dim, size in enumerate(shape) if dim not in dims]
        if any(list(part.shape) != rest or part.dtype != parts[0].dtype for part in parts):
            sizes = ", ".join(str(list(part.shape)) for part in parts[:3])
            raise self._contradiction(content["stack"], f"a stack {shape} of {rest}", f"parts {sizes}")
        stack = PackedStack(parts, shape, dims)
        return PackedRanges.of(stack) if content.get("ranges") is True else stack

    def _pool(self, slots: Tensor, content: Mapping[str, Any]) -> PackedPool:
        shape, heads_first = [_count(size) for size in content["shape"]], content["heads_first"] is True
        num_blocks, block_size, num_kv_heads, head_dim = exchanged(shape) if heads_first else shape
        if not isinstance(slots, PackedTensor) or slots.shape != (num_blocks * block_size, num_kv_heads, head_dim):
            raise self._contradiction(content["pool"], f"a pool {list(shape)}", f"slots {list(slots.shape)}")
        return PackedPool(slots, shape, heads_first)

    def _split(self, data: Tensor, content: Mapping[str, Any], shard: ContextShard) -> PackedShard:
        """The part of a cache whose blocks are ``data``. Zeros are added if other ranks have more blocks."""
        if content.get("split") is not True:
            raise ValueError(f"{content['packed']} is whole, but ranks share the tokens")
        shape, dim = [_count(size) for size in content["shape"]], content["axes"].index("t")
        own = list(shape)
        own[dim] = shard.num_tokens(shape[dim])
        if missing := max(num_blocks(own[dim]) - data.shape[0], 0):
            data = torch.cat([data, data.new_zeros((missing, *data.shape[1:]))])
        return PackedShard(self._packed(data, {**content, "shape": own}), shape, shard)

    def _packed(self, data: Tensor, content: Mapping[str, Any]) -> PackedTensor:
        name = content["packed"]
        layout, dtype = self._layout(content), _DTYPES[content["dtype"]]
        if data.dtype != torch.uint8 or data.dim() != 4 or data.shape[-1] != layout.block_bytes:
            expected = f"blocks of {layout.spec} with {layout.block_bytes} bytes"
            raise self._contradiction(name, expected, f"{data.dtype} {list(data.shape)}")
        axes, shape, start = content["axes"], [_count(size) for size in content["shape"]], _count(content["start"])
        order = divided_axes(axes)
        if len(set(order)) != len(order) or not {"d"} <= set(order) <= set(STORED_AXES):
            raise CacheFileError(f"{self._path}: {name}: {axes!r} is not an order of dimensions")
        sizes = sizes_by_axis(shape, axes, layout.head_dim) or {}
        needed = (layout.blocks(start + sizes.get("t", 1)), sizes.get("b", 1), sizes.get("h", 1), layout.block_bytes)
        fits = bool(sizes) and data.shape[0] >= needed[0] and data.shape[1:] == needed[1:]
        if not fits or (layout.residual is None and start >= BLOCK_TOKENS):
            raise self._contradiction(name, f"{axes} {shape} from token {start} on", f"blocks {list(data.shape)}")
        reason = layout.unsupported(dtype) or layout.unsupported_on(data.device)
        if reason is not None:
            raise CacheFileError(f"{self._path}: {name}: no cache of {dtype} has the layout {layout.spec}: {reason}")
        cache = PackedTensor.owning(data, CacheMeta(layout, dtype, axes, start, content["growing"] is True), shape)
        if "memory_order" not in content:
            return cache
        values = in_memory_order(torch.empty(shape, device="meta"), _order(content, len(shape)))
        return cache.with_stride(values.stride())

    def _layout(self, content: Mapping[str, Any]) -> PackedLayout:
        spec, role, head_dim = content["layout"]
        try:
            return PackedLayout.parse(spec, role, _count(head_dim))
        except ValueError as error:
            raise CacheFileError(f"{self._path}: {cut(content['packed'])}: {cut(str(error))}") from error

    def _contradiction(self, name: str, described: str, found: str) -> CacheFileError:
        return CacheFileError(
            f"{self._path}: {name} is described as {described}, but the file has {found}; "
            "damaged or from another kvcompile; compute it again from its prompt"
        )


def _order(content: Mapping[str, Any], rank: int) -> list[int]:
    """The order of the dimensions in memory; ValueError if it does not name each of ``rank`` dimensions once."""
    order = [_count(dim) for dim in content["memory_order"]]
    if sorted(order) != list(range(rank)):
        raise ValueError(f"{shown(order)} is not an order of {rank} dimensions")
    return order


def _count(value: Any) -> int:
    """``value`` if it is a non-negative int; ValueError otherwise. JSON also has floats and bools."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{shown(value)} is not a number of tokens, heads or channels")
    return value


def _join(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else str(name)
