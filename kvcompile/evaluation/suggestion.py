"""Which layers of a model deserve better formats, and which formats those are."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.layer_rules import as_text, rules_for, with_rules
from kvcompile.evaluation.site_errors import SiteErrors
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy import Policy

RAISED = ("int8_per_token_head", "fp8_e4m3", "bfloat16")
"""What keys or values of a layer may be raised to."""


@dataclass(frozen=True)
class Suggestion:
    """Rules that raise the formats of the worst layers, or leave their caches as they are.

    Attributes:
        modules: the layers, worst first.
        target: the error of the attention output that each of them has at most with its new formats.
        text: the rules as a policy file takes them, ``rules:`` and a line for each.
        policy: the policy with these rules before its own.
    """

    modules: tuple[str, ...]
    target: float
    text: str
    policy: Policy


def raised(formats: FormatPair, call: AttentionCall) -> list[FormatPair]:
    """Formats that a layer may get in place of ``formats``: others, no smaller, for its keys, its values or both.

    Smallest first.
    """

    def nbytes(pair: FormatPair) -> tuple[int, int]:
        return call.layout(pair, "key").bytes_per_token, call.layout(pair, "value").bytes_per_token

    key_bytes, value_bytes = nbytes(formats)
    pairs = []
    for key, value in itertools.product((formats.key, *RAISED), (formats.value, *RAISED)):
        pair = replace(formats, key=key, value=value)
        new_key_bytes, new_value_bytes = nbytes(pair)
        if pair != formats and new_key_bytes >= key_bytes and new_value_bytes >= value_bytes:
            pairs.append(pair)
    return sorted(pairs, key=lambda pair: sum(nbytes(pair)))


def worst(errors: Mapping[str, float]) -> list[str]:
    """The modules that hold half of the squared error, worst first; at most a quarter of all, and at least one."""
    ranked = sorted(errors, key=lambda module: -errors[module])
    half = sum(error**2 for error in errors.values()) / 2
    sums = itertools.accumulate(errors[module] ** 2 for module in ranked)
    needed = 1 + sum(1 for total in sums if total < half)
    return ranked[: min(needed, max(1, math.ceil(len(ranked) / 4)))]


def suggest(
    policy: Policy,
    sites: Sequence[Site],
    formats: Mapping[str, FormatPair],
    candidates: Mapping[str, Sequence[FormatPair]],
    measured: Mapping[str, SiteErrors],
) -> Suggestion | None:
    """Raise the worst layers to what the others have; None if nothing is packed, or packing makes no error.

    Args:
        policy: the policy.
        sites: all attention sites of the model.
        formats: by module that is packed, what the policy gives it.
        candidates: by module, from :func:`raised`: the smallest that is good enough is taken.
        measured: errors of all of them.
    """
    errors = {module: measured[module].attention.errors().get(pair, 0.0) for module, pair in formats.items()}
    if not any(errors.values()):
        return None
    chosen = worst(errors)
    rest = [error for module, error in errors.items() if module not in chosen]
    target = min(statistics.median(rest) if rest else math.inf, errors[chosen[-1]] / 2)
    choices: dict[str, FormatPair | None] = {}
    for module in chosen:
        better = measured[module].attention.errors()
        choices[module] = next((pair for pair in candidates[module] if better.get(pair, 0.0) <= target), None)
    rules = rules_for(choices, sites, policy)
    return Suggestion(tuple(chosen), target, as_text(rules), with_rules(policy, rules))
