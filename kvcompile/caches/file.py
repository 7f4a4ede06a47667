"""Save packed caches to safetensors files without dequantizing, and load them, so that a prompt runs only once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvcompile.caches import objects
from kvcompile.caches.description import Reader, Writer, places_in_blocks
from kvcompile.caches.disk import check_replaceable, write_tensors
from kvcompile.caches.division import share_of
from kvcompile.caches.save_on_ranks import save_on_ranks
from kvcompile.caches.source import FORMAT, OWN_ENTRIES, VERSION, Source, check_origin
from kvcompile.errors import CacheFileError, OptionsError, cut, one_line, shown
from kvcompile.files import digests
from kvcompile.parallel.ranks import Ranks

_NOT_VALID = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError, StopIteration)
"""Errors of code that reads a malformed description, or that makes tensors of the sizes in it."""


def save_cache(
    cache: Any,
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
    *,
    model: nn.Module | None = None,
    context_parallel: Any = None,
    tensor_parallel: Any = None,
) -> None:
    """Write a cache to a safetensors file. Packed tensors stay packed; growing caches lose their spare room.

    Every tensor in the file is named by its place in the cache. The file's metadata describe the tensors in JSON under
    ``content``: the layout, axes, dtype and shape of packed tensors, and all other state of the cache, such as its
    number of tokens. ``layouts`` gives the places of bytes in a block. ``digests`` holds the XXH3 digest of each
    tensor, and ``digest`` covers all metadata. The file is written under another name in the same folder, flushed to
    the disk, and then renamed, so ``path`` never holds an incomplete cache.

    With ``context_parallel`` or ``tensor_parallel``, all ranks call it at the same time, and ``path`` is a folder that
    they share. Each rank writes the tokens and the heads that it holds to its own file. Rank 0 then writes the index,
    ``index.json``, in the same way. Any number of ranks can load the cache.

    Args:
        cache: a tensor, packed or plain; lists, tuples and dicts of tensors; or a cache of Transformers (static,
            dynamic, with sliding windows, encoder-decoder).
        path: the file; an existing regular file is replaced. For several ranks the folder; an earlier save in it is
            replaced.
        metadata: names and values that :func:`load_cache` can check.
        model: the model that computed the cache. The file gets its fingerprint, which :func:`load_cache` can check:
            another model cannot use the cache. All ranks of a distributed model must make this call.
        context_parallel: the ranks that divide the tokens of the cache, as for :func:`kvcompile.kvquant`.
        tensor_parallel: the ranks that divide the heads of the cache, a DeviceMesh of one dimension or a process group.

    Raises:
        CacheFileError: the cache contains an unsupported object, and the message names its place; the cache holds no
            tensors; ``path`` is a symbolic link or not a regular file; ``metadata`` has an entry that the file needs
            itself; or the ranks hold different caches. If one rank fails, every rank raises its error.
        OptionsError: ``model`` is not a module; or ``context_parallel`` or ``tensor_parallel`` is neither a DeviceMesh
            of one dimension nor a process group with this process.
        OSError: the file cannot be written.
    """
    path, ranks = Path(path), Ranks.of(context_parallel, tensor_parallel, "save_cache")
    if taken := sorted(set(OWN_ENTRIES) & set(metadata or {})):
        raise CacheFileError(f"save_cache: the file writes the metadata {taken[0]!r} itself; choose another name")
    fingerprint = {"fingerprint": _fingerprint(model, "save_cache")} if model is not None else {}
    for name, value in (metadata or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise CacheFileError(
                f"save_cache: metadata are names and texts, but {shown(name)} is {shown(value)}; give a string"
            )
    if ranks is not None:
        save_on_ranks(cache, path, metadata or {}, fingerprint, ranks)
        return
    check_replaceable(path)
    writer = Writer()
    try:
        content = writer.describe(cache, "")
    except RecursionError:
        raise CacheFileError(
            "save_cache: the cache contains itself, or nests too many levels; save a flat dict"
        ) from None
    if not writer.tensors:
        raise CacheFileError("save_cache: the cache holds no tensors; save it after the model has read a prompt")
    header = {
        **dict(metadata or {}),
        **fingerprint,
        "format": FORMAT,
        "version": str(VERSION),
        "content": json.dumps(content),
        "layouts": json.dumps(places_in_blocks(content)),
        "digests": json.dumps(digests.of_tensors(writer.tensors)),
        **objects.versions(),
    }
    header["digest"] = digests.of_header(header)
    write_tensors(writer.tensors, path, header)


def load_cache(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    metadata: Mapping[str, str] | None = None,
    *,
    model: nn.Module | None = None,
    verify: bool = True,
    context_parallel: Any = None,
    tensor_parallel: Any = None,
) -> Any:
    """Load a cache that :func:`save_cache` wrote. The result has its own storage and can be extended.

    With ``context_parallel`` or ``tensor_parallel``, all ranks call it at the same time. Each rank loads the tokens and
    heads that it holds, whatever the number of ranks that saved the cache. Without them, one process loads all of it.

    Args:
        path: the file, or the folder of several ranks.
        device: device of the loaded tensors.
        metadata: names and values that the file must have, as given to :func:`save_cache`.
        model: the model that will continue the cache. The file must have its fingerprint. All ranks of a distributed
            model must make this call.
        verify: compare every tensor with its digest. False skips this check, which reads each byte once more; the
            description is always checked.
        context_parallel: the ranks that will divide the tokens of the cache, as for :func:`kvcompile.kvquant`.
        tensor_parallel: the ranks that will divide its heads, a DeviceMesh of one dimension or a process group.

    Raises:
        CacheFileError: the file is not a cache, is damaged, has another format version, comes from another minor
            version of Transformers or from another model, has other ``metadata``, or its bytes contradict its
            description; a file of the folder is missing or belongs to another save; or the ranks cannot divide the
            cache. If one rank fails, every rank raises its error.
        OptionsError: ``model`` is not a module; ``device`` is not a device, or cannot be used here; or
            ``context_parallel`` or ``tensor_parallel`` is neither a DeviceMesh of one dimension nor a process group
            with this process.
        OSError: the file cannot be read; FileNotFoundError if it does not exist.
        torch.OutOfMemoryError: the device has no room for the cache.
    """
    path, ranks = _path(path), Ranks.of(context_parallel, tensor_parallel, "load_cache")
    fingerprint = _fingerprint(model, "load_cache") if model is not None else None
    device, expected = _device(device), dict(metadata or {})
    if ranks is None:
        return _load(path, device, expected, fingerprint, verify, None)[0]
    loaded: list[Any] = []

    def load() -> str:
        cache, save = _load(path, device, expected, fingerprint, verify, ranks)
        loaded.append(cache)
        return save

    if len(set(ranks.together("load_cache", load))) > 1:
        raise CacheFileError(f"load_cache: {path} was replaced while ranks were reading it; load it again")
    return loaded[0]


def _fingerprint(model: Any, caller: str) -> str:
    """The fingerprint of ``model``, a module or a compiled one; ``caller`` is the function that the user called."""
    if not isinstance(model, nn.Module):
        raise OptionsError(f"{caller}: model is {shown(model)}; pass the torch.nn.Module that computes with the cache")
    return digests.of_model(model)


def _path(path: str | os.PathLike[str]) -> Path:
    """``path``; CacheFileError if it cannot be the path of a file."""
    if not (text := os.fspath(path)) or "\0" in text:
        raise CacheFileError(f"load_cache: {shown(text)} is not a path; give it the file that save_cache wrote")
    return Path(path)


def _check_usable(device: torch.device) -> None:
    """Raise OptionsError if this process cannot use ``device``, before an error on it could blame the file."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: this PyTorch has no code for such devices
        raise OptionsError(
            f"load_cache: device {str(device)!r} cannot be used here ({one_line(error)}); the file was not read, so "
            "give another device, such as 'cpu'"
        ) from error


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError):
        raise OptionsError(f"load_cache: device is {shown(device)}; pass a device such as 'cpu' or 'cuda:0'") from None


def _load(
    path: Path,
    device: torch.device,
    metadata: Mapping[str, str],
    fingerprint: str | None,
    verify: bool,
    ranks: Ranks | None,
) -> tuple[Any, str]:
    """The cache of this rank, and the identifier of the save."""
    _check_usable(device)
    try:
        with Source(path) as source:
            check_origin(source, metadata, fingerprint)
            share = share_of(source.content, ranks, {name: one.shape for name, one in source.tensors.items()})
            tensors = source.read(share.ranges, verify)
            shard = ranks.shard if ranks is not None else None
            reader = Reader(tensors, source.header, device, path, shard)
            cache = reader.make(share.content)
            if ranks is None:
                reader.check_all_used()
            return cache, source.save
    except (CacheFileError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = cut(error.filename)  # Python's message repeats a path of any length
        raise
    except _NOT_VALID as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise CacheFileError(
            f"{path}: its description is not valid ({reason}); compute it again from its prompt"
        ) from error
