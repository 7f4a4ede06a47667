"""A plan as plain data, for JSON."""

from __future__ import annotations

import math
from typing import Any

from kvcompile.planning.plan import MEASURES, Plan, PolicyPlan
from kvcompile.planning.storage import Measure


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
