"""A plan: one request answered by all the planner's arithmetic. The text of a plan is made in ``kvcompile.cli``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvcompile.planning.capacity import bytes_at, longest_context, users_in
from kvcompile.planning.config_file import Fields, read_config
from kvcompile.planning.decode_time import ALL, WEIGHTS, DecodeModel, Payoff, payoff
from kvcompile.planning.devices import Bandwidth
from kvcompile.planning.errors import NoRoomError, PlanError
from kvcompile.planning.model_caches import ModelCaches, read_model_caches
from kvcompile.planning.storage import Measure
from kvcompile.planning.stored_caches import PolicyCaches, apply_policy
from kvcompile.planning.units import format_context, format_size
from kvcompile.planning.weights import Weights, read_weights

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
        from kvcompile.planning.plan_data import plan_data

        return plan_data(self)


def make_plan(request: Request) -> Plan:
    """Plan ``request``.

    Raises:
        PlanError: the config or an argument is wrong.
        NoRoomError: the weights and the reserve leave nothing.
        PolicyError: a policy is wrong.
    """
    fields = read_config(request.config)
    model = read_model_caches(fields, request.source_tokens)
    policies = [apply_policy(name, model) for name in request.policies]
    weights = _weights(request, fields, model)
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
    """The weights, if anything depends on them."""
    if request.kv_budget is not None and request.bandwidth is None:
        if request.weights is not None:
            raise PlanError("--weights changes nothing where --kv-budget is given and --bandwidth is not")
        return None
    return read_weights(request.weights, fields, model)


def _budget(request: Request, weights: Weights | None) -> Budget:
    if request.kv_budget is not None:
        return Budget(request.kv_budget)
    if request.memory is None or weights is None:
        raise PlanError("how much memory is there? give --memory, or --kv-budget for the caches alone")
    nbytes = request.memory - weights.nbytes - request.reserve
    if nbytes <= 0:
        raise NoRoomError(
            f"no room for a cache: of {format_size(request.memory)}, the weights ({weights.name}) take "
            f"{format_size(weights.nbytes)} and the reserve {format_size(request.reserve)}"
        )
    return Budget(nbytes, request.memory, request.reserve)


def _decode_model(request: Request, weights: Weights | None, policies: list[PolicyCaches]) -> DecodeModel | None:
    if request.bandwidth is None or weights is None:
        return None
    known = {ALL, WEIGHTS} | {name for policy in policies for name in policy.bytes_by_storage("stored")}
    unknown = [name for name in request.efficiency if name not in known]
    if unknown:
        raise PlanError(f"--efficiency: nothing here is read as {unknown[0]!r} (known: {', '.join(sorted(known))})")
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
    seconds = {context: decode.seconds(policy, context) for context in request.contexts}
    if policy is baseline:
        return PolicyPlan(policy, capacity, seconds, None)
    against = payoff(decode.cost(baseline), decode.cost(policy), request.speedup, model.limits)
    return PolicyPlan(policy, capacity, seconds, against)


def _capacity(policy: PolicyCaches, measure: Measure, contexts: tuple[int, ...], budget: int) -> Capacity:
    nbytes = policy.nbytes(measure)
    return Capacity(
        longest_context=longest_context(budget, nbytes),
        bytes_per_user={context: bytes_at(nbytes, context) for context in contexts},
        users={context: users_in(budget, nbytes, context) for context in contexts},
    )


def _long_contexts(request: Request, model: ModelCaches) -> list[str]:
    longest = max(request.contexts)
    if model.max_context is None or longest <= model.max_context:
        return []
    return [f"context {format_context(longest)} exceeds the {model.max_context} tokens that the model is made for"]
