"""Dynamo's guard on the class and the sizes of a tensor, widened for packed caches.

Without one of these names the guard stays. Dynamo then compiles a function again after a call has packed plain caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch._dynamo.config
from torch.fx import Node

from kvcompile.compat.graphs import dynamo_source

try:
    from torch._C._dynamo.guards import TensorGuards
    from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
    from torch._guards import TracingContext

    CAN_WIDEN_GUARDS = hasattr(GuardBuilder, "TENSOR_MATCH") and hasattr(TensorGuards, "check")
except ImportError:
    CAN_WIDEN_GUARDS = False

Check = Callable[[Any], bool]
"""Whether compiled code may run with this value."""


def widen_tensor_guards(wideners: Mapping[Node, Callable[[Check], Check]], words: str) -> None:
    """Let the code that is being compiled also run with values of some inputs that Dynamo's guards would refuse.

    Call it in a backend, before Dynamo builds its guards. Guards that PyTorch will store in a file stay unchanged.

    Args:
        wideners: for tensors among the inputs of Dynamo's graph, a function that takes Dynamo's own check of this input
            and returns the check that replaces it.
        words: what the new checks admit, for the log of recompilations.
    """
    context = TracingContext.try_get() if CAN_WIDEN_GUARDS else None
    if context is None or getattr(torch._dynamo.config, "caching_precompile", False):
        return
    of_source = {dynamo_source(placeholder): widen for placeholder, widen in wideners.items()}
    for guard in context.guards_context.dynamo_guards:
        kind = guard.create_fn_name()
        widen = of_source.get(guard.originating_source) if kind in ("TENSOR_MATCH", "TYPE_MATCH") else None
        if widen is not None:  # the check of a tensor includes its class
            guard.create_fn = _widened(guard.create_fn, widen, words) if kind == "TENSOR_MATCH" else _no_guard


def _widened(create: Callable[..., Any], widen: Callable[[Check], Check], words: str) -> Callable[[Any, Any], None]:
    def TENSOR_MATCH(builder: Any, guard: Any) -> None:  # filters of guards look for this name
        manager = builder.get_guard_manager(guard)
        widening = _WideningManager(manager, widen, get_verbose_code_parts(words, guard))
        builder.get_guard_manager = lambda guard: widening
        try:
            create(builder, guard)
        finally:
            del builder.get_guard_manager
        # Dynamo checks that no two of these tensors are the same; the check still covers this one.
        managers = builder.no_tensor_aliasing_guard_managers
        managers[:] = [manager if known is widening else known for known in managers]

    return TENSOR_MATCH


def _no_guard(builder: Any, guard: Any) -> None:
    """Creates no guard."""


class _WideningManager:
    """The guard manager of one tensor, in which the widened check replaces the check of class and sizes."""

    def __init__(self, manager: Any, widen: Callable[[Check], Check], words: list[str]) -> None:
        self._manager, self._widen, self._words = manager, widen, words

    def add_tensor_match_guard(
        self, value: Any, sizes: Any, strides: Any, name: str, code: Any, user_stack: Any, *of_class: Any
    ) -> None:
        """Takes the arguments of the method of Dynamo's manager."""
        guards: Any = TensorGuards  # its declared signature lacks the tensors
        own = guards(value, dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides])
        self._manager.add_lambda_guard(self._widen(own.check), self._words, user_stack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
