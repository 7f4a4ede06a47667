"""Dynamo's registry of backends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._dynamo import lookup_backend, register_backend
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend

NAME = "kvquant"
"""The name of our backend in Dynamo's registry."""

_REGISTERING = threading.Lock()


class _Backends(dict[str, Callable[..., Any]]):
    """Dynamo's table of loaded backends, in which ``kvquant`` may be registered again.

    ``lookup_backend`` loads an entry point and registers it without a lock, and ``register_backend`` raises an error if
    a name is in the table. If two threads look up ``kvquant`` for the first time, both load it. Without this table the
    second thread would fail.
    """

    def __contains__(self, name: object) -> bool:
        return name != NAME and super().__contains__(name)


def allow_registration_by_threads() -> None:
    """Make the first look-ups of ``kvquant`` by several threads succeed, if Dynamo still has this table."""
    if isinstance(table := getattr(registry, "_COMPILER_FNS", None), dict):
        registry._COMPILER_FNS = _Backends(table)


def ensure_registered(backend: Callable[..., Any], name: str) -> None:
    """Register ``backend`` with Dynamo, unless a backend is registered as ``name``.

    Dynamo keeps weak references to the inputs of a graph. It drops them after the compilation only if the backend, or a
    backend that equals it, is registered. Otherwise no plain cache could be adopted, and the report would say so.
    """
    with _REGISTERING:
        try:
            lookup_backend(name)  # also loads and registers the backend of an entry point
        except InvalidBackend:
            register_backend(backend, name=name, tags=("experimental",))  # the tag hides it from list_backends()


def error_of_backend(error: Exception) -> Exception:
    """The error that a backend raised and Dynamo has wrapped; any other error unchanged."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error
