"""Private names of AOTAutograd's cache of compiled graphs. If one is missing, every process runs the passes again.

The cache stores either Inductor's key of a compiled graph, or the object that a backend's inner compiler returned.
PyTorch calls the second kind of entry bundled. Only a bundled entry can hold kvcompile's work around a compiled graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch._functorch.config as settings

try:
    from torch._functorch._aot_autograd.aot_autograd_result import CompiledForward
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import OutputCode

    CAN_STORE = hasattr(settings, "bundled_autograd_cache") and hasattr(settings, "enable_autograd_cache")
except ImportError:
    CAN_STORE = False
    CompiledForward, BypassAOTAutogradCache, OutputCode = object, Exception, object  # type: ignore[misc,assignment]

NotStored = BypassAOTAutogradCache
"""Raised by code that cannot be stored."""

StoredCode = OutputCode
"""The class of objects that the cache can store."""


def without_autograd_cache() -> AbstractContextManager[Any]:
    """Switch off the cache. Its key does not cover the passes of a backend."""
    return settings.patch(enable_autograd_cache=False)


def storing_own_code() -> AbstractContextManager[Any]:
    """Let the cache store the object that the inner compiler returns."""
    return settings.patch(bundled_autograd_cache=True)


def storing_by_key() -> AbstractContextManager[Any]:
    """Within :func:`storing_own_code`: let Inductor use its own cache, which would otherwise be off."""
    return settings.patch(bundled_autograd_cache=False)


def entry_in_inductors_cache(compiled: Any) -> Any:
    """The entry of ``compiled`` in Inductor's cache. Its ``load`` and ``post_compile`` give the code to a process.

    Raises:
        NotStored: Inductor's cache does not have this code.
    """
    key = getattr(compiled, "_fx_graph_cache_key", None)
    if key is None:
        raise NotStored("Inductor's cache does not have the code of the rewritten graph")
    return CompiledForward((key, compiled._fx_graph_cache_debug_lines), compiled.guards_expr)
