"""How a comparison looks in a terminal."""

from __future__ import annotations

from kvcompile.evaluation.comparison import Comparison, LayerError
from kvcompile.evaluation.results_text import circumstances, legend, summary
from kvcompile.tables import table, wrapped

HEADER = ["module", "K", "V", "attn", "of K", "of V", "in model", "format of keys", "of values"]

LEGEND = (
    "Layers, worst first; errors are relative L2, percent.  K, V: of the keys and values that the cache gives back.  "
    "attn: of the layer's attention output when only this layer is packed; of K, of V: when only its keys, or its "
    "values, are.  in model: of the module's output in the compiled model, with the errors of the layers before it."
)


def render(comparison: Comparison) -> str:
    """The predictions, the layers, and what to write into the policy."""
    evaluation = comparison.evaluation
    parts = [wrapped(circumstances(evaluation), 2), summary(evaluation), wrapped(legend(evaluation), 2)]
    if comparison.layers:
        parts.append(table(HEADER, [_row(layer) for layer in comparison.layers]))
        parts.append(wrapped(LEGEND, 2))
    if comparison.suggestion is not None:
        modules = comparison.suggestion.modules
        what = "this layer" if len(modules) == 1 else f"these {len(modules)} layers"
        target = f"{100 * comparison.suggestion.target:.2g} %"
        parts.append(
            wrapped(f"To bring {what} to {target} or less ({', '.join(modules)}), put these rules first:", 2)
            + f"\n\n{comparison.suggestion.text.rstrip()}"
        )
    parts.extend(wrapped(f"note: {note}", 6) for note in comparison.result.notes)
    return "\n\n".join(parts)


def _row(layer: LayerError) -> list[str]:
    errors = (layer.key_error, layer.value_error, layer.attention_error, layer.from_keys, layer.from_values)
    cells = ["" if error is None else f"{100 * error:.2f}" for error in (*errors, layer.model_error)]
    return [layer.module, *cells, layer.key_format, layer.value_format]
