"""The picture of the README: time and memory of a decode step by context, from the results of ``llama_step.py``.

    python benchmarks/picture.py [RESULTS.json] [--output docs/speed_and_memory.svg]

The program measures nothing. Each group of bars is one batch and context of the file, and each bar is one format. Steps
run as CUDA graphs, the faster mode of every format.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recording import RESULTS, Results, Row, in_words

from kvcompile.benching.workloads import Shape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODE = "reduce-overhead"
SOURCE = RESULTS / "llama_step-nvidia-h100-80gb-hbm3.json"
PICTURE = RESULTS.parents[1] / "docs" / "speed_and_memory.svg"

SIZE = (8, 6.5)
"""Inches. Pages show the picture 800 pixels wide: a point of its text is then 1.4 pixels high."""

FORMATS = {
    "plain": ("plain torch.compile, bfloat16 cache", "#8c8c8c"),
    "bfloat16": ("kvquant, bfloat16 cache: the fused path alone", "#4c78a8"),
    "int8_per_token_head": ("kvquant, int8_per_token_head", "#54a24b"),
    "int4_per_token_head": ("kvquant, int4_per_token_head", "#f58518"),
    "turboquant_3bit_nc": ("kvquant, turboquant_3bit_nc", "#b279a2"),
}
"""The name and the colour of each format, in the order of the bars. A file may lack some formats."""


def by_shape(results: Results) -> dict[str, dict[str, Row]]:
    """Maps each shape, the shortest context first, to the rows that the picture shows, by format."""
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(results.rows, key=lambda row: Shape.parse(row["shape"]).context):
        if row.get("mode") == MODE and row["format"] in FORMATS and "error" not in row:
            found.setdefault(row["shape"], {})[row["format"]] = row
    return found


def milliseconds(row: Row) -> float:
    return row["microseconds"] / 1e3


def gigabytes(row: Row) -> float:
    return row["peak_megabytes"] / 1e3


def error_of_time(row: Row) -> float:
    """Half the distance between the quartiles, in milliseconds."""
    return milliseconds(row) * row["spread"] / 2


def draw(results: Results, path: Path) -> None:
    """Write the picture to ``path``. Equal results give an equal file."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "kvcompile"
    figure(results).savefig(path, metadata={"Date": None})


def figure(results: Results) -> Figure:
    """Two panels: milliseconds of a step with their quartiles, and the peak memory with the part of the cache."""
    from matplotlib.figure import Figure

    rows = by_shape(results)
    shown = Figure(figsize=SIZE, layout="constrained")
    layers = max(row["packed_layers"] for of_shape in rows.values() for row in of_shape.values())
    shown.suptitle(
        f"One decode step of {layers} layers as wide as Llama 3 8B, bfloat16 weights, CUDA graphs,\n"
        f"one {results.device['name']}, PyTorch {str(results.versions['torch']).partition('+')[0]}",
        fontsize="medium",
    )
    time, memory = shown.subplots(2, 1)
    _bars(time, rows, milliseconds, error_of_time)
    time.set_title("time of a step, ms", fontsize="medium")
    _bars(memory, rows, gigabytes)
    _bars(memory, rows, lambda row: (row["peak_megabytes"] - row["cache_megabytes"]) / 1e3, hatch="//")
    memory.set_title("peak memory, GB (hatched: all except the KV cache)", fontsize="medium")
    handles, labels = time.get_legend_handles_labels()
    shown.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return shown


def _bars(
    axes: Any,
    rows: dict[str, dict[str, Row]],
    value: Callable[[Row], float],
    error: Callable[[Row], float] | None = None,
    hatch: str | None = None,
) -> None:
    """A group of bars for every shape. Hatched bars lie on top of other bars, and have no labels."""
    formats = [name for name in FORMATS if any(name in of_shape for of_shape in rows.values())]
    width = 0.9 / len(formats)
    for place, name in enumerate(formats):
        shown = [(group, of_shape[name]) for group, of_shape in enumerate(rows.values()) if name in of_shape]
        positions = [group + (place - (len(formats) - 1) / 2) * width for group, _ in shown]
        heights = [value(row) for _, row in shown]
        title, colour = FORMATS[name]
        if hatch is not None:
            axes.bar(positions, heights, 0.9 * width, color="none", edgecolor="white", hatch=hatch, linewidth=0)
            continue
        errors = [error(row) for _, row in shown] if error is not None else None
        bars = axes.bar(positions, heights, 0.9 * width, label=title, color=colour, yerr=errors)
        axes.bar_label(bars, [f"{height:#.3g}" for height in heights], padding=3, fontsize="small")
    axes.set_xticks(range(len(rows)), [in_words(shape, short=True) for shape in rows])
    axes.margins(x=0.02, y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=SOURCE, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=PICTURE, help="default: %(default)s")
    arguments = parser.parse_args()
    draw(Results.read(arguments.results), arguments.output)
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
