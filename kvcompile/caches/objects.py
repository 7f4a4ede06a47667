"""Lookup of cache classes by name, and reconstruction of their objects from saved state."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
import torch._dynamo
from torch import Tensor

from kvcompile.caches import blockwise_window
from kvcompile.errors import CacheFileError, one_line, shown

_MODULES = "transformers.cache_utils", blockwise_window.__name__


def is_known(cls: Any) -> TypeGuard[type]:
    """Whether ``cls`` is a cache class or layer class of Transformers, or a layer class of kvcompile.

    Some empty layer classes have no common base.
    """
    return isinstance(cls, type) and cls.__module__ in _MODULES


def versions() -> dict[str, str]:
    """The versions of the libraries whose classes a file names."""
    transformers = sys.modules.get("transformers")
    return {"transformers": str(transformers.__version__)} if transformers is not None else {}


def check_version(header: Mapping[str, str], path: Any) -> None:
    """Raise CacheFileError if a file comes from another minor version of Transformers, as attributes may differ."""
    import transformers

    written, here = (_minor(version) for version in (header.get("transformers", ""), transformers.__version__))
    if written != here:
        raise CacheFileError(
            f"{path} holds a cache of Transformers {one_line(header.get('transformers'))}, but Transformers "
            f"{transformers.__version__} is installed, whose caches may differ; compute the cache again from its prompt"
        )


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def known_class(name: str, path: Any) -> type:
    """The class called ``name``; CacheFileError if it is not a cache class."""
    from transformers import cache_utils

    cls = getattr(cache_utils, name, None) or getattr(blockwise_window, name, None)
    if not is_known(cls):
        raise CacheFileError(
            f"{path}: Transformers has no cache class {shown(name)}; compute the cache again from its prompt"
        )
    return cls


def restored(cls: type, state: Mapping[str, Any]) -> Any:
    """An object of ``cls`` with the attributes ``state``."""
    result: Any = object.__new__(cls)
    vars(result).update(state)
    if getattr(cls, "is_compileable", False) is True:  # a layer, whose tensors have fixed addresses for CUDA graphs
        for value in state.values():
            if isinstance(value, Tensor):
                torch._dynamo.mark_static_address(value)
    return result
