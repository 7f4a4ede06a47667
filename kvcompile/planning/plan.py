"""A plan: the answer to one request, as objects and as plain data. ``kvcompile.cli`` makes its text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvcompile.planning.decode_time import DecodeModel, Payoff
from kvcompile.planning.devices import Bandwidth
from kvcompile.planning.model_caches import ModelCaches
from kvcompile.planning.storage import Measure
from kvcompile.planning.stored_caches import PolicyCaches
from kvcompile.planning.weights import Weights

MEASURES: tuple[Measure, ...] = ("payload", "allocated")
"""What users and tokens are counted by: the codes alone, or all that is allocated."""


@dataclass(frozen=True)
class Request:
    """What is to be planned.

    Attributes:
        config: a model's ``config.json`` or the directory that holds it.
        policies: names that :func:`kvcompile.planning.stored_caches.apply_policy` takes; the first is the baseline.
        contexts: tokens of every user.
        memory, weights, reserve: the KV budget is ``memory - weights - reserve``, in bytes; ``weights`` is what
            :func:`kvcompile.planning.weights.read_weights` takes.
        kv_budget: bytes, instead of ``memory`` and ``reserve``.
        source_tokens: tokens of an encoder.
        bandwidth: of the memory; None for no decode times.
        users: sequences that a decode step advances.
        speedup: that a policy shall reach over the baseline.
        efficiency: see :class:`kvcompile.planning.decode_time.DecodeModel`.
    """

    config: Path
    policies: tuple[str, ...]
    contexts: tuple[int, ...]
    memory: int | None = None
    weights: str | None = None
    reserve: int = 0
    kv_budget: int | None = None
    source_tokens: int | None = None
    bandwidth: Bandwidth | None = None
    users: int = 1
    speedup: Fraction = Fraction(3, 2)
    efficiency: Mapping[str, Fraction] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """Bytes for KV caches: given, or ``memory`` less ``weights`` and ``reserve``."""

    nbytes: int
    memory: int | None = None
    reserve: int = 0


@dataclass(frozen=True)
class Capacity:
    """What fits under one policy by one measure.

    Attributes:
        longest_context: tokens of one user who has the whole budget; None if the cache stops to grow before.
        bytes_per_user, users: by context.
    """

    longest_context: int | None
    bytes_per_user: Mapping[int, int]
    users: Mapping[int, int]


@dataclass(frozen=True)
class PolicyPlan:
    """Everything about one policy.

    Attributes:
        caches: what is kept.
        capacity: what fits, by measure.
        seconds: of a decode step, by context; empty if no bandwidth was given.
        payoff: against the baseline; None for the baseline itself, and if no bandwidth was given.
    """

    caches: PolicyCaches
    capacity: Mapping[Measure, Capacity]
    seconds: Mapping[int, float]
    payoff: Payoff | None

    def fits(self, context: int, users: int) -> bool:
        """Whether the caches of so many users can be allocated."""
        return users <= self.capacity["allocated"].users[context]


@dataclass(frozen=True)
class Plan:
    """The answer to a request.

    Attributes:
        request: the request.
        model: the model's caches.
        budget: bytes for them.
        weights: None where nothing depends on them.
        decode: what a decode step costs; None if no bandwidth was given.
        policies: in the order of the request.
        notes: what a reader must know, one line each.
    """

    request: Request
    model: ModelCaches
    budget: Budget
    weights: Weights | None
    decode: DecodeModel | None
    policies: tuple[PolicyPlan, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sizes in bytes, times in seconds."""
        return plan_data(self)


def plan_data(plan: Plan) -> dict[str, Any]:
    """Sizes are in bytes, times in seconds; formulas are in ``context``, the tokens of a user."""
    request, model, weights, decode = plan.request, plan.model, plan.weights, plan.decode
    return {
        "config": str(request.config),
        "model": {
            "model_type": model.model_type,
            "dtype": model.dtype,
            "num_caches": len(model.caches),
            "max_context": model.max_context,
        },
        "budget": {
            "kv_bytes": plan.budget.nbytes,
            "memory_bytes": plan.budget.memory,
            "reserve_bytes": plan.budget.reserve if plan.budget.memory is not None else None,
        },
        "weights": weights
        and {
            "name": weights.name,
            "bytes": weights.nbytes,
            "parameters": weights.parameters.count() if weights.parameters else None,
        },
        "decode": decode
        and {
            "bytes_per_second": decode.bandwidth.bytes_per_second,
            "source": decode.bandwidth.source,
            "users": decode.users,
            "weight_bytes_read": decode.weights.bytes_read(decode.users),
            "efficiency": {name: float(share) for name, share in decode.efficiency.items()},
        },
        "policies": [_policy_data(policy, request.users) for policy in plan.policies],
        "notes": list(plan.notes),
    }


def _policy_data(policy: PolicyPlan, users: int) -> dict[str, Any]:
    per_token = {measure: policy.caches.bytes_per_token(measure) for measure in ("payload", "stored")}
    return {
        "policy": policy.caches.policy,
        "bytes_per_token": per_token,
        **{measure: _capacity_data(policy, measure) for measure in MEASURES},
        "decode": _decode_data(policy, users) if policy.seconds else None,
    }


def _capacity_data(policy: PolicyPlan, measure: Measure) -> dict[str, Any]:
    capacity = policy.capacity[measure]
    return {
        "formula": str(policy.caches.nbytes(measure)),
        "longest_context": capacity.longest_context,
        "contexts": [
            {"context": context, "bytes_per_user": nbytes, "users": capacity.users[context]}
            for context, nbytes in capacity.bytes_per_user.items()
        ],
    }


def _decode_data(policy: PolicyPlan, users: int) -> dict[str, Any]:
    payoff = policy.payoff
    return {
        "contexts": [
            {"context": context, "seconds": seconds, "fits": policy.fits(context, users)}
            for context, seconds in policy.seconds.items()
        ],
        "payoff": payoff
        and {
            "speedup": float(payoff.speedup),
            "context": payoff.context,
            "until": payoff.until,
            "greatest_speedup": payoff.greatest if math.isfinite(payoff.greatest) else None,
        },
    }
