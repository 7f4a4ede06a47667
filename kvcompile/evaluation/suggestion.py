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
from kvcompile.policy.policy import Policy

RAISED = ("int8_per_token_head", "fp8_e4m3", "bfloat16")
"""What keys or values of a layer may be raised to."""


@dataclass(frozen=True)
class Suggestion:
    """Rules that raise the formats of the worst layers, or leave their caches as they are.

    Attributes:
        modules: the layers, worst first.
        target: the divergence, in nats, that each of them is estimated to add at most with its new formats.
        saved: by how much the divergence of the predictions is estimated to become smaller, in nats.
        text: the rules as a policy file takes them, ``rules:`` and a line for each.
        policy: the policy with these rules before its own.
    """

    modules: tuple[str, ...]
    target: float
    saved: float
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


def worst(divergences: Mapping[str, float]) -> list[str]:
    """The modules that add half of the divergence, worst first; at most a quarter of all, and at least one."""
    ranked = sorted(divergences, key=lambda module: -divergences[module])
    half = sum(divergences.values()) / 2
    needed = 1 + sum(1 for total in itertools.accumulate(divergences[module] for module in ranked) if total < half)
    return ranked[: min(needed, max(1, math.ceil(len(ranked) / 4)))]


def suggest(
    policy: Policy,
    sites: Sequence[Site],
    formats: Mapping[str, FormatPair],
    candidates: Mapping[str, Sequence[FormatPair]],
    measured: Mapping[str, SiteErrors],
    divergences: Mapping[str, float],
) -> Suggestion | None:
    """Raise the worst layers to what the others have; None if nothing is packed, or packing changes nothing.

    The divergence under other formats is estimated as that under the present ones times the ratio of the squared
    errors of the attention output, as in :mod:`kvcompile.evaluation.sensitivity`.

    Args:
        policy: the policy.
        sites: all attention sites of the model.
        formats: by module that is packed, what the policy gives it.
        candidates: by module, from :func:`raised`: the smallest that is good enough is taken.
        measured: errors of all of them.
        divergences: by module, of the predictions when only this module is packed.
    """
    if not any(divergence > 0 for divergence in divergences.values()):
        return None
    chosen = worst(divergences)
    rest = [divergence for module, divergence in divergences.items() if module not in chosen]
    target = min(statistics.median(rest) if rest else math.inf, divergences[chosen[-1]] / 4)
    choices: dict[str, FormatPair | None] = {}
    left = 0.0
    for module in chosen:
        errors = measured[module].attention.errors()
        present = errors.get(formats[module], 0.0)
        per_error = divergences[module] / present**2 if present else math.inf
        estimates = {pair: per_error * errors.get(pair, 0.0) ** 2 for pair in candidates[module]}
        choices[module] = next((pair for pair, estimate in estimates.items() if estimate <= target), None)
        left += 0.0 if (pair := choices[module]) is None else estimates[pair]
    rules = rules_for(choices, sites, policy)
    saved = sum(divergences[module] for module in chosen) - left
    return Suggestion(tuple(chosen), target, saved, as_text(rules), with_rules(policy, rules))
