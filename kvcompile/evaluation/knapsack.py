"""The multiple-choice knapsack: choose one option of every item, with the least total loss within a capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_STATES = 1 << 17
"""Largest number of states of the dynamic program, one for each capacity."""


@dataclass(frozen=True)
class Option:
    """The cost of one option, a whole number from 0, and its loss."""

    cost: int
    loss: float


class NoRoomError(ValueError):
    """Even the cheapest options do not fit; ``least`` is their total cost."""

    def __init__(self, least: int) -> None:
        self.least = least
        super().__init__(f"the cheapest options cost {least}")


def choose(slots: Sequence[Sequence[Option]], capacity: int) -> list[int]:
    """The index of the chosen option of every item: the choice of least total loss that costs at most ``capacity``.

    The method is dynamic programming over the capacity, in steps of the greatest common divisor of all differences of
    cost. The result is exact unless this takes more than MAX_STATES steps. In that case costs are rounded up to longer
    steps: the choice still fits, and is the best choice under the rounded costs.

    Raises:
        NoRoomError: no choice fits.
    """
    least = [min(option.cost for option in slot) for slot in slots]
    room = capacity - sum(least)
    if room < 0:
        raise NoRoomError(sum(least))
    extra = [[option.cost - base for option in slot] for slot, base in zip(slots, least, strict=True)]
    room = min(room, sum(max(costs) for costs in extra))
    step = max(math.gcd(*(cost for costs in extra for cost in costs)), math.ceil(room / MAX_STATES), 1)
    states = room // step + 1
    best = torch.zeros(states, dtype=torch.float64)
    taken = torch.zeros(len(slots), states, dtype=torch.int16)
    for index, (slot, costs) in enumerate(zip(slots, extra, strict=True)):
        reached = torch.full((states,), math.inf, dtype=torch.float64)
        for number, (option, cost) in enumerate(zip(slot, costs, strict=True)):
            steps = -(-cost // step)
            if steps >= states:
                continue
            loss = best[: states - steps] + option.loss
            better = loss < reached[steps:]
            reached[steps:] = torch.where(better, loss, reached[steps:])
            taken[index, steps:][better] = number
        best = reached
    chosen, state = [], states - 1
    for index in reversed(range(len(slots))):
        number = int(taken[index, state])
        chosen.append(number)
        state -= -(-extra[index][number] // step)
    return chosen[::-1]
