"""The text of a plan: a summary in tables, and its formulas."""

from __future__ import annotations

from collections.abc import Iterator

from kvcompile.kernels.formats.base import HEAD_DIM
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.planning.decode_time import DecodeModel, Payoff
from kvcompile.planning.model_caches import LayerCache
from kvcompile.planning.parameters import ParameterCount
from kvcompile.planning.plan import Plan, PolicyPlan
from kvcompile.planning.storage import Measure
from kvcompile.planning.stored_caches import PolicyCaches, StoredCache
from kvcompile.planning.units import format_context, format_rate, format_size
from kvcompile.planning.weights import Weights
from kvcompile.tables import table, width, wrapped

_MEASURES: dict[Measure, str] = {
    "payload": "Payload, codes without scales",
    "allocated": f"Allocated, with metadata, {BLOCK_TOKENS}-token blocks and repeated heads",
}


def summary(plan: Plan) -> str:
    """The model, the budget, users and tokens by policy, and decode times if a bandwidth was given."""
    parts = ["\n".join([*_model_lines(plan), _budget_line(plan)])]
    for measure, meaning in _MEASURES.items():
        header = ["policy", "B/token", "tokens", *map(format_context, plan.request.contexts)]
        rows = [_capacity_row(plan, policy, measure) for policy in plan.policies]
        parts.append(f"{meaning}: tokens of one user, users by context\n{table(header, rows)}")
    if plan.decode is not None:
        parts.append("\n".join(_decode_lines(plan, plan.decode)))
    return _fitting("\n\n".join(parts))


def _fitting(text: str) -> str:
    """``text`` with its long lines broken at the width of the terminal, except the rows of tables, which fit."""
    lines = []
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip()) + 2
        lines.append(line if line.startswith("|") or len(line) <= width() else wrapped(line, indent))
    return "\n".join(lines)


def _model_lines(plan: Plan) -> Iterator[str]:
    limit = f", made for {plan.model.max_context} tokens" if plan.model.max_context else ""
    yield f"{plan.model.model_type}, {plan.model.dtype}{limit}"
    ranks = plan.request.ranks
    if ranks.count > 1:
        sizes = f"tensor parallel {ranks.tensor_parallel} x context parallel {ranks.context_parallel}"
        yield f"one of {ranks.count} GPUs, {sizes}; all of them serve the same users"
    for cache, count in plan.model.groups.items():
        yield f"  {count} x {describe(cache)}"


def describe(cache: LayerCache) -> str:
    """A layer's cache in words: ``8 KV heads, 128 + 128 channels, all tokens``."""
    heads = f"{cache.num_kv_heads} KV head{'s' if cache.num_kv_heads != 1 else ''}"
    channels = f"{cache.key_dim} + {cache.value_dim} channels" if cache.value_dim else f"{cache.key_dim} channels"
    tokens = {
        "full": "all tokens",
        "latent": "a latent for keys and values, all tokens",
        "sliding": f"the last {cache.limit} tokens",
        "chunked": f"a chunk of {cache.limit} tokens",
        "cross": f"{cache.limit} tokens of the encoder",
    }[cache.kind]
    return f"{heads}, {channels}, {tokens}"


def _budget_line(plan: Plan) -> str:
    budget, weights = plan.budget, plan.weights
    line = f"KV budget {format_size(budget.nbytes)}"
    if budget.memory is None or weights is None:
        return line
    rest = f"{format_size(budget.memory)} - {format_size(weights.nbytes)} of weights - {format_size(budget.reserve)}"
    return f"{line} = {rest} of reserve\nweights {weights.name}: {weights.meaning}"


def _capacity_row(plan: Plan, policy: PolicyPlan, measure: Measure) -> list[str]:
    capacity, baseline = policy.capacity[measure], plan.policies[0].capacity[measure]
    per_token = policy.caches.bytes_per_token("payload" if measure == "payload" else "stored")
    longest = "no limit" if capacity.longest_context is None else str(capacity.longest_context)
    users = []
    for context, count in capacity.users.items():
        of_baseline = baseline.users[context]
        compared = policy is not plan.policies[0] and of_baseline
        users.append(f"{count} ({count / of_baseline:.1f}x)" if compared else str(count))
    return [policy.caches.policy, str(per_token), longest, *users]


def _decode_lines(plan: Plan, decode: DecodeModel) -> Iterator[str]:
    who = f"{decode.users} user{'s' if decode.users != 1 else ''}"
    rate = f"{format_rate(decode.bandwidth.bytes_per_second)} ({decode.bandwidth.source})"
    yield f"Decode step of {who} in ms, from the bytes it reads, at {rate}"
    shares = ", ".join(f"{name} {float(share):g}" for name, share in decode.efficiency.items())
    yield f"efficiency of reading: {shares or 'all 1 (assumed: times are a floor that no kernel reaches)'}"
    header = ["policy", *map(format_context, plan.request.contexts), f"{float(plan.request.speedup):g}x from"]
    yield table(header, [_decode_row(plan, policy) for policy in plan.policies])
    yield from _exchanged(plan)
    if any(not policy.fits(context, decode.users) for policy in plan.policies for context in plan.request.contexts):
        yield f"*: {who} {'does' if decode.users == 1 else 'do'} not fit into the KV budget"


