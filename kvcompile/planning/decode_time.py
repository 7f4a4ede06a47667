"""The time of a decode step, from the bytes that it reads.

A step that makes one token for each user reads the weights once and every user's cache once. On a GPU these reads
dominate the time. Several ranks also exchange data (:mod:`kvcompile.planning.ranks`), one collective after the other.
Multiplications, launches and the write of one token are not counted. The times are therefore lower bounds, unless
measured efficiencies (shares of the bandwidth that kernels reach) are given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import sympy

from kvcompile.planning.devices import Bandwidth
from kvcompile.planning.model_caches import CONTEXT
from kvcompile.planning.ranks import Collective
from kvcompile.planning.stored_caches import PolicyCaches
from kvcompile.planning.weights import Weights

WEIGHTS = "weights"
ALL = "all"


@dataclass(frozen=True)
class DecodeModel:
    """The cost of a decode step.

    Attributes:
        bandwidth: the bandwidth of the memory.
        weights: the weights, which a step reads once.
        users: the number of sequences that a step advances.
        efficiency: the share of the bandwidth that reading reaches, by the name of a cache format or dtype, or
            ``weights``; ``all`` applies to the other names. The default is 1.
    """

    bandwidth: Bandwidth
    weights: Weights
    users: int = 1
    efficiency: Mapping[str, Fraction] = field(default_factory=dict)

    def cost(self, policy: PolicyCaches, collectives: Sequence[Collective] = ()) -> sympy.Expr:
        """The time of a step with these collectives, expressed as bytes read at full bandwidth.

        The result is an exact expression, piecewise linear in ``CONTEXT``.
        """
        cost = sympy.Rational(self.weights.bytes_read(self.users)) / self._efficiency(WEIGHTS)
        for name, nbytes in policy.bytes_by_storage("stored").items():
            cost += self.users * nbytes / self._efficiency(name)
        seconds = sum(one.seconds for one in collectives)
        return cost + sympy.Rational(seconds) * self.bandwidth.bytes_per_second

    def seconds(self, policy: PolicyCaches, context: int, collectives: Sequence[Collective] = ()) -> float:
        """Seconds of a step in which every user has ``context`` tokens."""
        return float(self.cost(policy, collectives).subs(CONTEXT, context) / self.bandwidth.bytes_per_second)

    def _efficiency(self, name: str) -> sympy.Rational:
        return sympy.Rational(self.efficiency.get(name, self.efficiency.get(ALL, Fraction(1))))


@dataclass(frozen=True)
class Payoff:
    """The contexts at which a policy is faster than a baseline by a given factor.

    Attributes:
        speedup: the factor.
        context: the first context at which the policy reaches the factor; None if it never does.
        until: the last context at which it still reaches the factor; None if there is no last context.
        greatest: the largest speedup at any context, or the limit that the speedup approaches.
    """

    speedup: Fraction
    context: int | None
    until: int | None
    greatest: float


def payoff(baseline: sympy.Expr, policy: sympy.Expr, speedup: Fraction, limits: tuple[int, ...]) -> Payoff:
    """The contexts at which steps of cost ``policy`` are ``speedup`` times as fast as steps of cost ``baseline``.

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
        """The first context, from the first knot on, at which the expression is >= 0; None if it always is < 0."""
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
        """The last context from ``context`` on before the expression becomes negative; None if it never does."""
        knots = [context, *(knot for knot in self.knots if knot > context)]
        for low, high in itertools.pairwise(knots):
            if self.at(high) < 0:
                slope = (self.at(high) - self.at(low)) / (high - low)
                return low + math.floor(self.at(low) / -slope)
        if self.last_slope >= 0:
            return None
        return knots[-1] + math.floor(self.at(knots[-1]) / -self.last_slope)
