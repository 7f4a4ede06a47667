"""Private attributes of compiled modules, and the module whose call Dynamo traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import symbolic_convert

# The attribute of a module that holds the result of ``Module.compile()``; calls of the module go there.
COMPILED_CALL = "_compiled_call_impl"


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
