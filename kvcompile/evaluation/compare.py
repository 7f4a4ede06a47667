"""``compare``: measure what one policy does to a model, as a whole and layer by layer, and which layers deserve
better."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap, sites_heard
from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.comparison import Comparison, LayerError
from kvcompile.evaluation.measure import OnProgress, counted, evaluate, ignore_progress
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.results import PolicyResult
from kvcompile.evaluation.site_errors import SiteErrors, alone, divergence_when, measure_sites
from kvcompile.evaluation.suggestion import Suggestion, raised, suggest
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
    """Compare ``model`` under ``policy`` with itself, and find the layers that suffer most.

    Both models read every row of ``inputs``, a prefill and then tokens one by one through the cache; the packed one is
    what ``torch.compile(backend="kvquant")`` makes of it. What else was compiled is neither used nor dropped. A policy
    with ``key_outliers: promote`` is compared as it comes out of the calibration.

    Args:
        model: a Hugging Face causal language model in inference mode.
        inputs: token ids, int64 [tokens] or [rows, tokens], or what a tokenizer returns; rows of one length.
        policy: what :meth:`Policy.load` takes.
        decode: how many tokens of a row are read one by one; by default 8, or half of a short row.
        on_progress: hears what is being done, how many steps are done, and how many there are.

    Raises:
        PolicyError: the policy does not exist or is wrong.
        EvaluationError: ``inputs`` are no token ids, or are padded or too short.
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
) -> Comparison:
    """:func:`compare` on the windows of a text."""
    model, loaded = uncompiled(model), Policy.load(policy)
    if loaded.key_outliers == "promote":
        policy = loaded = Calibration(model, text.windows[0], [loaded]).promoted(loaded)
    evaluation = evaluate(model, text, [policy], model_name=model_name, on_progress=on_progress)
    return Comparison(evaluation, *_by_layer(model, text, loaded, evaluation.results[0], on_progress))


def _by_layer(
    model: Any, text: Text, policy: Policy, result: PolicyResult, on_progress: OnProgress
) -> tuple[tuple[LayerError, ...], Suggestion | None]:
    """The errors of all packed layers, worst first, and the suggestion."""
    tap = AttentionTap(model)
    windows = text.windows[:, : text.schedule.num_tokens]
    sites = sites_heard(tap, windows[0])
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
        candidates[site.module] = raised(pair, call)
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
