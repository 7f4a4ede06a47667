"""Write one mask that has the effect of all steps by which a model changes its scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from kvcompile.passes.mark.calls import value_of
from kvcompile.passes.mark.read_scores import ABSORBING
from kvcompile.passes.mark.values import Add, BiasStep, Fill, Floor, Multiply, Operand
from kvcompile.passes.mark.writer import GraphWriter

LOWEST = torch.finfo(torch.float32).min
"""The number that replaces the only finite constant of a mask if this constant does not absorb every score."""


def write_mask(
    writer: GraphWriter,
    steps: tuple[BiasStep, ...],
    *,
    place: Callable[[Operand], Node],
    multiply: Callable[[Node, Multiply], Node],
) -> Node | None:
    """Insert one mask, bool or float, for all steps; None if there are no steps.

    Args:
        writer: inserts the nodes.
        steps: the steps that change the scores, in this order. They have passed
            :func:`kvcompile.passes.mark.read_scores.check_masks`.
        place: inserts a view of an operand that broadcasts to [batch, num_heads, q_len, kv_len].
        multiply: inserts the product of such a tensor and a factor.
    """
    if all(isinstance(step, Fill) and step.value == -torch.inf for step in steps):
        return _bool_mask(writer, steps, place)
    first = steps[0]
    if len(steps) == 1 and isinstance(first, Add) and first.factor == 1 and _is_narrow_float(first.operand):
        return place(first.operand)
    # The mask is float32 even if the model adds in float16, where the sum of two lowest numbers would be -inf.
    mask = writer.call(torch.zeros, (), dtype=torch.float32, device=value_of(writer.like).device)
    for step in steps:
        if isinstance(step, Add):
            addend = writer.call("to", place(step.operand), torch.float32)
            mask = writer.call(torch.add, mask, addend, alpha=step.factor)
        elif isinstance(step, Fill):
            value = step.value if step.value <= ABSORBING else LOWEST
            where = _bools(writer, place(step.operand))
            mask = writer.call(torch.where, where, *((value, mask) if step.where else (mask, value)))
        elif isinstance(step, Floor):
            mask = writer.call(torch.clamp, mask, min=step.value)
        else:
            mask = multiply(mask, step)
    return mask


def _bools(writer: GraphWriter, where: Node) -> Node:
    return where if value_of(where).dtype is torch.bool else writer.call("to", where, torch.bool)


def _is_narrow_float(operand: Operand) -> bool:
    dtype = value_of(operand.node).dtype
    return bool(dtype.is_floating_point) and dtype.itemsize <= 4


def _bool_mask(writer: GraphWriter, steps: tuple[BiasStep, ...], place: Callable[[Operand], Node]) -> Node | None:
    """A bool mask that is True where no step fills in -inf; None if there are no steps."""
    mask = None
    for step in steps:
        assert isinstance(step, Fill), "nothing else makes a bool mask"
        allowed = _bools(writer, place(step.operand))
        allowed = writer.call(torch.logical_not, allowed) if step.where else allowed
        mask = allowed if mask is None else writer.call(torch.logical_and, mask, allowed)
    return mask
