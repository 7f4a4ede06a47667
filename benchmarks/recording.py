"""Results of benchmarks: a JSON file for each benchmark and device, a table on the terminal, and a plot.

    python benchmarks/recording.py benchmarks/results/*.json    # tables and plots of saved results, again

A row of results is a dict with keys of COLUMNS. The file is written after every row, so that an interrupted benchmark
leaves its results. A row that fails is kept with its error, and the next row is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.benching.errors import BenchError, NoCudaError
from kvcompile.benching.machine import describe_device, versions
from kvcompile.benching.measuring import Timing, copy_ceiling, read_ceiling, require_cuda
from kvcompile.errors import KVCompileError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"

# Without a terminal Rich breaks lines after 80 columns.
CONSOLE = Console() if sys.stdout.isatty() else Console(width=300)

Row = dict[str, Any]

MAX_ERROR_LENGTH = 300


class Column(NamedTuple):
    """A key of rows: its title in tables, the format of its values, and its meaning."""

    title: str
    format: str
    meaning: str


COLUMNS = {
    "case": Column("case", "", "the operation or step that is timed"),
    "shape": Column("shape", "", "(batch, query heads/KV heads, head_dim, context in tokens)"),
    "context": Column("context", "d", "tokens of each sequence"),
    "users": Column("users", "d", "sequences that fit into the memory of the run, by the planner"),
    "format": Column("format", "", "preset or format of the cache; `plain`: an ordinary tensor"),
    "exact": Column("exact", "", "tokens of each head that are kept in full precision"),
    "part": Column("part", "", "`key` or `value`"),
    "dtype": Column("dtype", "", "dtype of the model"),
    "mode": Column("mode", "", "mode of `torch.compile`"),
    "threads": Column("threads", "d", "threads of PyTorch on a CPU"),
    "ranks": Column("ranks", "d", "processes that run the step together, each on its own GPU"),
    "q_len": Column("q_len", "d", "query positions"),
    "microseconds": Column("us", ".1f", "time of one call or step, the median"),
    "spread": Column("spread", ".1%", "distance between the quartiles over the median; smaller differences are noise"),
    "first_call_seconds": Column("first call s", ".1f", "time of the first request, with all compilation"),
    "first_token_milliseconds": Column("first token ms", ".1f", "time from a later request to its first token"),
    "token_milliseconds": Column("ms per token", ".2f", "time of each further token of all sequences, the median"),
    "tokens_per_second": Column("tokens/s", ",.0f", "tokens of all sequences in a second of decoding"),
    "megabytes": Column("MB", ",.1f", "bytes that must be read, or read and written, metadata included"),
    "terabytes_per_second": Column("TB/s", ".2f", "these bytes over the time"),
    "of_read_ceiling": Column("of ceiling", ".2f", "the same as a fraction of the read ceiling of this run"),
    "floor_microseconds": Column("floor us", ".1f", "these bytes at the read ceiling"),
    "speedup": Column("speedup", ".2f", "time of the baseline over the time"),
    "first_token_speedup": Column("first token speedup", ".2f", "the same for the time to the first token"),
    "throughput": Column("throughput", ".2f", "tokens/s over the tokens/s of the baseline"),
    "baseline": Column("baseline", "", "the measurement of the same run with which the speedup compares"),
    "baseline_microseconds": Column("baseline us", ".1f", "time of the baseline"),
    "packed_layers": Column("packed", "d", "layers whose cache is packed"),
    "cache_megabytes": Column("cache MB", ",.1f", "size of the storages of the cache"),
    "peak_megabytes": Column("peak MB", ",.1f", "most memory allocated during the timed steps, weights included"),
    "of_memory": Column("of memory", ".2f", "the same as a fraction of the memory of the run"),
    "temporary_megabytes": Column("temp MB", ",.1f", "memory that the operation takes besides operands and result"),
    "peak_saved": Column("saved", ".2f", "peak of the baseline minus this peak, as a fraction of the plain cache"),
    "relative_error": Column("error", ".1e", "norm of the difference to the reference over the norm of the reference"),
    "method": Column("timed by", "", "CUDA graph, CUDA events around launches, or wall clock"),
    "note": Column("note", "", "remarks"),
    "error": Column("failed", "", "the reason why there is no time"),
}
"""Keys of rows, in the order in which tables show them."""

AXIS_TITLES = {
    "of_read_ceiling": "bytes per second,\nas a fraction of the read ceiling",
    "speedup": "times as fast as the baseline:\n{baseline}",
    "first_token_speedup": "first token, times as fast as the baseline:\n{baseline}",
    "tokens_per_second": "tokens per second of all sequences",
    "throughput": "tokens per second, relative to the baseline:\n{baseline}",
}
"""Titles of the axes of plots, if they differ from the titles of columns."""

AMOUNTS = frozenset({"tokens_per_second"})
"""Keys of plots that are not ratios to a baseline or a ceiling, so plots draw no line at 1."""

UNITS = {
    "threads": ("{} thread", "{} threads"),
    "ranks": ("{} rank", "{} ranks"),
    "context": ("sequences of {} token", "sequences of {:,} tokens"),
}
"""Numbers with their units in plots, in the singular and the plural."""


@dataclasses.dataclass(frozen=True)
class Chart:
    """The layout of a plot: a panel for every value of ``group`` and each of ``values``, with a bar for every row.

    Attributes:
        group: key of rows whose values divide the rows into panels.
        labels: keys of rows whose values label a bar.
        values: keys of rows with the numbers to plot.
    """

    group: str
    labels: tuple[str, ...]
    values: tuple[str, ...]


@dataclasses.dataclass
class Results:
    """The results of one run of a benchmark.

    Attributes:
        benchmark: name of the script.
        command: the command line.
        device: name and other properties of the device.
        versions: versions of the software.
        ceilings: ``read`` and ``copy`` ceilings in bytes per second; empty if they were not measured.
        chart: the layout of the plot.
        rows: the measurements.
    """

    benchmark: str
    command: str
    device: dict[str, Any]
    versions: dict[str, str | None]
    chart: Chart
    ceilings: dict[str, float] = dataclasses.field(default_factory=dict)
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Results:
        fields = json.loads(path.read_text())
        chart = fields.pop("chart")
        return cls(chart=Chart(chart["group"], tuple(chart["labels"]), tuple(chart["values"])), **fields)

    def write(self, path: Path) -> None:
        """Replace the file atomically, so that readers never see an incomplete file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        partial.replace(path)

    def table(self) -> Table:
        """A table of the rows, with a column for every key in them."""
        ceilings = "".join(f", {name} {ceiling / 1e12:.2f} TB/s" for name, ceiling in self.ceilings.items())
        title = f"{self.benchmark}: {self.device['name']}{ceilings}"
        table = Table(title=title, title_justify="left", title_style="", box=box.MARKDOWN)
        keys = [key for key in COLUMNS if any(key in row for row in self.rows)]
        for key in keys:
            table.add_column(COLUMNS[key].title, justify="right" if COLUMNS[key].format else "left")
        for row in self.rows:
            table.add_row(*[shown(key, row) for key in keys])
        return table


