"""Dynamo's guards: widened for packed caches, and faster for distributed parameters.

Without one of these names the guards stay. Dynamo then compiles a function again after a call has packed plain caches,
and every call compares the specification of every DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch._dynamo.config
from torch import Tensor
from torch.fx import Node

from kvcompile.compat.graphs import dynamo_source
from kvcompile.compat.tensors import is_traceable_wrapper_subclass

try:
    from torch._C._dynamo.guards import TensorGuards
    from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
    from torch._dynamo.source import AttrSource, SubclassAttrListSource
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
        wideners: for tensors among the inputs of Dynamo's graph, a function that returns the check that replaces all of
            Dynamo's own checks of this input. It takes Dynamo's check of a plain tensor: of the input itself, or, if
            this is a tensor subclass, of a plain tensor of the same shape, strides and dtype.
        words: what the new checks admit, for the log of recompilations.
    """
    of_source = {dynamo_source(placeholder): widen for placeholder, widen in wideners.items()}
    inner = {source for placeholder in wideners for source in _inner_sources(placeholder)}
    for guard in _guards():
        kind, source = guard.create_fn_name(), guard.originating_source
        if source in of_source and kind == "TENSOR_MATCH":
            guard.create_fn = _widened(guard.create_fn, of_source[source], words)
        elif source in inner or (source in of_source and kind in _CHECKS_OF_CLASS):
            guard.create_fn = _no_guard  # the check of a tensor includes its class


_CHECKS_OF_CLASS = ("TYPE_MATCH", "TENSOR_SUBCLASS_METADATA_MATCH")


def _inner_sources(placeholder: Node) -> set[Any]:
    """Dynamo's sources of the inner tensors of an input, and of the list of their names; empty for a plain tensor."""
    value, source = placeholder.meta.get("example_value"), dynamo_source(placeholder)
    if not is_traceable_wrapper_subclass(value):
        return set()
    return {SubclassAttrListSource(source), *(AttrSource(source, name) for name in value.__tensor_flatten__()[0])}


def remember_specs() -> None:
    """Let guards on the specification of a DTensor remember the object that they admitted last.

    Call it in a backend, before Dynamo builds its guards. A call then compares an object with itself, in place of its
    mesh and its placements, which saves 1.5 us for each DTensor. Nothing changes the specification of a DTensor in
    place. Guards that PyTorch will store in a file stay unchanged.
    """
    for guard in _guards():
        if guard.create_fn_name() == "DTENSOR_SPEC_MATCH":
            guard.create_fn = _remembering(guard.create_fn)


def _guards() -> Iterable[Any]:
    """The guards of the function that is being compiled; none if they must stay unchanged."""
    context = TracingContext.try_get() if CAN_WIDEN_GUARDS else None
    if context is None or getattr(torch._dynamo.config, "caching_precompile", False):
        return ()
    return context.guards_context.dynamo_guards  # type: ignore[no-any-return]


def _widened(create: Callable[..., Any], widen: Callable[[Check], Check], words: str) -> Callable[[Any, Any], None]:
    def TENSOR_MATCH(builder: Any, guard: Any) -> None:  # filters of guards look for this name
        manager = builder.get_guard_manager(guard)
        widening = _WideningManager(manager, widen, get_verbose_code_parts(words, guard))
        with _adding_to(builder, widening):
            create(builder, guard)
        # Dynamo checks that no two of these tensors are the same; the check still covers this one.
        managers = builder.no_tensor_aliasing_guard_managers
        managers[:] = [manager if known is widening else known for known in managers]

    return TENSOR_MATCH


def _remembering(create: Callable[..., Any]) -> Callable[[Any, Any], None]:
    def DTENSOR_SPEC_MATCH(builder: Any, guard: Any) -> None:  # filters of guards look for this name
        with _adding_to(builder, _RememberingManager(builder.get_guard_manager(guard))):
            create(builder, guard)

    return DTENSOR_SPEC_MATCH


@contextmanager
def _adding_to(builder: Any, manager: Any) -> Iterator[None]:
    """Let Dynamo's builder of guards add to ``manager``."""
    builder.get_guard_manager = lambda guard: manager
    try:
        yield
    finally:
        del builder.get_guard_manager


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
        own = guards(_plain(value), dynamic_dims_sizes=[sizes], dynamic_dims_strides=[strides])
        self._manager.add_lambda_guard(self._widen(own.check), self._words, user_stack)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def _plain(value: Tensor) -> Tensor:
    """A plain tensor in the place of a subclass; guards get its sizes and strides separately."""
    if not is_traceable_wrapper_subclass(value):
        return value
    with torch.inference_mode(value.is_inference()):
        return torch.empty(1, dtype=value.dtype, device=value.device).expand(value.shape)


class _RememberingManager:
    """The guard manager of one value, whose checks in Python run only for another object than the last one."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def add_lambda_guard(self, check: Check, *words: Any) -> None:
        admitted = None

        def known_or_admitted(value: Any) -> bool:
            nonlocal admitted
            if value is not admitted:
                if not check(value):
                    return False
                admitted = value
            return True

        self._manager.add_lambda_guard(known_or_admitted, *words)
