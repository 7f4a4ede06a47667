"""``compare``: what one policy does to a model, as a whole and layer by layer, and which layers deserve better."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap, sites_heard
from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.measure import OnProgress, counted, evaluate, ignore_progress
from kvcompile.evaluation.models import uncompiled
from kvcompile.evaluation.results import Evaluation, PolicyResult, finite
from kvcompile.evaluation.site_errors import SiteErrors, alone, divergence_when, measure_sites
from kvcompile.evaluation.suggestion import Suggestion, raised, suggest
from kvcompile.evaluation.text import Text
from kvcompile.evaluation.token_ids import text_of
from kvcompile.passes.pipeline import num_layers
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy.policy import Policy


@dataclass(frozen=True)
class LayerError:
    """What its formats do to one layer. Errors are relative: a norm of the difference over the norm of the exact.

    Attributes:
        module: the module that computes attention.
        key_format, value_format: of its cache.
        divergence: of the predictions when only this layer is packed, mean, in nats; those of all layers add up to
            about that of the whole model.
        key_error, value_error: of the keys and the values that the cache gives back.
        attention_error: of the attention output, with queries, keys and values of the unquantized model: the error is
            this layer's own.
        from_keys, from_values: the same with only the keys, or only the values, packed.
        model_error: of the module's output in the compiled model, with the errors of all layers before it; None where
            it is not known.
    """

    module: str
    key_format: str
    value_format: str
    divergence: float
    key_error: float
    value_error: float
    attention_error: float
    from_keys: float
    from_values: float
    model_error: float | None


@dataclass(frozen=True)
class Comparison:
    """A model under a policy, beside the same model as it is; ``print`` it for tables.

    Attributes:
        evaluation: the predictions of the compiled model, with all circumstances.
        layers: the packed layers, that which changes the predictions most first.
        suggestion: rules for the worst of them; None if nothing is packed.
    """

    evaluation: Evaluation
    layers: tuple[LayerError, ...]
    suggestion: Suggestion | None

    @property
    def result(self) -> PolicyResult:
        """What the policy does to the predictions."""
        return self.evaluation.results[0]

    @property
    def mean_divergence(self) -> float:
        """Kullback-Leibler divergence of the packed model's predictions from the unquantized one's, mean, in nats."""
        return self.result.mean_divergence

    @property
    def same_top1(self) -> float:
        """The part of tokens for which both think the same token most likely."""
        return self.result.same_top1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not finite becomes None."""
        suggestion = None
        if self.suggestion is not None:
            suggestion = {
                "modules": list(self.suggestion.modules),
                "target": self.suggestion.target,
                "saved": self.suggestion.saved,
                "text": self.suggestion.text,
                "policy": self.suggestion.policy.model_dump(mode="json", exclude_none=True),
            }
        layers = [dataclasses.asdict(layer) for layer in self.layers]
        return finite({**self.evaluation.to_dict(), "layers": layers, "suggestion": suggestion})

    def __str__(self) -> str:
        from kvcompile.evaluation.comparison_text import render

        return render(self)


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
