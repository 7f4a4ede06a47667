"""Save packed caches to safetensors files without dequantizing, and load them, so that a prompt runs only once."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvcompile.caches import objects
from kvcompile.errors import CacheFileError
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import CacheMeta, PackedTensor

FORMAT = "kvcompile.cache"
VERSION = 2
"""Version of the description below and of the layout of packed bytes. Files of other versions are refused."""

_PLAIN = (type(None), bool, int, float, str)


def save_cache(cache: Any, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
    """Write a cache to a safetensors file. Packed tensors stay packed; growing ones lose their spare room.

    Every tensor in the file is named by its place in the cache. The file's metadata describe the tensors in JSON under
    ``content``: the layout, axes, dtype and shape of packed tensors, and all other state of the cache, such as its
    number of tokens. The file appears under its name only when it is complete.

    Args:
        cache: a tensor, packed or plain; lists, tuples and dicts of tensors; or a cache of Transformers (static,
            dynamic, with sliding windows, encoder-decoder).
        path: the file; an existing one is replaced.
        metadata: names and values that :func:`load_cache` can check, such as the name of the model. A cache does not
            record the model, and the keys of one model are noise to another.

    Raises:
        CacheFileError: the cache contains an unsupported object; the message names its place.
        OSError: the file cannot be written.
    """
    writer = _Writer()
    content = writer.describe(cache, "")
    header = {
        **dict(metadata or {}),
        "format": FORMAT,
        "version": str(VERSION),
        "content": json.dumps(content),
        **objects.versions(),
    }
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        complete = Path(folder, path.name)
        save_file(writer.tensors, complete, header)
        complete.replace(path)


def load_cache(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    metadata: Mapping[str, str] | None = None,
) -> Any:
    """Load a cache that :func:`save_cache` wrote: an equal cache with its own storage, ready to be extended.

    Args:
        path: the file.
        device: device of the loaded tensors.
        metadata: names and values that the file must have, as given to :func:`save_cache`.

    Raises:
        CacheFileError: the file is not a cache, has another format version, comes from another minor version of
            Transformers, has other ``metadata``, or its bytes contradict its description.
        OSError: the file cannot be read.
    """
    try:
        with safe_open(os.fspath(path), "pt", device=str(device)) as file:
            header = file.metadata() or {}
            _check(header, metadata or {}, path)
            return _Reader(file, torch.device(device), path).make(json.loads(header["content"]))
    except SafetensorError as error:
        raise CacheFileError(f"{path}: {error}") from error


def _check(header: Mapping[str, str], expected: Mapping[str, str], path: Any) -> None:
    if header.get("format") != FORMAT:
        raise CacheFileError(f"{path} is not a cache: its metadata lack format={FORMAT!r}; use save_cache")
    if header.get("version") != str(VERSION):
        raise CacheFileError(
            f"{path} has version {header.get('version')} of the format, and this kvcompile reads {VERSION}; "
            "make the cache anew from its prompt"
        )
    for name, value in expected.items():
        if header.get(name) != value:
            raise CacheFileError(f"{path}: {name} is {header.get(name)!r} in the file, and {value!r} was expected")


class _Writer:
    """Describes a cache in JSON, and collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
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
            return {"dtype": _name_of(value)}
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
            return {"stack": name, "parts": parts, "shape": list(tensor.shape), "dims": list(tensor.stacked_dims)}
        if isinstance(tensor, PackedPool):
            return {
                "pool": name,
                "slots": self.describe(tensor.slots, _join(name, "slots")),
                "shape": list(tensor.shape),
                "heads_first": tensor.heads_first,
            }
        if isinstance(tensor, PackedTensor):
            meta = tensor.cache_meta
            description: dict[str, Any] = {
                "packed": name,
                "layout": [meta.layout.spec, meta.layout.role, meta.layout.head_dim],
                "dtype": _name_of(meta.dtype),
                "axes": meta.axes,
                "start": meta.start,
                "growing": meta.growing,
                "shape": list(tensor.shape),
            }
            data = tensor.packed
        elif type(tensor) is Tensor:
            description, data = {"tensor": name}, tensor.detach()
        else:
            raise CacheFileError(f"save_cache: {name} is a {type(tensor).__name__}, neither packed nor a plain tensor")
        # Copy, because safetensors writes only contiguous tensors that share no storage.
        self.tensors[name] = data.clone(memory_format=torch.contiguous_format)
        return description


class _Reader:
    """Rebuilds a cache from its description and the tensors of a file."""

    def __init__(self, file: Any, device: torch.device, path: Any) -> None:
        self._file = file
        self._device = device
        self._path = path
        self._made: dict[str, Tensor] = {}

    def make(self, content: Any) -> Any:
        if isinstance(content, _PLAIN):
            return content
        kind = next(iter(content))
        if kind in ("tensor", "packed", "stack", "pool"):
            name = content[kind]
            if name not in self._made:
                self._made[name] = self._tensor(kind, name, content)
            return self._made[name]
        if kind == "dtype":
            return getattr(torch, content["dtype"])
        if kind == "device":
            return self._device
        if kind in ("list", "tuple"):
            items = [self.make(item) for item in content[kind]]
            return items if kind == "list" else tuple(items)
        if kind == "dict":
            return {key: self.make(item) for key, item in content["dict"]}
        objects.check_version(self._file.metadata(), self._path)
        if kind == "class":
            return objects.known_class(content["class"], self._path)
        state = {key: self.make(item) for key, item in content["state"]}
        return objects.restored(objects.known_class(content["object"], self._path), state)

    def _tensor(self, kind: str, name: str, content: Mapping[str, Any]) -> Tensor:
        if kind == "stack":
            return PackedStack([self.make(part) for part in content["parts"]], content["shape"], content.get("dims"))
        if kind == "pool":
            return PackedPool(self.make(content["slots"]), content["shape"], content.get("heads_first", False))
        data = self._file.get_tensor(name)
        return data if kind == "tensor" else self._packed(data, content)

    def _packed(self, data: Tensor, content: Mapping[str, Any]) -> PackedTensor:
        try:
            layout = PackedLayout.parse(*content["layout"])
        except ValueError as error:
            raise CacheFileError(f"{self._path}: {content['packed']}: {error}") from error
        if data.dtype != torch.uint8 or data.dim() != 4 or data.shape[-1] != layout.block_bytes:
            raise CacheFileError(
                f"{self._path}: {content['packed']} is {data.dtype} {list(data.shape)}, but blocks of {layout.spec} "
                f"have {layout.block_bytes} bytes; the file was written by another kvcompile, or is damaged"
            )
        meta = CacheMeta(
            layout, getattr(torch, content["dtype"]), content["axes"], content["start"], content["growing"]
        )
        return PackedTensor.owning(data, meta, content["shape"])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _join(place: str, name: Any) -> str:
    return f"{place}.{name}" if place else str(name)
