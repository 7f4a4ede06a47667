"""The plot of quality against effective bits."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from kvcompile.errors import plural
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.results import Evaluation

SUFFIXES = (".png", ".svg", ".pdf")
MARKERS = "osD^v<>Pp*X"


def check_plot(path: Path) -> None:
    """Raise EvaluationError if the suffix of ``path`` is not in SUFFIXES, or if Matplotlib is missing."""
    if path.suffix not in SUFFIXES:
        raise EvaluationError(f"--plot {path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if importlib.util.find_spec("matplotlib") is None:
        raise EvaluationError("--plot needs Matplotlib: pip install matplotlib")


def draw(evaluation: Evaluation, path: Path) -> None:
    """Two panels over the effective bits: the change of the metric with its standard error, and the mean divergence.

    The divergence has a logarithmic scale if all divergences are positive. Its panel has no error bars.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    windows = plural(evaluation.num_windows, "window")
    figure.suptitle(
        f"{evaluation.model}: {evaluation.metric} {evaluation.reference:.4f} unquantized\n"
        f"({windows} of {evaluation.prefill} + {evaluation.decode} tokens)",
        fontsize="medium",
    )
    change, divergence = figure.subplots(1, 2)
    _scatter(change, evaluation, "change", 100.0, "change_error")
    change.set_ylabel(f"change of {evaluation.metric}, %\n(bars: one standard error)")
    change.axhline(0, color="black", linewidth=0.8)
    _scatter(divergence, evaluation, "mean_divergence", 1.0)
    divergence.set_ylabel("mean KL divergence, nats")
    if all(result.mean_divergence > 0 for result in evaluation.results):
        divergence.set_yscale("log")
    handles, labels = change.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


def _scatter(axes: Any, evaluation: Evaluation, attribute: str, factor: float, error: str | None = None) -> None:
    """A point for every policy, with an error bar of one standard error if ``error`` names it."""
    axes.set_xlabel("effective bits per element")
    axes.grid(alpha=0.3)
    for index, result in enumerate(evaluation.results):
        value = factor * getattr(result, attribute)
        half = factor * getattr(result, error) if error is not None else None
        marker = MARKERS[index % len(MARKERS)]
        label = Path(result.policy).stem
        axes.errorbar(result.effective_bits, value, yerr=half, fmt=marker, capsize=3, label=label)
