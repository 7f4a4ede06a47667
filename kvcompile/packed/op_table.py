"""The table of operators that have a handler for packed caches, and what an operator's schema says about aliasing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Handler = Callable[..., Any]
_H = TypeVar("_H", bound=Handler)

HANDLERS: dict[Any, Handler] = {}
"""For packed caches."""

STACK_HANDLERS: dict[Any, Handler] = {}
"""For stacks of packed caches."""

POOL_HANDLERS: dict[Any, Handler] = {}
"""For packed pools of blocks."""


def handles(*ops: Any, table: dict[Any, Handler] = HANDLERS) -> Callable[[_H], _H]:
    """Registers a handler for operators (overloads).

    It is called as the operator is, for calls with a packed cache somewhere among the arguments, and returns
    ``NotImplemented`` for forms that it leaves to the general rules.
    """

    def register(handler: _H) -> _H:
        table.update(dict.fromkeys(ops, handler))
        return handler

    return register


def handles_stack(*ops: Any) -> Callable[[_H], _H]:
    """As :func:`handles`, for calls with a stack of packed caches among the arguments."""
    return handles(*ops, table=STACK_HANDLERS)


def handles_pool(*ops: Any) -> Callable[[_H], _H]:
    """As :func:`handles`, for calls with a packed pool among the arguments."""
    return handles(*ops, table=POOL_HANDLERS)


def is_view_op(func: Any) -> bool:
    """Whether results of the operator alias an argument that it does not write."""
    returns = func._schema.returns
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in returns)


def views_of_normal_tensors(func: Any, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """The mode to run a view operator in: under ``inference_mode`` a view of a normal tensor is a normal tensor."""
    if torch.is_inference_mode_enabled() and is_view_op(func) and not args[0].is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors of this call that the operator mutates."""
    written: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written