def _exchanged(plan: Plan) -> Iterator[str]:
    """The collectives of a step, whose times are part of the time of the step."""
    ranks = plan.request.ranks
    for policy in plan.policies:
        for one in policy.collectives:
            taken = f"{one.count} x {one.name}, {format_size(one.nbytes)} each: {float(1000 * one.seconds):.3g} ms"
            yield f"{policy.caches.policy}: {taken}"
    if ranks.count > 1:
        rate, latency = format_rate(ranks.link), f"{float(10**6 * ranks.latency):g} us"
        yield f"assumed for collectives: {latency} each, and {rate} of data that a GPU receives"


def _decode_row(plan: Plan, policy: PolicyPlan) -> list[str]:
    cells = []
    for context, seconds in policy.seconds.items():
        of_baseline = plan.policies[0].seconds[context]
        star = "" if policy.fits(context, plan.request.users) else "*"
        compared = f" ({of_baseline / seconds:.2f}x)" if policy.payoff is not None else ""
        cells.append(f"{1000 * seconds:.3g}{star}{compared}")
    return [policy.caches.policy, *cells, _payoff(policy.payoff)]


def _payoff(payoff: Payoff | None) -> str:
    if payoff is None:
        return ""
    if payoff.context is None:
        return f"never (<= {payoff.greatest:.2f}x)"
    return str(payoff.context) if payoff.until is None else f"{payoff.context} to {payoff.until}"


def explanation(plan: Plan) -> str:
    """The formulas of a plan."""
    parts = [
        f"users = floor(budget / bytes(context)); budget = {plan.budget.nbytes}\n"
        "bytes(context) = sum over layers of num_kv_heads * (bytes of a key + bytes of a value) * tokens kept\n"
        "allocated users also need the workspace of attention, if caches are plain: repeated heads of one layer,\n"
        "once for eager code that reads a prompt and once for a recorded decode step\n"
        "not counted: other activations and everything else in the reserve; the spare room of growing caches"
    ]
    parts.extend(_policy_formulas(policy.caches) for policy in plan.policies)
    if plan.weights is not None and plan.weights.parameters is not None:
        parts.append(_weights_formulas(plan.weights, plan.weights.parameters))
    if plan.decode is not None:
        parts.append(_time_formulas(plan.decode))
    return _fitting("\n\n".join(parts))


def _policy_formulas(caches: PolicyCaches) -> str:
    lines = [caches.policy]
    for stored, count in caches.groups.items():
        lines.append(f"  {count} x {describe(stored.cache)}, tokens = {stored.cache.tokens}")
        lines.extend(f"    {line}" for line in _half_formulas(stored))
    for measure in ("payload", "stored", "allocated"):
        lines.append(f"  {measure:<9} = {caches.nbytes(measure)}")
    lines.append(f"  workspace = {caches.workspace}")
    return "\n".join(lines)


def _half_formulas(stored: StoredCache) -> Iterator[str]:
    """The bytes of a vector: ``key int4_per_token_head: head_dim/2 + 4 = 64 + 4 bytes, 6.2 % metadata``."""
    for role, storage, head_dim in stored.halves:
        payload = storage.payload.subs(HEAD_DIM, head_dim)
        metadata = storage.stored.subs(HEAD_DIM, head_dim) - payload
        if metadata == 0:
            yield f"{role} {storage.name}: {storage.stored} = {payload} bytes"
        else:
            share = 100 * float(metadata / payload)
            yield f"{role} {storage.name}: {storage.stored} = {payload} + {metadata} bytes, {share:.3g} % metadata"
        if storage.residual is not None:
            kept = storage.residual_bytes(head_dim, "stored")
            yield f"  and {kept} bytes per sequence and KV head for {storage.residual.description} tokens kept exact"


def _weights_formulas(weights: Weights, parameters: ParameterCount) -> str:
    lines = [f"weights {weights.name}: {weights.meaning}", f"  {parameters.count()} parameters, {weights.nbytes} bytes"]
    lines.extend(f"  {term.name} = {term.formula} = {parameters.count_of(term)}" for term in parameters.terms)
    return "\n".join([*lines, *(f"  {symbol} = {value}" for symbol, value in parameters.values.items())])


def _time_formulas(decode: DecodeModel) -> str:
    parameters = decode.weights.parameters
    if parameters is None:
        which = "all weights, because only their size was given"
    elif parameters.num_experts > 1:
        share = 100 * float(parameters.experts_read(decode.users))
        which = f"without embeddings, and with {share:.0f} % of the experts, assuming a router that chooses uniformly"
    else:
        which = "without embeddings: a step looks up one row per token"
    return (
        "seconds of a step = (weights read / efficiency + users * stored(context) / efficiency) / bandwidth\n"
        f"  weights read = {decode.weights.bytes_read(decode.users)} bytes ({which})"
    )