def shown(key: str, row: Row) -> str:
    """The value of ``key`` as tables show it; empty if the row has no such key."""
    value = row.get(key)
    return "" if value is None else format(value, COLUMNS[key].format)


def command_line() -> str:
    """The command that started this process."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun sets it
    return shlex.join([*(("python",) if ranks is None else ("torchrun", "--nproc-per-node", ranks)), *sys.argv])


class Recorder:
    """Collects the rows of one run of a benchmark, and keeps its file up to date.

    Attributes:
        results: the results so far.
        path: the JSON file. The plot is in the same folder.
    """

    def __init__(self, arguments: argparse.Namespace, chart: Chart, device_type: str = "cuda") -> None:
        self._begin = time.monotonic()
        benchmark = Path(sys.argv[0]).stem
        described = describe_device(torch.device(device_type))
        self.results = Results(benchmark, command_line(), described, versions(), chart)
        parts = [benchmark, *filter(None, [arguments.tag]), described["name"]]
        self.path = arguments.output / (re.sub(r"[^a-z0-9_]+", "-", " ".join(parts).lower()).strip("-") + ".json")
        if device_type == "cuda":
            self.results.ceilings = {"read": read_ceiling(), "copy": copy_ceiling()}
            CONSOLE.print(f"ceilings of {described['name']}, bytes a second: {self.results.ceilings}")

    def say(self, doing: str) -> None:
        """Print a line of progress, with the seconds since the beginning."""
        CONSOLE.print(f"{time.monotonic() - self._begin:5.0f} s: {doing}", markup=False)

    def check_time(self, seconds: float) -> None:
        """Raise BenchError if the run has already lasted ``seconds``."""
        if time.monotonic() - self._begin > seconds:
            raise BenchError(f"not measured: the run had already lasted {seconds:.0f} s; raise --seconds")

    @contextlib.contextmanager
    def row(self, **row: Any) -> Iterator[Row]:
        """One measurement. The ``with`` block fills in the row; an error in the block is recorded in the row."""
        try:
            yield row
        except Exception as error:
            traceback.print_exc()
            row["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:MAX_ERROR_LENGTH]
        self.results.rows.append(row)
        self.results.write(self.path)
        CONSOLE.print(
            "; ".join(f"{COLUMNS[key].title} {shown(key, row)}" for key in COLUMNS if key in row), markup=False
        )

    def timed(self, timing: Timing, nbytes: int | None = None, baseline: tuple[str, Timing] | None = None) -> Row:
        """The keys of a row that follow from a time, the bytes moved in this time, and the time of a baseline."""
        row: Row = {"microseconds": timing.microseconds, "spread": timing.spread, "method": timing.method}
        if timing.note:
            row["note"] = timing.note
        if nbytes is not None:
            per_second = nbytes / timing.seconds
            row |= {"megabytes": nbytes / 1e6, "terabytes_per_second": per_second / 1e12}
            row["of_read_ceiling"] = per_second / self.results.ceilings["read"]
        if baseline is not None:
            name, usual = baseline
            row |= {"baseline": name, "baseline_microseconds": usual.microseconds}
            row |= {"speedup": usual.seconds / timing.seconds}
        return row

    def finish(self) -> int:
        """Show the table and draw the plot. Returns the exit status: 1 if a row failed, otherwise 0."""
        CONSOLE.print(self.results.table())
        CONSOLE.print(f"written to {self.path}", markup=False)
        draw(self.results, self.path.with_suffix(".png"))
        return int(any("error" in row for row in self.results.rows))


def draw(results: Results, path: Path) -> None:
    """Plot the results. Prints a line instead if Matplotlib is missing or there is nothing to plot."""
    try:
        figure = plot(results)
    except ImportError:
        CONSOLE.print("no plot: Matplotlib is not installed (pip install matplotlib)")
        return
    if figure is None:
        CONSOLE.print("no plot: no row has a value to show")
        return
    figure.savefig(path, dpi=150)


def plot(results: Results) -> Figure | None:
    """The plot of the results, or None if no row has a value to show. Raises ImportError without Matplotlib."""
    from matplotlib.figure import Figure

    chart = results.chart
    rows = [row for row in results.rows if chart.group in row and any(is_visible(row.get(key)) for key in chart.values)]
    if not rows:
        return None
    groups = {group: [row for row in rows if row[chart.group] == group] for group in (row[chart.group] for row in rows)}
    figure = Figure(figsize=(7 * len(chart.values), 1 + 1.2 * len(groups) + 0.3 * len(rows)), layout="constrained")
    figure.suptitle(f"benchmarks/{results.benchmark}.py on {results.device['name']}, torch {results.versions['torch']}")
    heights = [2 + len(of_group) for of_group in groups.values()]
    panels = figure.subplots(len(groups), len(chart.values), squeeze=False, height_ratios=heights)
    for of_group, line in zip(groups.values(), panels, strict=True):
        for key, axes in zip(chart.values, line, strict=True):
            _draw_bars(axes, [row for row in of_group if key in row], chart.labels, key)
            # A title may be wider than its axes. To the left of them is the room of the names.
            title = _value_in_words(chart.group, of_group[0]).replace("; ", "\n")
            axes.set_title(title, fontsize="medium", x=1, horizontalalignment="right")
    return figure


def is_visible(value: float | None) -> bool:
    """Whether a bar of this length is more than a line. A store of one token reaches 0.002 of the read ceiling."""
    return value is not None and value >= 0.01


def _draw_bars(axes: Any, rows: Sequence[Row], labels: tuple[str, ...], key: str) -> None:
    """A bar for every row, with the quartiles of its time as an error bar, and its value to the right of both."""
    values = [row[key] for row in rows]
    errors = [row[key] * row.get("spread", 0.0) / 2 for row in rows]
    bars = axes.barh(range(len(rows)), values, xerr=errors, error_kw={"linewidth": 1, "ecolor": "#444444"})
    names = [", ".join(_value_in_words(label, row, short=True) for label in labels if label in row) for row in rows]
    axes.set_yticks(range(len(rows)), names)
    if key not in AMOUNTS:
        axes.axvline(1.0, color="black", linewidth=0.8)
    background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, [shown(key, row) for row in rows], padding=4, fontsize="small", bbox=background)
    farthest = max((value + error for value, error in zip(values, errors, strict=True)), default=1.0)
    axes.set_xlim(0, 1.2 * max(farthest, 1.0))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(_axis_title(key, rows))


def _axis_title(key: str, rows: Sequence[Row]) -> str:
    """The title of the axis of ``key``, with the baselines of all rows."""
    baselines = " or ".join(dict.fromkeys(in_words(row["baseline"]) for row in rows if "baseline" in row))
    return AXIS_TITLES.get(key, COLUMNS[key].title).format(baseline=baselines)


def _value_in_words(key: str, row: Row, short: bool = False) -> str:
    """The value of a key of ``row``, with its unit."""
    if key in UNITS:
        one, many = UNITS[key]
        return (one if row[key] == 1 else many).format(row[key])
    return in_words(row[key], short)


def in_words(text: str, short: bool = False) -> str:
    """A shape such as ``(8, 32/8, 128, 32768)`` in words, without heads if ``short``; other text with commas."""
    match = re.fullmatch(r"\((\d+), (?:(\d+)/)?(\d+), (\d+), (\d+)\)", str(text))
    if match is None:
        return re.sub(r"\b\d{4,}\b", lambda number: f"{int(number[0]):,}", str(text))
    batch, num_heads, num_kv_heads, head_dim, context = match.groups()
    if short:
        return f"{batch} x {int(context):,} tokens"
    sequences = "1 sequence" if batch == "1" else f"{batch} sequences"
    heads = "" if num_heads is None else f"{num_heads} query heads, "
    plural = "" if num_kv_heads == "1" else "s"
    return f"{sequences} of {int(context):,} tokens; {heads}{num_kv_heads} KV head{plural}, head_dim {head_dim}"


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse`` as the type of an argument. Messages of its errors become messages of the command line."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except KVCompileError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def parse_arguments(
    parser: argparse.ArgumentParser, *, needs_cuda: bool = True, needs_backend: bool = False
) -> argparse.Namespace:
    """Parse the command line, with the options that all benchmarks share.

    Exits with an error if a CUDA device or the backend is needed and missing.

    Args:
        parser: has the options of this benchmark.
        needs_cuda: whether the benchmark runs on a CUDA device.
        needs_backend: whether the benchmark calls ``torch.compile(backend="kvquant")``.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)")
    parser.add_argument("--tag", help="part of the file name, to keep results of a selection apart")
    arguments = parser.parse_args()
    try:
        if needs_cuda:
            require_cuda(parser.prog)
    except NoCudaError as error:
        parser.error(str(error))
    if needs_backend and "kvquant" not in torch._dynamo.list_backends(exclude_tags=()):
        parser.error('PyTorch does not know the backend "kvquant": install this package (pip install --no-deps -e .)')
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        results = Results.read(path)
        CONSOLE.print(results.table())
        draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
