"""The result of ``tune``: formats for every layer within a budget of bits, as data, text and a policy file."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.evaluation.results import Evaluation, PolicyResult, finite
from kvcompile.evaluation.results_text import circumstances, short
from kvcompile.policy.policy import Policy
from kvcompile.tables import table, wrapped


@dataclass(frozen=True)
class TunedHalf:
    """The chosen format for the keys or the values of a layer.

    Attributes:
        module: the module that computes attention.
        role: ``key`` or ``value``.
        format: the name of the format.
        bits: bits per element.
        divergence: its estimated contribution to the divergence of the predictions, in nats.
    """

    module: str
    role: str
    format: str
    bits: float
    divergence: float


@dataclass(frozen=True)
class Uniform:
    """A preset in all layers, for comparison: its bits per element, and the estimated divergence in nats."""

    preset: str
    bits: float
    divergence: float


@dataclass(frozen=True)
class Tuning:
    """The policy that was found; ``print`` it for tables.

    Attributes:
        policy: the formats of every layer; ``auto`` for caches that cannot be packed.
        budget_bits: the budget in bits per element of the cache.
        predicted_bits: the calculated bits per element.
        predicted_divergence: the estimated divergence of the predictions, in nats.
        halves: the formats of keys and values of every layer, in the order of the layers.
        presets: the estimated costs of all presets whose formats were considered.
        measured_caches: the number of key and value caches whose divergence was measured, and the number of all. They
            differ only in an interrupted search, which uses estimates for the other caches.
        estimated_windows: the number of windows of the estimates, and the number of all. They differ only in an
            interrupted search.
        evaluation: the measurement of the policy on the compiled model; None in an interrupted search.
    """

    policy: Policy
    budget_bits: float
    predicted_bits: float
    predicted_divergence: float
    halves: tuple[TunedHalf, ...]
    presets: tuple[Uniform, ...]
    measured_caches: tuple[int, int]
    estimated_windows: tuple[int, int]
    evaluation: Evaluation | None

    @property
    def result(self) -> PolicyResult:
        """The measured quality under the policy; ValueError if the search was interrupted."""
        if self.evaluation is None:
            raise ValueError("the search was interrupted before the policy was measured; tune again")
        return self.evaluation.results[0]

    @property
    def progress(self) -> str:
        """A text on the measurements of an interrupted search."""
        estimated, windows = self.estimated_windows
        text = f"{self.measured_caches[0]} of {self.measured_caches[1]} key and value caches were measured"
        return text if estimated == windows else f"{estimated} of {windows} windows were estimated, and {text}"

    def to_yaml(self) -> str:
        """The policy as YAML, with the predicted and measured figures as comments."""
        lines = [f"bits per element: budget {self.budget_bits:g}, predicted {self.predicted_bits:.4f}"]
        lines.append(f"KL divergence in nats: predicted {self.predicted_divergence:.2e}")
        if self.evaluation is None:
            lines.insert(0, f"interrupted: {self.progress}, and the policy was not")
        else:
            schedule = f"{self.evaluation.num_windows} x ({self.evaluation.prefill} + {self.evaluation.decode}) tokens"
            origin = f"{self.evaluation.model} on {self.evaluation.data}, {schedule}, {self.evaluation.device}"
            lines[0] += f", measured {self.result.effective_bits:.4f}"
            lines[1] += f", measured {self.result.mean_divergence:.2e}"
            lines.insert(0, f"tuned for {origin}")
        return "".join(f"# {line}\n" for line in lines) + self.policy.to_yaml()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_yaml`, which ``Policy.load`` reads back as :attr:`policy`; OSError if that fails."""
        Path(path).write_text(self.to_yaml(), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become None."""
        data = {field: getattr(self, field) for field in ("budget_bits", "predicted_bits", "predicted_divergence")}
        data["policy"] = self.policy.model_dump(mode="json", exclude_none=True)
        for field in ("halves", "presets"):
            data[field] = [dataclasses.asdict(item) for item in getattr(self, field)]
        data["measured_caches"], data["estimated_windows"] = list(self.measured_caches), list(self.estimated_windows)
        return finite({**data, "evaluation": self.evaluation and self.evaluation.to_dict()})

    def __str__(self) -> str:
        return render(self)


LEGEND = (
    "bits: bits per element of the cache, with scales, padding and exact tokens.  KL: mean divergence from the "
    "unquantized model in nats; the figures of layers and of presets are estimates."
)


def render(tuning: Tuning) -> str:
    """The formats of every layer, the predicted and measured figures, presets for comparison, and the policy."""
    rows = [["predicted", f"{tuning.predicted_bits:.3f}", f"{tuning.predicted_divergence:.2e}", ""]]
    if tuning.evaluation is not None:
        result = tuning.result
        top1 = f"{100 * result.same_top1:.1f}"
        rows.append(["measured", f"{result.effective_bits:.3f}", f"{result.mean_divergence:.2e}", top1])
    rows.extend([preset.preset, f"{preset.bits:.3f}", f"{preset.divergence:.2e}", ""] for preset in tuning.presets)
    parts = [
        wrapped(circumstances(tuning.evaluation) if tuning.evaluation is not None else tuning.progress, 2),
        table(["module", "keys", "bits", "values", "bits", "KL"], _layers(tuning.halves)),
        table([f"budget {tuning.budget_bits:g} bits", "bits", "KL", "top-1"], rows),
        wrapped(LEGEND, 2),
        tuning.policy.to_yaml().rstrip(),
    ]
    if tuning.evaluation is not None:
        parts.extend(wrapped(f"note: {note}", 6) for note in tuning.result.notes)
    return "\n\n".join(parts)


def _layers(halves: tuple[TunedHalf, ...]) -> list[list[str]]:
    """A row for every layer: formats and bits of its keys and values, and the divergence that both add."""
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
