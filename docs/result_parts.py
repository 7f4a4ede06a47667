"""The tables of the README that come from recorded results of benchmarks.

Every public function returns Markdown for one part; :mod:`make_pages` puts the parts into the pages. Every speedup
names its baseline in the same cell, and how much of it is due to the fused path and how much to fewer bits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from reference_parts import table

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DECODE_STEP = "llama_step-nvidia-h200.json"
REQUESTS = "generate-nvidia-h200.json"
THROUGHPUT = "throughput-*.json"
GRAPHS = "reduce-overhead"

Row = dict[str, Any]


def what_users_feel() -> str:
    """All tables that have results."""
    return "\n\n".join(filter(None, (decode_step(), requests(), throughput())))


def decode_step() -> str:
    """Time and memory of a decode step with CUDA graphs, for every shape of the results."""
    results = read(RESULTS / DECODE_STEP)
    rows = [row for row in results["rows"] if row["mode"] == GRAPHS]
    by_shape: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_shape.setdefault(row["shape"], {})[row["format"]] = row
    header = ["", *(f"{_in_words(shape)}: {what}" for shape in by_shape for what in ("ms a token", "peak memory"))]
    lines = []
    for name in dict.fromkeys(row["format"] for row in rows):
        cells = ["plain `torch.compile`, bfloat16 cache" if name == "plain" else _kvquant(name)]
        for by_format in by_shape.values():
            times = {other: row["microseconds"] / 1e3 for other, row in by_format.items()}
            cells += [_time(times, name), _memory(by_format, name)]
        lines.append(cells)
    layers = max(row["packed_layers"] for row in rows)
    title = f"A decode step of {layers} layers as wide as Llama 3 8B, with CUDA graphs ({_source(results)}):\n\n"
    return title + table(header, lines)


def requests() -> str:
    """What a call of ``generate()`` takes: first token, further tokens, memory."""
    results = read(RESULTS / REQUESTS)
    rows = results["rows"]
    plain = rows[0]
    layers = re.search(r"--layers (\d+)", results["command"])
    lines = []
    times = {row["format"]: row["token_milliseconds"] for row in rows}
    for row in rows:
        name = f"Transformers, {row['case']} cache" if row["case"] != "kvquant" else _kvquant(row["format"])
        first = f"{row['first_token_milliseconds'] / 1e3:.2f} s"
        if row is not plain:
            first += f": {plain['first_token_milliseconds'] / row['first_token_milliseconds']:.2f}x static"
        lines.append([name, first, _time(times, row["format"], "static"), f"{row['peak_megabytes'] / 1e3:.1f} GB"])
    described = f"{layers[1]} such layers" if layers else "such layers"
    title = f"`generate()` with {described} and {_in_words(plain['shape'])} ({_source(results)}):\n\n"
    return title + table(["", "first token", "ms a token", "peak memory"], lines)


def throughput() -> str:
    """Tokens a second of all users that fit into a memory; empty until the benchmark has been recorded."""
    files = sorted(RESULTS.glob(THROUGHPUT))
    if not files:
        return ""
    results = read(files[0])
    rows = [row for row in results["rows"] if "tokens_per_second" in row]
    lines = []
    for row in rows:
        name = "Transformers, static cache" if row["case"] == "plain" else _kvquant(row["format"])
        speeds = {
            other["format"]: 1 / other["tokens_per_second"] for other in rows if other["context"] == row["context"]
        }
        gained = _gain(speeds, row["format"], rows[0]["format"], "static")
        shown = f"{row['tokens_per_second']:,.0f}" + (f": {gained}" if gained else "")
        lines.append([name, f"{row['context']:,}", str(row["users"]), shown, f"{row['peak_megabytes'] / 1e3:.1f} GB"])
    title = f"As many users as fit into the memory of the run ({_source(results)}):\n\n"
    return title + table(["", "tokens of a user", "users", "tokens/s of all", "peak memory"], lines)


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def _source(results: dict[str, Any]) -> str:
    """The device, the versions and the command behind a table."""
    release = str(results["versions"]["torch"]).partition("+")[0]
    return f"{results['device']['name']}, PyTorch {release}, `benchmarks/{results['benchmark']}.py`"


def _in_words(shape: str) -> str:
    """The sequences and tokens of a shape such as ``(8, 32/8, 128, 32768)``."""
    batch, context = re.match(r"\((\d+), .* (\d+)\)", shape).groups()  # type: ignore[union-attr]
    return f"{batch} x {int(context):,} tokens"


def _kvquant(name: str) -> str:
    return "the fused path alone, bfloat16 cache" if name == "bfloat16" else f"`{name}`"


def _time(times: dict[str, float], name: str, baseline: str = "plain") -> str:
    """A time in milliseconds, and what was gained on the baseline."""
    if name not in times:
        return ""
    gained = _gain(times, name, "plain", baseline)
    return f"{times[name]:#.3g}" + (f": {gained}" if gained else "")


def _gain(times: dict[str, float], name: str, plain: str, baseline: str) -> str:
    """The speedup over the baseline, split into the fused path and the bits if the fused path alone was measured."""
    if name == plain:
        return ""
    total = f"{times[plain] / times[name]:.1f}x {baseline}"
    if name == "bfloat16":
        return f"{total}, all by the fused path"
    if "bfloat16" not in times:
        return f"{total}, by the fused path and the bits together"
    fused, bits = times[plain] / times["bfloat16"], times["bfloat16"] / times[name]
    return f"{total} = {fused:.1f} (fused path) x {bits:.2f} (bits)"


def _memory(by_format: dict[str, Row], name: str) -> str:
    """Peak memory in GB with its share of the plain one, and the part of it that is the cache."""
    if name not in by_format:
        return ""
    row = by_format[name]
    share = row["peak_megabytes"] / by_format["plain"]["peak_megabytes"]
    compared = "" if name == "plain" else f", {100 * share:.0f} % of plain"
    return f"{row['peak_megabytes'] / 1e3:.1f} GB{compared} (cache {row['cache_megabytes'] / 1e3:.2f})"
