"""Tables of operator handlers, the general rules for all other operators, and queries about aliasing in schemas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from kvcompile.compat.tensors import schema_of

Handler = Callable[..., Any]
_H = TypeVar("_H", bound=Handler)

GENERAL_RULES: list[Handler] = []
"""Rules ``rule(func, args, kwargs)`` for operators without a handler. A rule may return ``NotImplemented``."""


def handles(packed_type: Any, *ops: Any) -> Callable[[_H], _H]:
    """Registers a handler for operators (overloads) in the table of a class of packed tensors.

    The dispatch calls the handler if the first packed argument is of that class. The handler takes the arguments of the
    operator. It returns ``NotImplemented`` to leave a call to the general rules.
    """

    def register(handler: _H) -> _H:
        packed_type.handlers.update(dict.fromkeys(ops, handler))
        return handler

    return register


def general_rule(rule: _H) -> _H:
    """Adds a rule to :data:`GENERAL_RULES`. No two rules apply to the same operator, so their order does not matter."""
    GENERAL_RULES.append(rule)
    return rule


def is_view_op(func: Any) -> bool:
    """Whether a result of the operator aliases an argument that the operator does not write."""
    returns = schema_of(func).returns
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in returns)


def views_of_normal_tensors(func: Any, args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Leaves ``inference_mode`` for a view operator on a normal tensor, because such a view is a normal tensor too."""
    if torch.is_inference_mode_enabled() and is_view_op(func) and not args[0].is_inference():
        return torch.inference_mode(False)
    return nullcontext()


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of this call that the operator mutates."""
    written: list[Any] = []
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written.extend(value if isinstance(value, (list, tuple)) else [value])
    return written
