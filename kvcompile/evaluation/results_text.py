"""The text of an evaluation for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from kvcompile.errors import plural
from kvcompile.evaluation.results import Evaluation, PolicyResult
from kvcompile.tables import table

HEADER = ["policy", "bits", "{metric}", "change", "+-", "KL", "median", "99.9%", "top-1", "attn"]

LEGEND = (
    "bits: bits per element of the cache, measured from its storage.  {metric}: {name}.  +-: standard error of the "
    "change, in percent.  KL: divergence from the unquantized model in nats: mean, median and 99.9th percentile.  "
    "top-1: positions with the same most likely token, in percent.  attn: relative L2 error of the attention outputs, "
    "mean over the layers, in percent."
)

CONTEXTS = (8192, 32768)
"""The contexts for which the bits with exact tokens are printed."""

EXACT_LEGEND = (
    "exact: tokens that a cache keeps in full precision, on average over keys and values.  share: their share of a "
    "window.  packed: bits per element without them.  8k, 32k: bits per element with them, of a bfloat16 cache of this "
    "length.  KL: divergence of the predictions of the prefill, which reads its own tokens packed unless it is exact, "
    "and of the later steps.  +-: standard error of KL later, from the means of the windows; blank for one window."
)

RECALL_LEGEND = (
    "Planted numbers that the model retrieves, in percent, by the distance in tokens between a number and its answer; "
    "below them, the divergence from the unquantized model at the digits, in nats."
)

SHORT = {"bits per byte": "bpb", "perplexity": "ppl"}


def summary(evaluation: Evaluation) -> str:
    """The table of all policies."""
    header = [title.format(metric=SHORT[evaluation.metric]) for title in HEADER]
    reference = [f"none: {evaluation.dtype}", f"{evaluation.reference_bits:.2f}", f"{evaluation.reference:.4f}"]
    labels = _labels(evaluation)
    rows = [_row(labels[result.policy], result) for result in evaluation.results]
    return table(header, [reference + [""] * (len(header) - len(reference)), *rows])


def legend(evaluation: Evaluation) -> str:
    """The meaning of the columns."""
    return LEGEND.format(metric=SHORT[evaluation.metric], name=evaluation.metric)


def exact_tokens(evaluation: Evaluation) -> str:
    """The table of tokens in full precision: their share of the context, and bits at longer contexts."""
    labels = _labels(evaluation)
    contexts = [f"{tokens // 1024}k" for tokens in CONTEXTS]
    header = ["policy", "exact", "share", "packed", *contexts, "KL prefill", "KL later", "+-"]
    rows = [
        [
            labels[result.policy],
            f"{result.exact_tokens:g}",
            f"{100 * result.exact_share:.1f}%",
            f"{result.packed_bits:.2f}",
            *(f"{result.packed_bits + 16 * result.exact_tokens / tokens:.2f}" for tokens in CONTEXTS),
            short(result.prefill_divergence),
            short(result.decode_divergence),
            "" if math.isnan(result.decode_divergence_error) else short(result.decode_divergence_error),
        ]
        for result in evaluation.results
    ]
    return table(header, rows)


def recall(evaluation: Evaluation) -> str:
    """The table of planted numbers that were retrieved, by distance."""
    labels = _labels(evaluation)
    distances = evaluation.results[0].recalled
    header = ["retrieved", *(f"to {one.distance}" for one in distances)]
    questions = ["questions", *(str(one.questions) for one in distances)]
    reference = [f"none: {evaluation.dtype}", *(f"{100 * one.reference:.1f}" for one in distances)]
    rows = [
        [labels[result.policy], *(f"{100 * one.recalled:.1f}" for one in result.recalled)]
        for result in evaluation.results
    ]
    divergences = [
        [f"KL {labels[result.policy]}", *(short(one.divergence) for one in result.recalled)]
        for result in evaluation.results
    ]
    return table(header, [questions, reference, *rows, *divergences])


def _labels(evaluation: Evaluation) -> dict[str, str]:
    """The label of each policy in tables: files without their folders, unless two files have the same name."""
    names = {result.policy: Path(result.policy).name for result in evaluation.results}
    count = Counter(names.values())
    return {policy: name if count[name] == 1 else policy for policy, name in names.items()}


def _row(label: str, result: PolicyResult) -> list[str]:
    divergences = (result.mean_divergence, result.median_divergence, result.p999_divergence)
    return [
        label,
        f"{result.effective_bits:.2f}",
        f"{result.quality:.4f}",
        f"{round(100 * result.change, 2) + 0.0:+.2f}%",  # never -0.00
        f"{100 * result.change_error:.2f}",
        *map(short, divergences),
        f"{100 * result.same_top1:.1f}",
        f"{100 * result.mean_attention_error:.1f}",
    ]


def short(divergence: float) -> str:
    """A divergence in short form, such as ``4.2e-3``."""
    return f"{divergence:.1e}".replace("e-0", "e-")


def layers(evaluation: Evaluation) -> str:
    """The error of the attention outputs of every layer, in percent."""
    modules = dict.fromkeys(name for result in evaluation.results for name in result.attention_errors)
    header = ["module", *_labels(evaluation).values()]
    rows = [
        [module, *(_percent(result.attention_errors.get(module)) for result in evaluation.results)]
        for module in modules
    ]
    return table(header, rows)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:.2f} %"


def circumstances(evaluation: Evaluation) -> str:
    """The model, the text, the schedule and the versions, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    windows = plural(evaluation.num_windows, "window")
    prefill = "exact prefill" if evaluation.exact_prompt else "prefill"
    return (
        f"{evaluation.model} on {evaluation.data}: {windows}, {prefill} of {evaluation.prefill}, "
        f"then {evaluation.decode} tokens in steps of {evaluation.chunk}; {evaluation.dtype}, {evaluation.device}; "
        f"{versions}"
    )
