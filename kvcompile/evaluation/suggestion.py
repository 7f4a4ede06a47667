"""Better formats for the layers of a model that change the predictions most."""

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

FALLBACK_FORMATS = ("int8_per_token_head", "fp8_e4m3", "bfloat16")
"""The formats that may replace the formats of a layer's keys or values."""


@dataclass(frozen=True)
class Suggestion:
    """Rules that give the worst layers better formats, or leave their caches unpacked.

    Attributes:
        modules: the layers, worst first.
        target: the largest divergence, in nats, that each of these layers should add with its new formats.
        saved: the estimated decrease of the divergence of the predictions, in nats.
        text: the rules as text for a policy file: ``rules:``, and a line for each rule.
        policy: the policy with these rules before its own.
    """

    modules: tuple[str, ...]
    target: float
    saved: float
    text: str
    policy: Policy


def fallbacks(formats: FormatPair, call: AttentionCall) -> list[FormatPair]:
    """The format pairs that may replace ``formats``, smallest first.

    At least one of the two formats differs, and neither takes fewer bytes than before.
    """

    def nbytes(pair: FormatPair) -> tuple[int, int]:
        return call.layout(pair, "key").bytes_per_token, call.layout(pair, "value").bytes_per_token

    key_bytes, value_bytes = nbytes(formats)
    pairs = []
    for key, value in itertools.product((formats.key, *FALLBACK_FORMATS), (formats.value, *FALLBACK_FORMATS)):
        pair = replace(formats, key=key, value=value)
        new_key_bytes, new_value_bytes = nbytes(pair)
        if pair != formats and new_key_bytes >= key_bytes and new_value_bytes >= value_bytes:
            pairs.append(pair)
    return sorted(pairs, key=lambda pair: sum(nbytes(pair)))


def worst(divergences: Mapping[str, float]) -> list[str]:
    """The modules that add half of the divergence, worst first: at least one, and at most a quarter of all modules."""
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
    """Better formats for the worst layers, so that they add no more divergence than other layers.

    The divergence under other formats is estimated: the divergence under the present formats, times the ratio of the
    squared errors of the attention output.

    Args:
        policy: the policy.
        sites: all attention sites of the model.
        formats: the policy's format pair of every packed module.
        candidates: format pairs by module, from :func:`fallbacks`; the smallest sufficient pair is chosen.
        measured: errors of all packed modules under all these format pairs.
        divergences: the divergence of the predictions if only one module is packed, by module.

    Returns:
        The suggestion; None if nothing is packed, or if packing changes no prediction.
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
