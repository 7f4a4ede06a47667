"""A plan: the answer to one request, as objects and as plain data. ``kvcompile.cli`` writes its text."""

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
from kvcompile.planning.ranks import Collective, Ranks
from kvcompile.planning.storage import Measure
from kvcompile.planning.stored_caches import PolicyCaches
from kvcompile.planning.weights import Weights

MEASURES: tuple[Measure, ...] = ("payload", "allocated")
"""The measures of a user's bytes: the codes alone, or all allocated bytes."""


@dataclass(frozen=True)
class Request:
    """The request for a plan.

    Attributes:
        config: a model's ``config.json`` or the directory that holds it.
        policies: names that :func:`kvcompile.planning.stored_caches.apply_policy` takes; the first is the baseline.
        contexts: numbers of tokens of every user.
        memory, weights, reserve: the KV budget is ``memory - weights - reserve``, in bytes; ``weights`` is an argument
            of :func:`kvcompile.planning.weights.read_weights`.
        kv_budget: bytes for KV caches, in place of ``memory`` and ``reserve``.
        source_tokens: tokens of an encoder.
        bandwidth: the bandwidth of the memory; None to skip decode times.
        users: the number of sequences that a decode step advances.
        speedup: the wanted speedup over the baseline.
        efficiency: see :class:`kvcompile.planning.decode_time.DecodeModel`.
        ranks: the GPUs that run the model together. The plan has the sizes and times of a single GPU.
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
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class Budget:
    """Bytes for KV caches: as given, or ``memory`` minus ``weights`` and ``reserve``."""

    nbytes: int
    memory: int | None = None
    reserve: int = 0


@dataclass(frozen=True)
class Capacity:
    """The users and tokens that fit under one policy, by one measure of bytes.

    Attributes:
        longest_context: the longest context of one user with the whole budget; None if the cache stops growing within
            it.
        bytes_per_user: bytes of one user's caches, by context.
        workspace_per_user: further bytes that attention needs for one user, by context.
        users: number of users, by context.
    """

    longest_context: int | None
    bytes_per_user: Mapping[int, int]
    workspace_per_user: Mapping[int, int]
    users: Mapping[int, int]


@dataclass(frozen=True)
class PolicyPlan:
    """The plan under one policy.

    Attributes:
        caches: the stored caches.
        capacity: the users and tokens that fit, by measure.
        seconds: seconds of a decode step, by context; empty if no bandwidth was given.
        payoff: the comparison with the baseline; None for the baseline itself, and if no bandwidth was given.
        collectives: the data that ranks exchange in a decode step; empty on one GPU and if no bandwidth was given.
    """

    caches: PolicyCaches
    capacity: Mapping[Measure, Capacity]
    seconds: Mapping[int, float]
    payoff: Payoff | None
    collectives: tuple[Collective, ...] = ()

    def fits(self, context: int, users: int) -> bool:
        """Whether the caches of ``users`` users fit into the budget."""
        return users <= self.capacity["allocated"].users[context]


@dataclass(frozen=True)
class Plan:
    """The answer to a request.

    Attributes:
        request: the request.
        model: the model's caches.
        budget: the bytes for caches.
        weights: the weights; None if the plan does not depend on them.
        decode: the cost of a decode step; None if no bandwidth was given.
        policies: in the order of the request.
        notes: remarks for the reader, one line each.
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
    """A plan as plain data. Sizes are in bytes, times in seconds; ``context`` in formulas is a user's tokens."""
    request, model, weights, decode = plan.request, plan.model, plan.weights, plan.decode
    return {
        "config": str(request.config),
        "model": {
            "model_type": model.model_type,
            "dtype": model.dtype,
            "num_caches": len(model.caches),
            "max_context": model.max_context,
        },
        "ranks": {
            "tensor_parallel": request.ranks.tensor_parallel,
            "context_parallel": request.ranks.context_parallel,
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
            {
                "context": context,
                "bytes_per_user": nbytes,
                "workspace_per_user": capacity.workspace_per_user[context],
                "users": capacity.users[context],
            }
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
        "collectives": [
            {"name": one.name, "count": one.count, "bytes_received": one.nbytes, "seconds": float(one.seconds)}
            for one in policy.collectives
        ],
        "payoff": payoff
        and {
            "speedup": float(payoff.speedup),
            "context": payoff.context,
            "until": payoff.until,
            "greatest_speedup": payoff.greatest if math.isfinite(payoff.greatest) else None,
        },
    }
