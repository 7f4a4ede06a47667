"""``compare``: the errors of a model and of its layers under one policy, and rules for the worst layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap, sites_of_tap
from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.comparison import Comparison, LayerError
from kvcompile.evaluation.measure import OnProgress, OnResult, counted, evaluate, ignore_progress
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.results import PolicyResult
from kvcompile.evaluation.site_errors import SiteErrors, alone, divergence_when, measure_sites
from kvcompile.evaluation.suggestion import Suggestion, fallbacks, suggest
from kvcompile.evaluation.text import Text
from kvcompile.evaluation.token_ids import text_of
from kvcompile.passes.site import FormatPair, Site, num_layers
from kvcompile.policy.policy import Policy


def compare(
    model: Any,
    inputs: Any,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    *,
    decode: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Compare ``model`` under ``policy`` with the unquantized model, and find the layers with the largest errors.

    Both models read every row of ``inputs``: a prefill, and then single tokens through the cache. The packed model runs
    under ``torch.compile(backend="kvquant")``. Code that was compiled before is neither used nor dropped. A policy with
    ``key_outliers: promote`` is compared after the calibration has replaced its formats.

    Args:
        model: a Hugging Face causal language model in inference mode.
        inputs: token ids, int64 [tokens] or [rows, tokens], or the result of a tokenizer; all rows have the same
            length.
        policy: anything that :meth:`Policy.load` takes.
        decode: the number of tokens of a row that are read one by one; by default 8, or half of a short row.
        on_progress: called with a description, the number of finished steps, and the number of all steps.

    Raises:
        PolicyError: the policy does not exist or is invalid.
        EvaluationError: ``inputs`` are not token ids, or are padded or too short.
    """
    named = policy if isinstance(policy, str | Path) else Policy.load(policy)
    return compare_on(model, text_of(model, inputs, decode), named, on_progress=on_progress)


def compare_on(
    model: Any,
    text: Text,
    policy: str | Path | Policy,
    *,
    model_name: str = "",
    on_progress: OnProgress = ignore_progress,
    on_result: OnResult = lambda evaluation: None,
) -> Comparison:
    """:func:`compare` on the windows of a text; ``on_result`` gets the predictions before layers are measured."""
    model, loaded = uncompiled(model), Policy.load(policy)
    tap = AttentionTap(model)
    if loaded.key_outliers == "promote":
        policy = loaded = Calibration(model, text.inputs[0], [loaded], tap).promoted(loaded)
    evaluation = evaluate(
        model, text, [policy], model_name=model_name, tap=tap, on_progress=on_progress, on_result=on_result
    )
    return Comparison(evaluation, *_by_layer(tap, text, loaded, evaluation.results[0], on_progress))


def _by_layer(
    tap: AttentionTap, text: Text, policy: Policy, result: PolicyResult, on_progress: OnProgress
) -> tuple[tuple[LayerError, ...], Suggestion | None]:
    """The errors of all packed layers, worst first, and the suggested rules."""
    windows = text.inputs
    sites = sites_of_tap(tap, windows[0])
    formats: dict[str, FormatPair] = {}
    for site in sites:
        pair = policy.formats_for(site.module, site.layer, num_layers(sites))
        if pair is not None and site.module not in result.unpacked_modules:
            formats[site.module] = pair
    candidates: dict[str, list[FormatPair]] = {}

    def wanted(site: Site, call: AttentionCall) -> list[FormatPair]:
        if site.module not in formats:
            return []
        pair = formats[site.module]
        candidates[site.module] = fallbacks(pair, call)
        return [pair, alone(pair, "key"), alone(pair, "value"), *candidates[site.module]]

    measured = measure_sites(tap, windows, wanted, counted(on_progress, "layer by layer", len(windows) * len(sites)))
    formats = {module: pair for module, pair in formats.items() if module in measured}
    on_run = counted(on_progress, "one layer packed", len(windows) * len(formats))
    exact = [tap(window, lambda site, call: None) for window in windows] if formats else []
    divergences = {
        module: divergence_when(tap, windows, exact, module, pair, on_run) for module, pair in formats.items()
    }
    layers = [_layer_error(measured[module], pair, divergences[module], result) for module, pair in formats.items()]
    layers.sort(key=lambda layer: -layer.divergence)
    return tuple(layers), suggest(policy, sites, formats, candidates, measured, divergences)


def _layer_error(errors: SiteErrors, formats: FormatPair, divergence: float, result: PolicyResult) -> LayerError:
    attention, stored = errors.attention.errors(), errors.stored.errors()
    return LayerError(
        module=errors.site.module,
        key_format=formats.key,
        value_format=formats.value,
        divergence=divergence,
        key_error=stored.get(("key", formats), 0.0),
        value_error=stored.get(("value", formats), 0.0),
        attention_error=attention.get(formats, 0.0),
        from_keys=attention.get(alone(formats, "key"), 0.0),
        from_values=attention.get(alone(formats, "value"), 0.0),
        model_error=result.attention_errors.get(errors.site.module),
    )
