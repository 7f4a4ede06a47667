"""Private attributes of compiled modules, the module whose call Dynamo traces, and running compiled code eagerly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import symbolic_convert

# The attribute of a module that holds the result of ``Module.compile()``; calls of the module go there.
COMPILED_CALL = "_compiled_call_impl"

_STANCE = threading.RLock()
"""Held while the stance of ``torch.compile`` is changed."""


def uncompiled_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, without the result of ``Module.compile()``. There is no fallback."""
    return module._call_impl


def is_compiled_in_place(module: Any) -> bool:
    """Whether ``Module.compile()`` has compiled a module."""
    return getattr(module, COMPILED_CALL, None) is not None


def drop_compiled_call(module: nn.Module) -> None:
    """Undo ``Module.compile()``."""
    setattr(module, COMPILED_CALL, None)


def original_module(module: Any) -> Any:
    """The module inside the result of ``torch.compile(module)``; other values are returned unchanged."""
    return getattr(module, "_orig_mod", module)


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether modules in ``module`` are compiled on their own."""
    parts = (part for part in module.modules() if part is not module)
    return any(is_compiled_in_place(part) or original_module(part) is not part for part in parts)


@contextlib.contextmanager
def running_eagerly() -> Iterator[None]:
    """Inside the ``with`` block, all compiled code runs eagerly, including modules that are compiled on their own.

    All threads share one stance of ``torch.compile``, so only one thread at a time changes it.
    """
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield


def traced_module() -> nn.Module | None:
    """The module whose call Dynamo traces in this thread; None if it traces a function, or nothing.

    Dynamo names the modules that a graph calls, but not the outermost module. Without the private names, the result is
    None.
    """
    running = getattr(getattr(symbolic_convert, "tls", None), "current_tx", None)
    scope = getattr(getattr(running, "output", None), "local_scope", None) or {}
    first = next(iter(scope.values()), None)  # not every method calls its module self
    callee = scope.get("self", (*scope.get("args", (first,)), None)[0])
    return callee if isinstance(callee, nn.Module) else None
