"""Dynamo's registry of backends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch._dynamo import lookup_backend, register_backend
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend

_REGISTERING = threading.Lock()


def ensure_registered(backend: Callable[..., Any], name: str) -> None:
    """Register ``backend`` with Dynamo, unless a backend is registered as ``name``.

    Dynamo keeps weak references to the inputs of a graph. It drops them after the compilation only if the backend, or a
    backend that equals it, is registered. Without that, no plain cache could be adopted, and the report would say so.
    """
    with _REGISTERING:
        try:
            lookup_backend(name)  # also loads and registers the backend of an entry point
        except InvalidBackend:
            register_backend(backend, name=name, tags=("experimental",))  # the tag hides it from list_backends()
        except AssertionError:
            lookup_backend(name)  # another thread has registered it between Dynamo's look and its own registration


def error_of_backend(error: Exception) -> Exception:
    """The error that a backend raised and Dynamo has wrapped; any other error unchanged."""
    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error
