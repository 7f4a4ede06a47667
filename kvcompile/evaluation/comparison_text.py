"""How a comparison looks in a terminal."""

from __future__ import annotations

from kvcompile.evaluation.comparison import Comparison, LayerError
from kvcompile.evaluation.results_text import circumstances, legend, short, summary
from kvcompile.evaluation.suggestion import Suggestion
from kvcompile.report.report import enumerate_modules
from kvcompile.tables import table, wrapped

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
