"""The result of ``compare``: the errors of the whole model and of every layer, as data and as text."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from kvcompile.evaluation.results import Evaluation, PolicyResult, finite
from kvcompile.evaluation.results_text import circumstances, legend, short, summary
from kvcompile.evaluation.suggestion import Suggestion
from kvcompile.report.data import enumerate_modules
from kvcompile.tables import table, wrapped


@dataclass(frozen=True)
class LayerError:
    """The errors of one packed layer. Errors are relative: L2 norm of the difference over L2 norm of the exact tensor.

    Attributes:
        module: the module that computes attention.
        key_format, value_format: the formats of its cache.
        divergence: mean divergence of the predictions, in nats, if only this layer is packed. The divergences of all
            layers add up to about the divergence of the whole model.
        key_error, value_error: the errors of the keys and values that the cache returns.
        attention_error: the error of the attention output on queries, keys and values of the unquantized model. It
            excludes the errors of other layers.
        from_keys, from_values: the same error with only the keys, or only the values, packed.
        model_error: the error of the module's output in the compiled model, which includes the errors of earlier
            layers; None if it is not known.
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
    """A model under a policy, compared with the unquantized model; ``print`` it for tables.

    Attributes:
        evaluation: the predictions of the compiled model, and the conditions of the measurement.
        layers: the packed layers; the layer that changes the predictions most comes first.
        suggestion: rules for the worst layers; None if nothing is packed.
    """

    evaluation: Evaluation
    layers: tuple[LayerError, ...]
    suggestion: Suggestion | None

    @property
    def result(self) -> PolicyResult:
        """The predictions of the compiled model under the policy."""
        return self.evaluation.results[0]

    @property
    def mean_divergence(self) -> float:
        """Mean Kullback-Leibler divergence, in nats, of the packed model's predictions from the unquantized model's."""
        return self.result.mean_divergence

    @property
    def same_top1(self) -> float:
        """The fraction of positions at which both models predict the same most likely token."""
        return self.result.same_top1

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become None."""
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
        return render(self)


HEADER = ["module", "KL", "K", "V", "attn", "of K", "of V", "in model"]


LEGEND = (
    "Layers, worst first.  KL: mean divergence in nats, if only this layer is packed.  All errors are relative L2, in "
    "percent.  K, V: the keys and values that the cache returns.  attn: the layer's attention output, if only this "
    "layer is packed.  of K, of V: the same, if only its keys or only its values are packed.  in model: the module's "
    "output in the compiled model, which includes the errors of earlier layers."
)


def render(comparison: Comparison) -> str:
    """The predictions, the layers, and the suggested rules."""
    evaluation = comparison.evaluation
    parts = [wrapped(circumstances(evaluation), 2), summary(evaluation), wrapped(legend(evaluation), 2)]
    if comparison.layers:
        parts.append(table(HEADER, [_row(layer) for layer in comparison.layers]))
        parts.extend([wrapped(LEGEND, 2), _formats(comparison.layers)])
    if comparison.suggestion is not None:
        parts.append(_suggestion(comparison.suggestion))
    parts.extend(wrapped(f"note: {note}", 6) for note in comparison.result.notes)
    return "\n\n".join(parts)


def _formats(layers: tuple[LayerError, ...]) -> str:
    """A line for every format pair, with its layers."""
    modules: dict[str, list[str]] = {}
    for layer in layers:
        modules.setdefault(f"{layer.key_format} / {layer.value_format}", []).append(layer.module)
    return "\n".join(wrapped(f"{pair}: {enumerate_modules(sorted(names))}", 2) for pair, names in modules.items())


def _row(layer: LayerError) -> list[str]:
    errors = (layer.key_error, layer.value_error, layer.attention_error, layer.from_keys, layer.from_values)
    cells = ["" if error is None else f"{100 * error:.2f}" for error in (*errors, layer.model_error)]
    return [layer.module, short(layer.divergence), *cells]


def _suggestion(suggestion: Suggestion) -> str:
    count = len(suggestion.modules)
    what = f"{enumerate_modules(list(suggestion.modules))} add{'s' if count == 1 else ''} most to the divergence"
    saved = f"these rules, put first, are estimated to make it smaller by {short(suggestion.saved)} nats"
    return f"{wrapped(f'{what}; {saved}:', 2)}\n\n{suggestion.text.rstrip()}"
