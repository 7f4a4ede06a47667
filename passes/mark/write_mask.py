"""Stage A, rewriting: one mask that does to scores what a model does, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from kvcompile.passes.mark.calls import value_of
from kvcompile.passes.mark.read_scores import ABSORBING
from kvcompile.passes.mark.values import Add, BiasStep, Fill, Floor, Multiply, Operand
from kvcompile.passes.mark.writer import GraphWriter

LOWEST = torch.finfo(torch.float32).min
"""Stands for the one finite constant of a mask that would not absorb every score."""


def write_mask(
    writer: GraphWriter,
    steps: tuple[BiasStep, ...],
    *,
    place: Callable[[Operand], Node],
    multiply: Callable[[Node, Multiply], Node],
) -> Node | None:
    """Insert a mask, bool or float, of all the steps; None if there are none.

    Args:
        writer: inserts.
        steps: what is done to the scores, in this order; :func:`kvcompile.passes.mark.read_scores.check_masks` has
        passed.
        place: inserts an operand as one that is broadcast against [batch, num_heads, q_len, kv_len].
        multiply: inserts the product of a tensor that is broadcast so, and a factor.
    """
    if all(isinstance(step, Fill) and step.value == -torch.inf for step in steps):
        return _bool_mask(writer, steps, place)
    first = steps[0]
    if len(steps) == 1 and isinstance(first, Add) and first.factor == 1 and _is_narrow_float(first.operand):
        return place(first.operand)
    # In float32, whatever the model adds them in: a sum of two lowest float16 numbers would be -inf.
    mask = writer.call(torch.zeros, (), dtype=torch.float32, device=value_of(writer.like).device)
    for step in steps:
        if isinstance(step, Add):
            addend = writer.call("to", place(step.operand), torch.float32)
            mask = writer.call(torch.add, mask, addend, alpha=step.factor)
        elif isinstance(step, Fill):
            value = step.value if step.value <= ABSORBING else LOWEST
            where = place(step.operand)
            mask = writer.call(torch.where, where, *((value, mask) if step.where else (mask, value)))
        elif isinstance(step, Floor):
            mask = writer.call(torch.clamp, mask, min=step.value)
        else:
            mask = multiply(mask, step)
    return mask


def _is_narrow_float(operand: Operand) -> bool:
    dtype = value_of(operand.node).dtype
    return bool(dtype.is_floating_point) and dtype.itemsize <= 4


def _bool_mask(writer: GraphWriter, steps: tuple[BiasStep, ...], place: Callable[[Operand], Node]) -> Node | None:
    """Where attention is allowed: nowhere where a step fills in -inf."""
    mask = None
    for step in steps:
        assert isinstance(step, Fill), "nothing else makes a bool mask"
        allowed = place(step.operand)
        allowed = writer.call(torch.logical_not, allowed) if step.where else allowed
        mask = allowed if mask is None else writer.call(torch.logical_and, mask, allowed)
    return mask
