"""The table of quality.md at a long context, from ``quality_32k.json``, which ``kvcompile eval`` has written."""

from __future__ import annotations

import json
from pathlib import Path

from reference_parts import table

from kvcompile.evaluation.results_text import short

RESULTS = Path(__file__).parent / "quality_32k.json"


def long_context() -> str:
    """The loss of quality under each policy, and the planted numbers that the model still retrieves."""
    evaluation = json.loads(RESULTS.read_text(encoding="utf-8"))
    first = evaluation["results"][0]
    distances = [one["distance"] for one in first["recalled"]]
    shown = [index for index, distance in enumerate(distances) if distance >= 8192]
    header = ["policy", "bits", "bpb", "change", "+-", "KL", "KL later", "+- of KL later"]
    header += [f"retrieved to {distances[index]}" for index in shown] + [f"KL to {distances[shown[-1]]}"]
    reference = [
        f"none: {evaluation['dtype']}",
        f"{evaluation['reference_bits']:.2f}",
        f"{evaluation['reference']:.4f}",
    ]
    reference += [""] * 5 + [f"{100 * first['recalled'][index]['reference']:.1f} %" for index in shown] + [""]
    rows = [
        [
            f"`{result['policy']}`",
            f"{result['effective_bits']:.2f}",
            f"{result['quality']:.4f}",
            f"{100 * result['change']:+.2f} %",
            f"{100 * result['change_error']:.2f}",
            short(result["mean_divergence"]),
            short(result["decode_divergence"]),
            short(result["decode_divergence_error"]),
            *(f"{100 * result['recalled'][index]['recalled']:.1f} %" for index in shown),
            short(result["recalled"][shown[-1]]["divergence"]),
        ]
        for result in evaluation["results"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in evaluation["versions"].items() if name != "kvcompile")
    questions = sum(one["questions"] for one in first["recalled"])
    return (
        f"{evaluation['device']}, {versions}; {evaluation['tokens']} predictions and {questions} questions, "
        f"{first['recalled'][shown[-1]]['questions']} of them more than {distances[shown[-1] - 1]} tokens after the "
        f"number.\n\n{table(header, rows=[reference, *rows])}"
    )
