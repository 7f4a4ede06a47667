"""The time of a decode step, from the bytes that it reads.

A step that makes one token for each user reads the weights once and every user's cache once. On a GPU that is what it
takes; multiplications, launches, communication and the write of one token are not counted. So these times are a floor,
unless the efficiencies, the shares of the bandwidth that kernels reach, are measured ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import sympy

from kvcompile.planning.devices import Bandwidth
from kvcompile.planning.model_caches import CONTEXT
from kvcompile.planning.stored_caches import PolicyCaches
from kvcompile.planning.weights import Weights

WEIGHTS = "weights"
ALL = "all"


@dataclass(frozen=True)
class DecodeModel:
    """What a decode step costs.

    Attributes:
        bandwidth: that the memory delivers.
        weights: read once a step.
        users: sequences that a step advances.
        efficiency: by the name of a cache format or dtype, or ``weights``: the share of the bandwidth that reading it
            reaches; ``all`` for the rest, and 1 where nothing is given.
    """

    bandwidth: Bandwidth
    weights: Weights
    users: int = 1
    efficiency: Mapping[str, Fraction] = field(default_factory=dict)

    def cost(self, policy: PolicyCaches) -> sympy.Expr:
        """Bytes that the full bandwidth delivers in the time of a step, in ``CONTEXT``: piecewise linear, exact."""
        cost = sympy.Rational(self.weights.bytes_read(self.users)) / self._efficiency(WEIGHTS)
        for name, nbytes in policy.bytes_by_storage("stored").items():
            cost += self.users * nbytes / self._efficiency(name)
        return cost

    def seconds(self, policy: PolicyCaches, context: int) -> float:
        """Seconds of a step in which every user has ``context`` tokens."""
        return float(self.cost(policy).subs(CONTEXT, context) / self.bandwidth.bytes_per_second)

    def _efficiency(self, name: str) -> sympy.Rational:
        return sympy.Rational(self.efficiency.get(name, self.efficiency.get(ALL, Fraction(1))))


@dataclass(frozen=True)
class Payoff:
    """When a policy is faster than a baseline.

    Attributes:
        speedup: how many times as fast a step shall be.
        context: the first context at which it is; None if it never is.
        until: the last context before it is not any more; None if it stays so.
        greatest: the speedup that is reached or approached as the context grows, at most.
    """

    speedup: Fraction
    context: int | None
    until: int | None
    greatest: float


def payoff(baseline: sympy.Expr, policy: sympy.Expr, speedup: Fraction, limits: tuple[int, ...]) -> Payoff:
    """When steps of cost ``policy`` are ``speedup`` times as fast as steps of cost ``baseline``.

    Args:
        baseline, policy: costs in ``CONTEXT``, linear between ``limits``.
        speedup: the factor.
        limits: contexts, ascending, at which the slopes change.
    """
    knots = sorted({1, *limits})
    costs = [_PiecewiseLinear(cost, knots) for cost in (baseline, policy)]
    ratios = [costs[0].at(knot) / costs[1].at(knot) for knot in knots]
    if costs[1].last_slope:
        ratios.append(costs[0].last_slope / costs[1].last_slope)
    gain = _PiecewiseLinear(baseline - sympy.Rational(speedup) * policy, knots)
    context = gain.first_not_negative()
    until = gain.last_not_negative(context) if context is not None else None
    return Payoff(speedup, context, until, float(max(ratios)))


@dataclass(frozen=True)
class _PiecewiseLinear:
    """An expression in ``CONTEXT`` that is linear between ``knots`` and after the last one."""

    expr: sympy.Expr
    knots: list[int]

    def at(self, context: int) -> Fraction:
        value = sympy.Rational(self.expr.subs(CONTEXT, context))
        return Fraction(int(value.p), int(value.q))

    @property
    def last_slope(self) -> Fraction:
        return self.at(self.knots[-1] + 1) - self.at(self.knots[-1])

    def first_not_negative(self) -> int | None:
        """The first context from the first knot on at which the expression is not negative; None if there is none."""
        if self.at(self.knots[0]) >= 0:
            return self.knots[0]
        for low, high in itertools.pairwise(self.knots):
            if self.at(high) >= 0:
                slope = (self.at(high) - self.at(low)) / (high - low)
                return low + math.ceil(-self.at(low) / slope)
        if self.last_slope <= 0:
            return None
        return self.knots[-1] + math.ceil(-self.at(self.knots[-1]) / self.last_slope)

    def last_not_negative(self, context: int) -> int | None:
        """The last context before the expression gets negative after ``context``; None if it does not get so."""
        knots = [context, *(knot for knot in self.knots if knot > context)]
        for low, high in itertools.pairwise(knots):
            if self.at(high) < 0:
                slope = (self.at(high) - self.at(low)) / (high - low)
                return low + math.floor(self.at(low) / -slope)
        if self.last_slope >= 0:
            return None
        return knots[-1] + math.floor(self.at(knots[-1]) / -self.last_slope)
