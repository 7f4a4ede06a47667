"""What ``compare`` found: the errors of the whole model and of every layer, as data and as text."""

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
        return render(self)


HEADER = ["module", "KL", "K", "V", "attn", "of K", "of V", "in model"]


LEGEND = (
    "Layers, worst first.  KL: divergence when only this layer is packed, mean, in nats.  Errors are relative L2, "
    "percent.  K, V: of the keys and values that the cache gives back.  attn: of the layer's attention output when "
    "only this layer is packed; of K, of V: when only its keys, or its values, are.  in model: of the module's output "
    "in the compiled model, with the errors of the layers before it."
)


def render(comparison: Comparison) -> str:
    """The predictions, the layers, and what to write into the policy."""
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
    """Which layers have which formats, a line for every pair."""
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
