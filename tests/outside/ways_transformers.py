"""The ways in which tests of Transformers run.

- :data:`PLAIN`: unchanged. A ``CompileConfig`` with the default backend compiles with ``aot_eager``: the graphs are
  traced as for our backend, and no code is generated.
- :func:`by_config`: every ``CompileConfig`` with the default backend has ``kvquant`` as its backend. ``generate()`` on
  a cache that can be compiled has such a ``CompileConfig`` if the test gives none, on CPUs too.
- :func:`by_compile`: ``kvcompile.compile`` compiles each model before its first ``generate()``, except for calls with a
  ``compile_config``. This way reaches beam search and assisted decoding. Caches have exactly the room that a request
  asks for, as in Transformers; outside of the tests they have room for up to 63 more tokens.
- :func:`by_packing`: static caches of Transformers allocate packed keys and values. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import kvcompile
from kvcompile.caches import room
from kvcompile.generation.generate import Generation
from outside.plugin import LOSSLESS, Known, Way, packed_in_place_of

Patch = AbstractContextManager[Any]

_KNOWN = (
    Known(
        "test_assisted_decoding",
        r"Lists differ: \[torch\.Size",
        "Transformers cuts the attentions of assisted decoding to the tokens so far, also on a static cache of its "
        "own; the test expects attentions as wide as the static cache that kvcompile.compile makes",
    ),
)


def by_config(policy: str = LOSSLESS) -> Way:
    return Way("config", _config, policy)


def by_compile(policy: str = LOSSLESS) -> Way:
    return Way("compile", _compile, policy, _KNOWN)


def by_packing(policy: str = LOSSLESS) -> Way:
    return Way("packing", _packing, policy)


def _with_backend(backend: Any) -> Patch:
    """Give every ``CompileConfig`` with the default backend another one."""
    from transformers import CompileConfig

    init = CompileConfig.__init__

    def with_backend(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.backend == "inductor":
            self.backend, self.mode = backend, None

    return mock.patch.object(CompileConfig, "__init__", with_backend)


def _plain(policy: str) -> Iterator[Patch]:
    yield _with_backend("aot_eager")


PLAIN = Way("plain", _plain)


def _config(policy: str) -> Iterator[Patch]:
    from transformers import CompileConfig, GenerationMixin

    criteria = GenerationMixin._valid_auto_compile_criteria

    def with_default_config(self: Any, model_kwargs: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.compile_config is None:
            config.compile_config = CompileConfig()
        return criteria(self, model_kwargs, config, *args, **kwargs)

    yield _with_backend(kvcompile.kvquant(policy=policy, on_unsupported="ignore"))
    yield mock.patch.object(CompileConfig, "_compile_all_devices", True)
    yield mock.patch.object(GenerationMixin, "_valid_auto_compile_criteria", with_default_config)


def _compile(policy: str) -> Iterator[Patch]:
    from transformers import GenerationMixin

    generate = GenerationMixin.generate

    def compiled_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = (kwargs.get("generation_config"), self.generation_config)
        has_config = kwargs.get("compile_config") or any(getattr(config, "compile_config", None) for config in configs)
        if has_config or Generation.of(self) is not None or self._compiled_call_impl is not None:
            return generate(self, *args, **kwargs)
        kvcompile.compile(self, policy=policy, on_unsupported="ignore")
        return self.generate(*args, **kwargs)

    yield _with_backend("aot_eager")
    yield mock.patch.object(room, "room_for", lambda num_tokens, room=0: num_tokens)
    yield mock.patch.object(GenerationMixin, "generate", compiled_generate)


def _packing(policy: str) -> Iterator[Patch]:
    from transformers.cache_utils import StaticLayer

    initialize = StaticLayer.lazy_initialization

    def packed_initialization(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        if type(self) is StaticLayer:
            self.keys = packed_in_place_of(self.keys, "key", policy)
            self.values = packed_in_place_of(self.values, "value", policy)

    yield mock.patch.object(StaticLayer, "lazy_initialization", packed_initialization)
