"""The tables of the README that come from recorded results of benchmarks.

Every public function returns Markdown for one part; :mod:`make_pages` puts the parts into the pages. Every speedup
names its baseline in the same cell, and the shares of the fused path and of fewer bits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from reference_parts import table

from kvcompile.benching.workloads import Shape

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DECODE_STEP = "llama_step-nvidia-h100-80gb-hbm3.json"
REQUESTS = "generate-nvidia-h200.json"
THROUGHPUT = "throughput-nvidia-h200.json"
GRAPHS = "reduce-overhead"

PLAIN = "plain `torch.compile`, bfloat16 cache"
STATIC = "Transformers, static cache"
FUSED = "the fused path alone, bfloat16 cache"

Row = dict[str, Any]


def what_users_feel() -> str:
    """All tables of the README about speed."""
    return "\n\n".join((decode_step(), requests(), throughput()))


def decode_step() -> str:
    """Time of a decode step with CUDA graphs, for every shape of the results, the shortest context first."""
    results = read(RESULTS / DECODE_STEP)
    rows = [row for row in results["rows"] if row["mode"] == GRAPHS]
    by_shape: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: Shape.parse(row["shape"]).context):
        by_shape.setdefault(row["shape"], {})[row["format"]] = row
    header = ["ms per token", *map(_in_words, by_shape)]
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = [_step_label(name)]
        for by_format in by_shape.values():
            times = {_step_label(other): row["microseconds"] / 1e3 for other, row in by_format.items()}
            cells.append(_time(times, _step_label(name), PLAIN, "plain"))
        lines.append(cells)
    layers = max(row["packed_layers"] for row in rows)
    title = f"A decode step of {layers} layers as wide as Llama 3 8B, with CUDA graphs ({_source(results)}):\n\n"
    return title + table(header, lines)


def requests() -> str:
    """The cost of a call of ``generate()``: first token, further tokens, memory. The static cache is the baseline."""
    results = read(RESULTS / REQUESTS)
    rows = [row for row in results["rows"] if "token_milliseconds" in row]
    lines = []
    for row in rows:
        same = {_label(other): other for other in rows if other["shape"] == row["shape"]}
        times = {label: other["token_milliseconds"] for label, other in same.items()}
        first = f"{row['first_token_milliseconds'] / 1e3:.2f} s"
        if _label(row) != STATIC and STATIC in same:
            speed = same[STATIC]["first_token_milliseconds"] / row["first_token_milliseconds"]
            first += f": {speed:.2f}x static"
        cells = [_label(row), _in_words(row["shape"]), first, _time(times, _label(row), STATIC, "static")]
        lines.append([*cells, f"{row['peak_megabytes'] / 1e3:.1f} GB"])
    layers = re.search(r"--layers (\d+)", results["command"])
    title = f"`generate()` with {layers[1] if layers else 8} such layers ({_source(results)}):\n\n"
    return title + table(["", "prompts", "first token", "ms per token", "peak memory"], lines)


def throughput() -> str:
    """Tokens per second of all users that fit into a memory."""
    results = read(RESULTS / THROUGHPUT)
    rows = [row for row in results["rows"] if "tokens_per_second" in row]
    lines = []
    for row in rows:
        times = {_label(other): 1 / other["tokens_per_second"] for other in rows if other["context"] == row["context"]}
        gained = _gain(times, _label(row), STATIC, "static")
        shown = f"{row['tokens_per_second']:,.0f}" + (f": {gained}" if gained else "")
        cells = [_label(row), f"{row['context']:,}", str(row["users"]), shown]
        lines.append([*cells, f"{row['peak_megabytes'] / 1e3:.1f} GB" if "peak_megabytes" in row else ""])
    memory = re.search(r"--memory (\d+)", results["command"])
    merged = ", merged projections" if "--merge-projections" in results["command"] else ""
    title = f"As many users as fit into {memory[1] if memory else 75} GiB ({_source(results)}{merged}):\n\n"
    return title + table(["", "tokens per user", "users", "tokens/s in total", "peak memory"], lines)


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _source(results: dict[str, Any]) -> str:
    """The device, the versions and the command behind a table."""
    release = str(results["versions"]["torch"]).partition("+")[0]
    return f"{results['device']['name']}, PyTorch {release}, `benchmarks/{results['benchmark']}.py`"


def _in_words(shape: str) -> str:
    """The sequences and tokens of a shape such as ``(8, 32/8, 128, 32768)``."""
    parsed = Shape.parse(shape)
    return f"{parsed.batch} x {parsed.context:,} tokens"


def _step_label(name: str) -> str:
    return PLAIN if name == "plain" else _kvquant(name)


def _label(row: Row) -> str:
    """The way of running the model that a row measured."""
    if row["case"] == "kvquant":
        return _kvquant(row["format"])
    if row["case"] == "static":
        return STATIC
    return f"Transformers, {row['case']} cache" + ("" if row["format"] == "plain" else f", {row['format']}")


def _kvquant(name: str) -> str:
    return FUSED if name == "bfloat16" else f"`{name}`"


def _time(times: dict[str, float], label: str, plain: str, baseline: str) -> str:
    """A time in milliseconds, and its speedup over the baseline."""
    if label not in times:
        return ""
    gained = _gain(times, label, plain, baseline)
    return f"{times[label]:#.3g}" + (f": {gained}" if gained else "")


def _gain(times: dict[str, float], label: str, plain: str, baseline: str) -> str:
    """The speedup over the baseline, split into the fused path and the bits if the fused path alone was measured."""
    if label == plain or plain not in times:
        return ""
    total = f"{times[plain] / times[label]:.1f}x {baseline}"
    if label.startswith("Transformers"):
        return f"{total}, without the fused path"
    if label == FUSED:
        return f"{total}, all by the fused path"
    if FUSED not in times:
        return f"{total}, by the fused path and the bits together"
    fused, bits = times[plain] / times[FUSED], times[FUSED] / times[label]
    return f"{total} = {fused:.1f} (fused path) x {bits:.2f} (bits)"
