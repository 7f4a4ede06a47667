"""The answer to one request, from all parts of the planner."""

from __future__ import annotations

import sympy

from kvcompile.planning.capacity import bytes_at, longest_context, users_in
from kvcompile.planning.config_file import Fields, read_config
from kvcompile.planning.decode_time import ALL, WEIGHTS, DecodeModel, payoff
from kvcompile.planning.errors import NoRoomError, PlanError
from kvcompile.planning.model_caches import ModelCaches, read_model_caches
from kvcompile.planning.plan import MEASURES, Budget, Capacity, Plan, PolicyPlan, Request
from kvcompile.planning.storage import Measure
from kvcompile.planning.stored_caches import PolicyCaches, apply_policy
from kvcompile.planning.units import format_context, format_size
from kvcompile.planning.weights import Weights, read_weights


def make_plan(request: Request) -> Plan:
    """Plan ``request``.

    Raises:
        PlanError: the config or an argument is wrong.
        NoRoomError: the weights and the reserve leave no memory for a cache.
        PolicyError: a policy is wrong.
    """
    fields, ranks = read_config(request.config), request.ranks
    whole = read_model_caches(fields, request.source_tokens)
    weights = _weights(request, fields, whole)
    model = ranks.caches(whole)
    policies = [ranks.tokens(apply_policy(name, model)) for name in request.policies]
    budget = _budget(request, weights)
    decode = _decode_model(request, weights, policies)
    return Plan(
        request=request,
        model=model,
        budget=budget,
        weights=weights,
        decode=decode,
        policies=tuple(_plan_policy(policy, policies[0], request, model, budget, decode) for policy in policies),
        notes=(*model.notes, *_long_contexts(request, model), *(note for policy in policies for note in policy.notes)),
    )


def _weights(request: Request, fields: Fields, model: ModelCaches) -> Weights | None:
    """The weights; None if the plan does not depend on them."""
    if request.kv_budget is not None and request.bandwidth is None:
        if request.weights is not None:
            raise PlanError("--weights has no effect with --kv-budget and without --bandwidth: drop it")
        return None
    return request.ranks.weights(read_weights(request.weights, fields, model))


def _budget(request: Request, weights: Weights | None) -> Budget:
    if request.kv_budget is not None:
        return Budget(request.kv_budget)
    if request.memory is None or weights is None:
        raise PlanError("no memory is given; give --memory, or --kv-budget for the caches alone")
    nbytes = request.memory - weights.nbytes - request.reserve
    if nbytes <= 0:
        raise NoRoomError(
            f"no room for a cache in {format_size(request.memory)}: the weights ({weights.name}) take "
            f"{format_size(weights.nbytes)} and the reserve takes {format_size(request.reserve)}; "
            "give more --memory, smaller --weights or a smaller --reserve"
        )
    return Budget(nbytes, request.memory, request.reserve)


def _decode_model(request: Request, weights: Weights | None, policies: list[PolicyCaches]) -> DecodeModel | None:
    if request.bandwidth is None or weights is None:
        return None
    known = {ALL, WEIGHTS} | {name for policy in policies for name in policy.bytes_by_storage("stored")}
    unknown = [name for name in request.efficiency if name not in known]
    if unknown:
        raise PlanError(f"--efficiency: no policy reads {unknown[0]!r} (known: {', '.join(sorted(known))})")
    return DecodeModel(request.bandwidth, weights, request.users, request.efficiency)


def _plan_policy(
    policy: PolicyCaches,
    baseline: PolicyCaches,
    request: Request,
    model: ModelCaches,
    budget: Budget,
    decode: DecodeModel | None,
) -> PolicyPlan:
    capacity = {measure: _capacity(policy, measure, request.contexts, budget.nbytes) for measure in MEASURES}
    if decode is None:
        return PolicyPlan(policy, capacity, {}, None)
    exchanged, baselines = (request.ranks.collectives(model, one, request.users) for one in (policy, baseline))
    seconds = {context: decode.seconds(policy, context, exchanged) for context in request.contexts}
    if policy is baseline:
        return PolicyPlan(policy, capacity, seconds, None, exchanged)
    costs = decode.cost(baseline, baselines), decode.cost(policy, exchanged)
    return PolicyPlan(policy, capacity, seconds, payoff(*costs, request.speedup, model.limits), exchanged)


def _capacity(policy: PolicyCaches, measure: Measure, contexts: tuple[int, ...], budget: int) -> Capacity:
    nbytes = policy.nbytes(measure)
    workspace = policy.workspace if measure == "allocated" else sympy.Integer(0)
    return Capacity(
        longest_context=longest_context(budget, nbytes + workspace),
        bytes_per_user={context: bytes_at(nbytes, context) for context in contexts},
        workspace_per_user={context: bytes_at(workspace, context) for context in contexts},
        users={context: users_in(budget, nbytes + workspace, context) for context in contexts},
    )


def _long_contexts(request: Request, model: ModelCaches) -> list[str]:
    longest = max(request.contexts)
    if model.max_context is None or longest <= model.max_context:
        return []
    return [f"context {format_context(longest)} exceeds the {model.max_context} tokens that the model supports"]
