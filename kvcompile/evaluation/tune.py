"""``tune``: the search for the best formats of every layer's keys and values within a budget of bits."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvcompile.errors import did_you_mean
from kvcompile.evaluation.attention_sites import AttentionTap, sites_heard
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.knapsack import NoRoomError, Option, choose
from kvcompile.evaluation.layer_rules import rules_for
from kvcompile.evaluation.measure import OnProgress, evaluate, ignore_progress
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.results import Evaluation
from kvcompile.evaluation.sensitivity import FormatCost, HalfCache, format_costs, half_caches
from kvcompile.evaluation.text import Text
from kvcompile.evaluation.token_ids import text_of
from kvcompile.evaluation.tuning import TunedHalf, Tuning, Uniform
from kvcompile.kernels.formats import FORMATS
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy import presets
from kvcompile.policy.policy import Choice, Policy, RoleFormat

DEFAULT_FORMATS = (*(name for name, fmt in FORMATS.items() if fmt.bits <= 8), "bfloat16")
"""The formats that a search considers by default."""


def tune(
    model: Any,
    data: Any,
    budget_bits: float,
    output: str | os.PathLike[str] | None = None,
    *,
    formats: Iterable[str] = DEFAULT_FORMATS,
    decode: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """Find formats for every layer's keys and values, within a budget, that change the predictions of ``model`` least.

    The cost of each format in each layer is estimated once (:mod:`kvcompile.evaluation.sensitivity`). The choice within
    the budget is a knapsack problem, which is solved exactly. The resulting policy is measured once on the compiled
    model. If the backend leaves layers unpacked, these count with all their bytes, and the other layers are chosen
    again.

    Args:
        model: a Hugging Face causal language model in inference mode.
        data: token ids, int64 [tokens] or [rows, tokens], or the result of a tokenizer; all rows have one length.
        budget_bits: bits per element of the cache, on average, with scales, zero points, the padding of the last block
            and exact tokens. They are counted for a static cache that holds all tokens of a row except the last; a
            capacity that is a multiple of 64 has no padding.
        output: a file for the policy.
        formats: the formats to choose from.
        decode: how many tokens of a row are read one by one in the measurement of the result; by default 8, or half of
            a short row.
        on_progress: called with a description, the number of finished steps, and the number of all steps.

    Raises:
        EvaluationError: ``data`` are not token ids, a format does not exist, nothing can be packed, or no choice fits.
        OSError: ``output`` cannot be written.
    """
    tuning = tune_on(model, text_of(model, data, decode), budget_bits, formats=formats, on_progress=on_progress)
    if output is not None:
        tuning.save(output)
    return tuning


def tune_on(
    model: Any,
    text: Text,
    budget_bits: float,
    *,
    formats: Iterable[str] = DEFAULT_FORMATS,
    model_name: str = "",
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """:func:`tune` on the windows of a text."""
    formats = list(dict.fromkeys(formats))
    check_search(formats, budget_bits)
    model = uncompiled(model)
    windows = text.windows[:, : text.schedule.num_tokens]
    tap = AttentionTap(model)
    sites = sites_heard(tap, windows[0])
    halves, numel = half_caches(model, text.schedule, sites)
    costs = format_costs(tap, windows, halves, formats, budget_bits, on_progress)
    table = dict(zip(halves, costs, strict=True))
    while True:
        table = {half: options for half, options in table.items() if options}
        search = _Search(table, sites, numel, model.dtype.itemsize, budget_bits)
        chosen = search.choose()
        policy = search.policy(chosen)
        evaluation = evaluate(model, text, [policy], model_name=model_name, on_progress=on_progress)
        left = set(evaluation.results[0].unpacked_modules)
        if not any(half.module in left for half in table):
            return search.result(chosen, policy, evaluation)
        table = {half: options for half, options in table.items() if half.module not in left}


def check_search(formats: Sequence[str], budget_bits: float) -> None:
    """Raise EvaluationError if a format does not exist, or if the budget is not a positive number."""
    for name in formats:
        if name not in FORMATS:
            raise EvaluationError(
                f"there is no format {name!r}{did_you_mean(name, FORMATS)} (formats: {', '.join(FORMATS)})"
            )
    if not formats:
        raise EvaluationError("there is no format to choose from; name at least one")
    if not (math.isfinite(budget_bits) and budget_bits > 0):
        raise EvaluationError(f"a budget of {budget_bits:g} bits is not valid: give a number above 0, such as 4.5")


class _Search:
    """The choice of formats for all key caches and value caches that can be packed."""

    def __init__(
        self,
        table: dict[HalfCache, list[FormatCost]],
        sites: Sequence[Site],
        numel: int,
        plain_itemsize: int,
        budget_bits: float,
    ) -> None:
        """
        Args:
            table: the costs of formats, for key caches and value caches. A module counts only if it has both.
            sites: all attention sites of the model.
            numel: elements of the whole cache.
            plain_itemsize: bytes of an element that is not packed.
            budget_bits: bits per element, on average.
        """
        modules = Counter(half.module for half in table)
        self.table = {half: options for half, options in table.items() if modules[half.module] == 2}
        self.sites = sites
        self.numel = numel
        self.fixed_bytes = plain_itemsize * (numel - sum(half.numel for half in self.table))
        self.budget_bits = budget_bits
        if not self.table:
            raise EvaluationError("tune: no layer of this model can be packed; `kvcompile explain` says why")

    def choose(self) -> list[FormatCost]:
        """The best option of every key cache and value cache; EvaluationError if no choice fits."""
        slots = [[Option(cost.nbytes, cost.divergence) for cost in options] for options in self.table.values()]
        capacity = math.floor(self.budget_bits * self.numel / 8) - self.fixed_bytes
        try:
            chosen = choose(slots, capacity)
        except NoRoomError as error:
            raise EvaluationError(
                f"no choice of formats fits a budget of {self.budget_bits:g} bits: the smallest choice takes "
                f"{self._bits(error.least):.4g}; give a larger budget or smaller formats"
            ) from None
        return [options[index] for options, index in zip(self.table.values(), chosen, strict=True)]

    def _bits(self, nbytes: int) -> float:
        """Bits per element of the whole cache if the packed part takes ``nbytes``."""
        return 8 * (nbytes + self.fixed_bytes) / self.numel

    def policy(self, chosen: Sequence[FormatCost]) -> Policy:
        """The policy with the most common format pair as its default, and rules for all other layers."""
        names: dict[str, dict[str, str]] = {}
        for half, cost in zip(self.table, chosen, strict=True):
            names.setdefault(half.module, {})[half.role] = cost.format
        pairs: dict[str, FormatPair | None] = {site.module: None for site in self.sites}
        pairs |= {module: FormatPair(roles["key"], roles["value"]) for module, roles in names.items()}
        default = Counter(pair for pair in pairs.values() if pair is not None).most_common(1)[0][0]
        policy = Policy(default=Choice(key=RoleFormat(dtype=default.key), value=RoleFormat(dtype=default.value)))
        others = {module: pair for module, pair in pairs.items() if pair != default}
        return policy.model_copy(update={"rules": rules_for(others, self.sites, policy)})

    def result(self, chosen: Sequence[FormatCost], policy: Policy, evaluation: Evaluation) -> Tuning:
        return Tuning(
            policy=policy,
            budget_bits=self.budget_bits,
            predicted_bits=self._bits(sum(cost.nbytes for cost in chosen)),
            predicted_divergence=sum(cost.divergence for cost in chosen),
            halves=tuple(
                TunedHalf(half.module, half.role, cost.format, 8 * cost.nbytes / half.numel, cost.divergence)
                for half, cost in zip(self.table, chosen, strict=True)
            ),
            presets=tuple(filter(None, map(self._uniform, presets.preset_names()))),
            evaluation=evaluation,
        )

    def _uniform(self, preset: str) -> Uniform | None:
        """The cost of a preset in every layer; None if one of its formats was not considered."""
        pair = presets.PRESETS[preset]
        costs: list[FormatCost] = []
        for half, options in self.table.items():
            wanted = pair.format_name(half.role)
            costs.extend(cost for cost in options if cost.format == wanted)
        if len(costs) < len(self.table):
            return None
        return Uniform(preset, self._bits(sum(cost.nbytes for cost in costs)), sum(cost.divergence for cost in costs))
