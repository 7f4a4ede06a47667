"""``kvcompile calibrate``: measures the magnitudes from which static scales of 8-bit floats follow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcompile.cli.output import INTERRUPTED, JsonOption, examples, print_interrupted, print_json
from kvcompile.cli.progress import progress_bar
from kvcompile.cli.subject import Data, Device, Dtype, Model, Prefill, Windows, check_writable
from kvcompile.tables import table

EXAMPLES = (
    examples("calibrate --model . --output scales.json", "calibrate --model . --data text.txt --output scales.json")
    + "\n\n\b\nA policy with these scales:"
    + "\n  default: {dtype: fp8_e4m3, granularity: per_tensor, scales: scales.json}"
)

Output = Annotated[Path, typer.Option(metavar="FILE.json", help="Where the calibration is written.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(calibrate)


def calibrate(
    model: Model,
    output: Output,
    data: Data = None,
    prefill: Prefill = 512,
    windows: Windows = 8,
    device: Device = None,
    dtype: Dtype = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the largest keys and values of every layer, for policies with granularity: per_tensor."""
    from kvcompile.evaluation import models, text
    from kvcompile.evaluation.magnitudes import largest_magnitudes
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.policy.static_scales import CalibrationFile

    check_writable(output)
    models.silence_transformers()
    subject = models.load_model(model, device, dtype)
    read = text.read_text(subject, model, data, Schedule(prefill, 1), windows)
    try:
        with progress_bar() as on_progress:
            found = CalibrationFile(largest=largest_magnitudes(subject, read.windows[:, :prefill], on_progress))
    except KeyboardInterrupt:
        print_interrupted("nothing was written, because a calibration needs all windows")
        raise typer.Exit(INTERRUPTED) from None
    output.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    rows = [[module, *(f"{sizes[role]:.4g}" for role in ("key", "value"))] for module, sizes in found.largest.items()]
    print(table(["module", "largest key", "largest value"], rows, text_columns=1))
