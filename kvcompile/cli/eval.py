"""``kvcompile eval``: what policies cost in quality, measured on the compiled model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli.output import JsonOption, examples, print_json, print_wrapped

if TYPE_CHECKING:
    from kvcompile.evaluation.measure import OnProgress
    from kvcompile.evaluation.results import Evaluation

EXAMPLES = examples(
    "eval --model . --policies int8_per_token_head,turboquant_4bit_nc",
    "eval --model . --policies policy.yaml --data text.txt --windows 1 --chunk 8",
    "eval --model . --policies fp8_e4m3 --output quality.json --plot quality.png",
)

Model = Annotated[str, typer.Option(metavar="PATH", help="A Hugging Face model: a folder, or a name on the hub.")]
Policies = Annotated[
    str | None, typer.Option(metavar="LIST", help="Presets, formats, policy files.  [default: all presets]")
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Text to read.  [default: val.bin beside the model, if the model's tokens are bytes]"
    ),
]
Prefill = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of the first step.")]
Decode = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens that follow it, through the cache.")]
Chunk = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Tokens of one step of them.")]
Windows = Annotated[int, typer.Option(metavar="N", min=1, help="Windows of text, spread evenly over the file.")]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="[default: cuda if there is a GPU, else cpu]")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="float32, bfloat16 or float16.  [default: float32 on a CPU, else the checkpoint's]"
    ),
]
Layers = Annotated[bool, typer.Option("--layers", help="Print the error of every layer's attention too.")]
Promote = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml",
        help="Raise the formats of layers with outlier keys, and write the policy; takes one policy.",
    ),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the results there after every policy.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png|svg", help="Draw quality against effective bits.")]


def register(app: typer.Typer) -> None:
    app.command("eval", epilog=EXAMPLES)(evaluate)


def evaluate(
    model: Model,
    policies: Policies = None,
    data: Data = None,
    prefill: Prefill = 2048,
    decode: Decode = 256,
    chunk: Chunk = 1,
    windows: Windows = 4,
    device: Device = None,
    dtype: Dtype = None,
    layers: Layers = False,
    promote: Promote = None,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what policies cost in quality: the compiled model against the unquantized one."""
    from kvcompile.evaluation import measure, models, text
    from kvcompile.evaluation.calibrate import Calibration
    from kvcompile.evaluation.errors import EvaluationError
    from kvcompile.evaluation.plot import draw
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.policy import Policy
    from kvcompile.presets import preset_names

    schedule = Schedule(prefill, decode, chunk)
    names = [name.strip() for name in policies.split(",") if name.strip()] if policies else preset_names()
    parsed = [Policy.load(name) for name in names]
    if promote is not None and len(parsed) != 1:
        raise EvaluationError(f"--promote raises one policy, and --policies names {len(parsed)}")
    _check_files(output, plot, promote)
    models.silence_transformers()
    subject = models.load_model(model, device, dtype)
    read = text.read_text(subject, model, data, schedule, windows)
    if promote is not None:
        policy = parsed[0].model_copy(update={"key_outliers": "promote"})
        promote.write_text(Calibration(subject, read.windows[0], [policy]).promoted(policy).to_yaml(), "utf-8")
        names = [str(promote)]
    with _progress() as on_progress:
        evaluation = measure.evaluate(
            subject,
            read,
            names,
            model_name=Path(model).resolve().name if Path(model).exists() else model,
            on_progress=on_progress,
            on_result=lambda evaluation: _write(evaluation, output),
        )
    if plot is not None:
        draw(evaluation, plot)
    if as_json:
        print_json(evaluation.to_dict())
    else:
        _print(evaluation, layers)


def _check_files(output: Path | None, plot: Path | None, promote: Path | None) -> None:
    """An evaluation takes minutes: an error now if a file cannot be written then."""
    from kvcompile.evaluation.plot import check_plot

    if plot is not None:
        check_plot(plot)
    for path in filter(None, (output, plot, promote)):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not os.access(path.parent, os.W_OK):
            raise FileNotFoundError(errno.ENOENT, "its folder does not exist, or cannot be written", str(path))


@contextmanager
def _progress() -> Iterator[OnProgress]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def on_progress(doing: str, done: int, total: int) -> None:
            progress.update(task, description=doing, completed=done, total=total)

        yield on_progress


def _write(evaluation: Evaluation, output: Path | None) -> None:
    if output is not None:
        text = json.dumps(evaluation.to_dict(), indent=2, allow_nan=False)
        output.write_text(text + "\n", encoding="utf-8")


def _print(evaluation: Evaluation, with_layers: bool) -> None:
    from kvcompile.cli.eval_text import circumstances, layers, legend, summary

    print_wrapped(circumstances(evaluation), indent=2)
    print(f"\n{summary(evaluation)}\n")
    if with_layers:
        print(f"{layers(evaluation)}\n")
    print_wrapped(legend(evaluation), indent=2)
    for result in evaluation.results:
        for note in result.notes:
            print_wrapped(f"note: {result.policy}: {note}", indent=6)
