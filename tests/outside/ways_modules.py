"""The ways in which the cache tests of torchtune and litgpt run. Both keep their caches in buffers of a module.

- ``packing``: the module of the cache has packed buffers from the start. Nothing is compiled.
- ``compile``: a model is compiled with ``kvquant`` as soon as its caches are set up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import kvcompile
from kvcompile.kernels.layout.packed_layout import Role
from outside.plugin import LOSSLESS, Way, packed_in_place_of
from outside.stand_ins import stand_ins

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Classes:
    """The classes of a project.

    Attributes:
        module: the module that has them.
        cache: the class of the cache.
        buffers: the buffers of the cache, and their roles.
        model: the class of the model.
        set_up: its method that makes the caches.
        not_needed: packages that the project imports, and that its caches and attention do not use.
    """

    module: str
    cache: str
    buffers: tuple[tuple[str, Role], ...]
    model: str
    set_up: str
    not_needed: tuple[str, ...] = ()

    def plain(self) -> Way:
        return Way("plain", lambda policy: [stand_ins(*self.not_needed)])

    def by_packing(self, policy: str = LOSSLESS) -> Way:
        return Way("packing", self._packing, policy)

    def by_compile(self, policy: str = LOSSLESS) -> Way:
        return Way("compile", self._compile, policy)

    def _packing(self, policy: str) -> Iterator[Patch]:
        yield stand_ins(*self.not_needed)
        cache = getattr(importlib.import_module(self.module), self.cache)
        init = cache.__init__

        def packed_init(module: Any, *args: Any, **kwargs: Any) -> None:
            init(module, *args, **kwargs)
            for name, role in self.buffers:
                module._buffers[name] = packed_in_place_of(module._buffers[name], role, policy)

        yield mock.patch.object(cache, "__init__", packed_init)

    def _compile(self, policy: str) -> Iterator[Patch]:
        yield stand_ins(*self.not_needed)
        model = getattr(importlib.import_module(self.module), self.model)
        set_up = getattr(model, self.set_up)

        def set_up_and_compile(module: Any, *args: Any, **kwargs: Any) -> None:
            set_up(module, *args, **kwargs)
            module.compile(backend=kvcompile.kvquant(policy=policy, on_unsupported="ignore"))

        yield mock.patch.object(model, self.set_up, set_up_and_compile)


TORCHTUNE = Classes(
    module="torchtune.modules",
    cache="KVCache",
    buffers=(("k_cache", "key"), ("v_cache", "value")),
    model="TransformerDecoder",
    set_up="setup_caches",
    not_needed=("torchvision", "kagglehub", "blobfile"),
)
LITGPT = Classes(
    module="litgpt.model", cache="KVCache", buffers=(("k", "key"), ("v", "value")), model="GPT", set_up="set_kv_cache"
)
