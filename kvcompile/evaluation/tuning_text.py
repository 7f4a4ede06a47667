"""How a tuned policy looks in a terminal."""

from __future__ import annotations

from kvcompile.evaluation.results_text import circumstances, short
from kvcompile.evaluation.tuning import TunedHalf, Tuning
from kvcompile.tables import table, wrapped

LEGEND = (
    "bits: of an element of the cache, scales, padding and unquantized tokens included.  KL: divergence from the "
    "unquantized model in nats, mean; that of a layer, and of a preset, is an estimate."
)


def render(tuning: Tuning) -> str:
    """The choice of every layer, what was predicted and measured, presets for comparison, and the policy."""
    result = tuning.result
    rows = [
        ["predicted", f"{tuning.predicted_bits:.3f}", f"{tuning.predicted_divergence:.2e}", ""],
        ["measured", f"{result.effective_bits:.3f}", f"{result.mean_divergence:.2e}", f"{100 * result.same_top1:.1f}"],
        *([preset.preset, f"{preset.bits:.3f}", f"{preset.divergence:.2e}", ""] for preset in tuning.presets),
    ]
    parts = [
        wrapped(circumstances(tuning.evaluation), 2),
        table(["module", "keys", "bits", "values", "bits", "KL"], _layers(tuning.halves)),
        table([f"budget {tuning.budget_bits:g} bits", "bits", "KL", "top-1"], rows),
        wrapped(LEGEND, 2),
        tuning.policy.to_yaml().rstrip(),
    ]
    parts.extend(wrapped(f"note: {note}", 6) for note in result.notes)
    return "\n\n".join(parts)


def _layers(halves: tuple[TunedHalf, ...]) -> list[list[str]]:
    """A row for every layer: formats and bits of its keys and values, and what both add to the divergence."""
    by_module: dict[str, list[TunedHalf]] = {}
    for half in halves:
        by_module.setdefault(half.module, []).append(half)
    return [
        [
            module,
            *(cell for half in both for cell in (half.format, f"{half.bits:.2f}")),
            short(sum(half.divergence for half in both)),
        ]
        for module, both in by_module.items()
    ]
