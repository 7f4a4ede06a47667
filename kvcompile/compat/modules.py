"""Private attributes of compiled modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

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
    """The module behind the result of ``torch.compile(module)``; anything else itself."""
    return getattr(module, "_orig_mod", module)
