"""``tune``: the search for the best formats of every layer's keys and values within a budget of bits."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvcompile.errors import did_you_mean
from kvcompile.evaluation.attention_sites import AttentionTap, sites_of_tap
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.knapsack import NoRoomError, Option, choose
from kvcompile.evaluation.layer_rules import rules_for
from kvcompile.evaluation.measure import OnProgress, evaluate, ignore_progress
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.results import Evaluation
from kvcompile.evaluation.sensitivity import (
    FormatCost,
    HalfCache,
    Sensitivity,
    estimate_divergences,
    half_caches,
    measure_divergences,
)
from kvcompile.evaluation.text import Text
from kvcompile.evaluation.token_ids import text_of
from kvcompile.evaluation.tuning import TunedHalf, Tuning, Uniform
from kvcompile.kernels.formats import CALIBRATED_FORMATS, FORMATS, get_format, is_calibrated
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy import presets
from kvcompile.policy.policy import Choice, Policy, RoleFormat
from kvcompile.policy.transforms import Transforms

DEFAULT_FORMATS = (*(name for name, fmt in FORMATS.items() if fmt.bits <= 8), "bfloat16")
"""The formats that a search considers by default."""

MAX_ROUNDS = 8
"""The maximum number of rounds of choosing and measuring formats. Afterwards only measured formats are chosen."""

WIDTHS = (
    "6544 6543 6433 5443 5433 5432 5421 5320 5310 5300 5200 4321 4300 4310 4200 4100 6420 6400 6310 6300 3200 3100 3000"
)
"""The bits of the four quarters of transform formats that a search considers if it has transforms."""

CALIBRATED = (
    *(name for name in CALIBRATED_FORMATS if name.endswith("_mean")),
    *(f"transform_{bits}" for bits in WIDTHS.split()),
)
"""The calibrated formats that a search considers by default if it has transforms."""


class InterruptedTuning(KeyboardInterrupt):
    """The user ended a search after its first estimates; ``tuning`` is the best choice from the measurements so far."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        super().__init__()


