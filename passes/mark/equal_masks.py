"""Decide whether two masks of Dynamo's graph are equal, although the model may compute each of them anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.graph.aten import computed_alike
from kvcompile.passes.mark.calls import CASTS, PERMUTATIONS, SAME_VALUE, VIEWS, read_call, value_of
from kvcompile.passes.mark.read_scalars import ELEMENTWISE

IsChanged = Callable[[Node], bool]
"""Whether anything in the graph changes the tensor of a node in place."""

_DETERMINED = (
    ELEMENTWISE | VIEWS | PERMUTATIONS | {"arange", "getitem", "size", "shape", "tril", "triu", "ones", "zeros"}
)
"""Operations whose result depends on nothing but their arguments."""

INVERSIONS = frozenset(("invert", "logical_not", "bitwise_not", "not_"))


def as_bools(mask: Any, is_changed: IsChanged) -> Any:
    """The bool tensor that ``mask`` casts to numbers, or ``mask`` itself; None if its numbers may not be bools."""
    while isinstance(value_of(mask), Tensor) and value_of(mask).dtype is not torch.bool:
        call = read_call(mask)
        if call is None or call.name not in CASTS or is_changed(mask):
            return None
        mask = call.get("input")
    return mask if isinstance(value_of(mask), Tensor) else None


def select_alike(one: Any, one_where: bool, other: Any, other_where: bool, is_changed: IsChanged) -> bool:
    """Whether mask ``one`` is ``one_where`` exactly where mask ``other`` is ``other_where``."""
    one, one_is_inverted = _without_inversions(one, is_changed)
    other, other_is_inverted = _without_inversions(other, is_changed)
    is_same_side = (one_where ^ one_is_inverted) == (other_where ^ other_is_inverted)
    return is_same_side and computed_alike(one, other, _calls_alike, is_changed)


def _without_inversions(mask: Any, is_changed: IsChanged) -> tuple[Any, bool]:
    """The mask that ``mask`` inverts, perhaps several times, and whether ``mask`` is its inverse."""
    is_inverted = False
    while isinstance(mask, Node) and not is_changed(mask):
        call = read_call(mask)
        source = call.get("input") if call is not None else None
        if call is None or not isinstance(value_of(source), Tensor) or value_of(source).dtype is not torch.bool:
            break
        is_zero = call.name == "eq" and call.get("other") in (0, False)
        if call.name in INVERSIONS or is_zero:
            is_inverted = not is_inverted
        elif call.name not in SAME_VALUE:
            break
        mask = source
    return mask, is_inverted


def _calls_alike(one: Node, other: Node) -> bool:
    """Whether two nodes of Dynamo's graph call the same operation, whose result depends on nothing but its operands."""
    call = read_call(one)
    is_determined = call is not None and call.name in _DETERMINED
    return is_determined and (one.op, one.target, one.kwargs.keys()) == (other.op, other.target, other.kwargs.keys())
