"""What ``torch._dynamo.mark_dynamic`` and the like say of a packed cache, said of the tensors that it is made of.

Dynamo makes symbols of sizes of a tensor subclass and of its inner tensors, each for itself. Inner sizes that stayed
constants would make constants of the sizes that the user marked.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_WEAKLY_DYNAMIC, _STATIC = "_dynamo_weak_dynamic_indices", "_dynamo_static_indices"

_INNER_MARKS = {"_dynamo_dynamic_indices": _WEAKLY_DYNAMIC, _WEAKLY_DYNAMIC: _WEAKLY_DYNAMIC, _STATIC: _STATIC}
"""Which mark of an inner tensor follows from one of the outer tensor.

``mark_dynamic`` demands an error if the size becomes a constant. The user's tensor has that mark and is what the error
should name, so inner tensors have the mark that demands none.
"""


_MARKS = (*_INNER_MARKS, "_dynamo_dynamic_range", "_dynamo_hint_overrides", "_specialize_on", "_has_dynamo_dim_marking")


def mark_weakly_dynamic(tensor: Tensor, dim: int) -> None:
    """As ``torch._dynamo.maybe_mark_dynamic``, without importing Dynamo: compile this size as symbolic at once."""
    _mark(tensor, _WEAKLY_DYNAMIC, {dim})


def pass_marks_on(outer: Tensor, inner: Tensor, inner_dims: Mapping[int, int]) -> None:
    """Mark the sizes of ``inner`` on which marked sizes of ``outer`` depend.

    Args:
        outer: a packed cache.
        inner: a tensor that it is made of.
        inner_dims: for each dimension of ``outer`` that of ``inner`` whose size its own depends on, if there is one.
    """
    if outer.__dict__.keys().isdisjoint(_INNER_MARKS):
        return  # as in nearly every call: asking a tensor for an attribute that it lacks takes a microsecond
    for mark, inner_mark in _INNER_MARKS.items():
        dims = {inner_dims[dim] for dim in getattr(outer, mark, ()) if dim in inner_dims}
        if dims:
            _mark(inner, inner_mark, dims)


def drop_marks(tensor: Tensor) -> None:
    """Undo what ``mark_dynamic``, ``maybe_mark_dynamic`` and ``mark_static`` did to a tensor."""
    if not tensor.__dict__.keys().isdisjoint(_MARKS):
        for mark in _MARKS:
            tensor.__dict__.pop(mark, None)


def _mark(tensor: Tensor, mark: str, dims: set[int]) -> None:
    setattr(tensor, mark, getattr(tensor, mark, set()) | dims)
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]