def tune(
    model: Any,
    data: Any,
    budget_bits: float,
    output: str | os.PathLike[str] | None = None,
    *,
    formats: Iterable[str] | None = None,
    transforms: str | os.PathLike[str] | None = None,
    decode: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """Find formats for every layer's keys and values, within a budget, that change the predictions of ``model`` least.

    The cost of each format in each layer is estimated first (:mod:`kvcompile.evaluation.sensitivity`). The choice
    within the budget is a knapsack problem, which dynamic programming solves. The cost of each chosen format is then
    measured, and the choice is repeated until all chosen formats are measured. The resulting policy is measured once on
    the compiled model. If the backend leaves layers unpacked, they count at full size, and the formats of the other
    layers are chosen again. On Ctrl-C, the best choice from the estimates and measurements so far is written, and
    :class:`InterruptedTuning` is raised with it.

    Args:
        model: a Hugging Face causal language model in inference mode.
        data: token ids, int64 [tokens] or [rows, tokens], or the result of a tokenizer; all rows have the same length.
        budget_bits: bits per element of the cache, on average, with scales, zero points, the padding of the last block
            and exact tokens. They are counted for a static cache that holds all tokens of a row except the last; a
            capacity that is a multiple of 64 has no padding.
        output: a file for the policy.
        formats: the formats to choose from; by default all up to 8 bits and bfloat16, and calibrated formats if there
            are ``transforms``.
        transforms: the transforms file of the model, for calibrated formats.
        decode: the number of tokens of a row that are read one by one in the measurement of the result; by default 8,
            or half of a short row.
        on_progress: called with a description, the number of finished steps, and the number of all steps.

    Raises:
        EvaluationError: ``data`` are not token ids, a format does not exist, nothing can be packed, no choice fits, or
            the budget is larger than the plain cache.
        PolicyError: ``transforms`` cannot be read, or belong to another model.
        OSError: ``output`` cannot be written.
    """
    text = text_of(model, data, decode)
    try:
        tuning = tune_on(model, text, budget_bits, formats=formats, transforms=transforms, on_progress=on_progress)
    except InterruptedTuning as interrupted:
        if output is not None:
            interrupted.tuning.save(output)
        raise
    if output is not None:
        tuning.save(output)
    return tuning


def tune_on(
    model: Any,
    text: Text,
    budget_bits: float,
    *,
    formats: Iterable[str] | None = None,
    transforms: str | os.PathLike[str] | None = None,
    model_name: str = "",
    on_progress: OnProgress = ignore_progress,
) -> Tuning:
    """:func:`tune` on the windows of a text."""
    names = search_formats(formats, budget_bits, has_transforms=transforms is not None)
    model = uncompiled(model)
    known = None if transforms is None else Transforms.read(Path(transforms).absolute())
    if known is not None:
        known.check_model(model)
    windows = text.inputs
    tap = AttentionTap(model)
    sites = sites_of_tap(tap, windows[0])
    halves, numel = half_caches(model, text.schedule, sites)

    def named(half: HalfCache, name: str) -> str:
        if known is None or not is_calibrated(name):
            return name
        return known.calibrated(get_format(name), half.role, half.module, half.layer).name

    def search_without(left: set[str]) -> _Search:
        table = dict(zip(halves, measured.costs(), strict=True))
        table = {half: options for half, options in table.items() if options and half.module not in left}
        return _Search(table, sites, numel, model.dtype.itemsize, budget_bits, known)

    _check_budget(halves, numel, names, model.dtype.itemsize, budget_bits)
    measured = estimate_divergences(model, tap, windows, halves, names, named, on_progress)
    left: set[str] = set()
    rounds = itertools.count(1)
    try:
        if measured.is_interrupted:
            raise KeyboardInterrupt
        exact = [tap(window, lambda site, call: None) for window in windows]
        while True:
            search = search_without(left)
            chosen = search.choose(measured_only=next(rounds) > MAX_ROUNDS)
            if new := search.not_measured(chosen):
                measure_divergences(measured, tap, windows, exact, new, named, on_progress)
                continue
            policy = search.policy(chosen)
            evaluation = evaluate(model, text, [policy], model_name=model_name, tap=tap, on_progress=on_progress)
            refused = set(evaluation.results[0].unpacked_modules)
            if not any(half.module in refused for half in search.table):
                return search.result(chosen, measured, evaluation)
            left |= refused
    except KeyboardInterrupt:
        search = search_without(left)
        raise InterruptedTuning(search.result(search.choose(), measured, None)) from None


def search_formats(formats: Iterable[str] | None, budget_bits: float, *, has_transforms: bool) -> list[str]:
    """The formats of a search: ``formats`` or the default.

    Raises:
        EvaluationError: a format does not exist or needs transforms, or the budget is not a positive number.
    """
    known = [*FORMATS, *(CALIBRATED if has_transforms else ())]
    names = list(dict.fromkeys(formats)) if formats is not None else [*DEFAULT_FORMATS, *known[len(FORMATS) :]]
    for name in names:
        if is_calibrated(name) and not has_transforms:
            raise EvaluationError(f"{name} needs a calibration of the model; give --transforms FILE")
        if name not in FORMATS and not is_calibrated(name):
            raise EvaluationError(
                f"there is no format {name!r}{did_you_mean(name, known)} (formats: {', '.join(known)})"
            )
    if not names:
        raise EvaluationError("there is no format to choose from; name at least one")
    if not (math.isfinite(budget_bits) and budget_bits > 0):
        sizes = sorted(get_format(name).bits for name in names)
        raise EvaluationError(
            f"a budget of {budget_bits:g} bits is not valid: the formats to choose from have codes of {sizes[0]:g} to "
            f"{sizes[-1]:g} bits; give a number in this range, and a little more for their scales"
        )
    return names


def _check_budget(
    halves: Sequence[HalfCache], numel: int, formats: Iterable[str], plain_itemsize: int, budget_bits: float
) -> None:
    """Raise EvaluationError, before any measurement, if all choices exceed the budget, or none can reach it.

    The largest choice leaves caches unpacked, because the backend may not be able to pack them.
    """
    least = most = plain_itemsize * (numel - sum(half.numel for half in halves))
    for half in halves:
        sizes = [size for name in formats if (size := half.nbytes(name)) is not None]
        least += min(sizes, default=plain_itemsize * half.numel)
        most += max([*sizes, plain_itemsize * half.numel])
    if least > math.floor(budget_bits * numel / 8):
        raise _no_room(budget_bits, 8 * least / numel)
    if budget_bits * numel > 8 * most:
        raise EvaluationError(
            f"a budget of {budget_bits:g} bits is not valid: caches of this model take {8 * least / numel:.4g} bits in "
            f"the smallest formats and at most {8 * most / numel:.4g} bits; give a number in this range"
        )


def _no_room(budget_bits: float, least_bits: float) -> EvaluationError:
    return EvaluationError(
        f"no choice of formats fits a budget of {budget_bits:g} bits: the smallest choice takes {least_bits:.4g}; give "
        "a larger budget or smaller formats"
    )


class _Search:
    """The choice of formats for all key caches and value caches that can be packed."""

    def __init__(
        self,
        table: dict[HalfCache, list[FormatCost]],
        sites: Sequence[Site],
        numel: int,
        plain_itemsize: int,
        budget_bits: float,
        transforms: Transforms | None,
    ) -> None:
        """
        Args:
            table: the costs of formats, for key caches and value caches. A module counts only if it has both.
            sites: all attention sites of the model.
            numel: elements of the whole cache.
            plain_itemsize: bytes of an unpacked element.
            budget_bits: bits per element, on average.
            transforms: the transforms of calibrated formats.
        """
        modules = Counter(half.module for half in table)
        self.table = {half: options for half, options in table.items() if modules[half.module] == 2}
        self.sites = sites
        self.numel = numel
        self.fixed_bytes = plain_itemsize * (numel - sum(half.numel for half in self.table))
        self.budget_bits = budget_bits
        self.transforms = transforms
        if not self.table:
            raise EvaluationError("tune: no layer of this model can be packed; `kvcompile explain` says why")

    def choose(self, *, measured_only: bool = False) -> list[FormatCost]:
        """The best option of every key cache and value cache; EvaluationError if no choice fits.

        ``measured_only``: whether to choose only among measured formats.
        """
        table = [[cost for cost in costs if cost.is_known or not measured_only] for costs in self.table.values()]
        slots = [[Option(cost.nbytes, cost.divergence) for cost in options] for options in table]
        capacity = math.floor(self.budget_bits * self.numel / 8) - self.fixed_bytes
        try:
            chosen = choose(slots, capacity)
        except NoRoomError as error:
            raise _no_room(self.budget_bits, self._bits(error.least)) from None
        return [options[index] for options, index in zip(table, chosen, strict=True)]

    def not_measured(self, chosen: Sequence[FormatCost]) -> list[tuple[HalfCache, str]]:
        """The caches whose chosen formats have only been estimated, each with that format."""
        pairs = zip(self.table, chosen, strict=True)
        return [(half, cost.format) for half, cost in pairs if not cost.is_known]

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
        key, value = RoleFormat(dtype=default.key), RoleFormat(dtype=default.value)
        is_used = any(is_calibrated(cost.format) for cost in chosen)
        source = self.transforms.source if self.transforms is not None and is_used else None
        policy = Policy(default=Choice(key=key, value=value, transforms=source))
        others = {module: pair for module, pair in pairs.items() if pair != default}
        return policy.model_copy(update={"rules": rules_for(others, self.sites, policy)})

    def result(self, chosen: Sequence[FormatCost], measured: Sensitivity, evaluation: Evaluation | None) -> Tuning:
        names = [*presets.PRESETS, *presets.CALIBRATED_PRESETS]
        return Tuning(
            policy=self.policy(chosen),
            budget_bits=self.budget_bits,
            predicted_bits=self._bits(sum(cost.nbytes for cost in chosen)),
            predicted_divergence=sum(cost.divergence for cost in chosen),
            halves=tuple(
                TunedHalf(half.module, half.role, cost.format, 8 * cost.nbytes / half.numel, cost.divergence)
                for half, cost in zip(self.table, chosen, strict=True)
            ),
            presets=tuple(filter(None, map(self._uniform, names))),
            measured_caches=(measured.num_measured, len(measured.halves)),
            estimated_windows=measured.estimated_windows,
            evaluation=evaluation,
        )

    def _uniform(self, preset: str) -> Uniform | None:
        """The cost of a preset in every layer; None if it keeps exact tokens, or has a format outside the search."""
        pair = (presets.PRESETS | presets.CALIBRATED_PRESETS)[preset]
        if pair.residual_length or pair.sink_tokens:
            return None
        costs: list[FormatCost] = []
        for half, options in self.table.items():
            wanted = pair.format_name(half.role)
            costs.extend(cost for cost in options if cost.format == wanted)
        if len(costs) < len(self.table):
            return None
        return Uniform(preset, self._bits(sum(cost.nbytes for cost in costs)), sum(cost.divergence for cost in costs))
