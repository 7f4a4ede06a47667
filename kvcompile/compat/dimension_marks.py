"""Copies marks such as ``torch._dynamo.mark_dynamic`` from a packed cache to its inner tensors.

Dynamo creates separate symbols for the sizes of a tensor subclass and for the sizes of its inner tensors. If an inner
size stayed constant, the outer size that the user marked would become constant too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

try:
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
except ImportError:  # without it, guards on symbolic sizes of packed caches may fail
    set_code_exec_strategy = None  # type: ignore[assignment]

Function = TypeVar("Function", bound=Callable[..., Any])

_WEAKLY_DYNAMIC, _STATIC = "_dynamo_weak_dynamic_indices", "_dynamo_static_indices"

_INNER_MARKS = {"_dynamo_dynamic_indices": _WEAKLY_DYNAMIC, _WEAKLY_DYNAMIC: _WEAKLY_DYNAMIC, _STATIC: _STATIC}
"""Maps each mark of the outer tensor to the mark that its inner tensors get.

``mark_dynamic`` makes Dynamo raise if the size becomes constant. The error should name the user's tensor, so inner
tensors get the weak dynamic mark, which never raises.
"""


_MARKS = (*_INNER_MARKS, "_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on", "_has_dynamo_dim_marking")


def read_by_guards(function: Function) -> Function:
    """Make Dynamo skip ``function`` and its callees. Guards run while Dynamo is active, so it would compile them."""
    if set_code_exec_strategy is not None:
        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


def mark_weakly_dynamic(tensor: Tensor, dim: int) -> None:
    """Make this size symbolic at once, as ``torch._dynamo.maybe_mark_dynamic`` does, without importing Dynamo."""
    _mark(tensor, _WEAKLY_DYNAMIC, {dim})


def pass_marks_on(outer: Tensor, inner: Tensor, inner_dims: Mapping[int, int]) -> None:
    """Mark each size of ``inner`` that determines a marked size of ``outer``.

    Args:
        outer: a packed cache.
        inner: an inner tensor of ``outer``.
        inner_dims: maps a dimension of ``outer`` to the dimension of ``inner`` that determines its size. Dimensions of
            ``outer`` that depend on no size of ``inner`` are missing.
    """
    if not is_marked(outer):
        return
    for mark, inner_mark in _INNER_MARKS.items():
        dims = {inner_dims[dim] for dim in getattr(outer, mark, ()) if dim in inner_dims}
        if dims:
            _mark(inner, inner_mark, dims)


def is_marked(tensor: Tensor) -> bool:
    """Whether a dimension of ``tensor`` has a mark. Looking up a missing attribute would take a microsecond."""
    return not tensor.__dict__.keys().isdisjoint(_MARKS)


def drop_marks(tensor: Tensor) -> None:
    """Remove every mark that ``mark_dynamic``, ``maybe_mark_dynamic`` and ``mark_static`` set on a tensor."""
    if is_marked(tensor):
        for mark in _MARKS:
            tensor.__dict__.pop(mark, None)


def _mark(tensor: Tensor, mark: str, dims: set[int]) -> None:
    setattr(tensor, mark, getattr(tensor, mark, set()) | dims)
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
