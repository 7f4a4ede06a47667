"""``kvcompile calibrate``: measures the numbers of a model that calibrated formats and static scales need."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcompile.cli.output import INTERRUPTED, JsonOption, examples, print_interrupted, print_json, print_wrapped
from kvcompile.cli.progress import progress_bar
from kvcompile.cli.subject import Data, Device, Dtype, Model, check_writable, name_of
from kvcompile.files.reading import read_file
from kvcompile.tables import table

if TYPE_CHECKING:
    from kvcompile.evaluation.text import Text
    from kvcompile.policy.static_scales import Numbers

TRANSFORMS, SCALES = ".safetensors", ".json"

EXAMPLES = (
    examples(
        "calibrate --model . --output transforms.safetensors",
        "calibrate --model . --data text.txt --positions 4096 --output t.safetensors",
        "calibrate --model . --output scales.json",
    )
    + "\n\n\b\nPolicies with these files:"
    + "\n  default: {dtype: transform_2.2bit, transforms: transforms.safetensors}"
    + "\n  default: {dtype: fp8_e4m3, granularity: per_tensor, scales: scales.json}"
)

Output = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="FILE.safetensors: transforms of calibrated formats.  FILE.json: static scales of fp8."
    ),
]
Prefill = Annotated[
    int | None, typer.Option(metavar="TOKENS", min=1, help="Tokens of a window.  [default: 2048; scales: 512]")
]
Windows = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Windows of text, spread evenly.  [default: 24; scales: 8]")
]
Positions = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=1,
        help="Windows of transforms begin at random positions, and end within this context.  [default: the model's]",
    ),
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(calibrate)


def calibrate(
    model: Model,
    output: Output,
    data: Data = None,
    prefill: Prefill = None,
    windows: Windows = None,
    positions: Positions = None,
    device: Device = None,
    dtype: Dtype = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the keys and values of every layer: transforms of calibrated formats, or static scales."""
    from kvcompile.evaluation import models, text
    from kvcompile.evaluation.errors import EvaluationError
    from kvcompile.evaluation.schedule import Schedule

    for_transforms = output.suffix == TRANSFORMS
    if positions is not None and not for_transforms:
        raise EvaluationError(f"--positions is for transforms; give --output FILE{TRANSFORMS}, or drop --positions")
    if output.suffix not in (TRANSFORMS, SCALES):
        raise EvaluationError(f"--output {output}: the name must end in {TRANSFORMS} (transforms) or {SCALES} (scales)")
    check_writable(output)
    prefill, windows = prefill or (2048 if for_transforms else 512), windows or (24 if for_transforms else 8)
    models.silence_transformers()
    subject = models.load_model(model, device, dtype)
    read = text.read_text(subject, model, data, Schedule(prefill, 1), windows)
    try:
        if for_transforms:
            path = text.text_path(subject, model, data)
            _write_transforms(subject, name_of(model), read, path, output, positions, as_json)
        else:
            _write_scales(subject, read, output, as_json)
    except KeyboardInterrupt:
        print_interrupted("nothing was written")
        raise typer.Exit(INTERRUPTED) from None


def _write_transforms(
    subject: Any, name: str, read: Text, path: Path, output: Path, positions: int | None, as_json: bool
) -> None:
    from kvcompile.evaluation.models import text_config
    from kvcompile.evaluation.text import MAX_TEXT
    from kvcompile.evaluation.transforms import calibrate_transforms
    from kvcompile.files import digests
    from kvcompile.policy.transforms import Origin, Transforms

    windows = read.windows[:, : read.schedule.prefill]
    context = positions or getattr(text_config(subject), "max_position_embeddings", None) or windows.shape[1]
    with progress_bar() as on_progress:
        tensors, least, largest = calibrate_transforms(subject, windows, context=context, on_progress=on_progress)
    origin = Origin(
        model=name,
        fingerprint=digests.of_model(subject),
        text=path.name,
        text_digest=hashlib.sha256(read_file(path, MAX_TEXT)).hexdigest(),
        windows=len(windows),
        tokens=windows.shape[1],
        positions=(least, largest),
    )
    Transforms(str(output), origin, tensors).save(output)
    if as_json:
        print_json(origin.model_dump(mode="json"))
        return
    print_wrapped(
        f"{output}: transforms of {len(tensors) // 6} layers, from {len(windows)} windows of {windows.shape[1]} tokens "
        f"of {path.name} at positions {least} to {largest}",
        indent=2,
    )


def _write_scales(subject: Any, read: Text, output: Path, as_json: bool) -> None:
    from kvcompile.evaluation.magnitudes import largest_magnitudes
    from kvcompile.policy.static_scales import CalibrationFile

    windows = read.windows[:, : read.schedule.prefill]
    measured: list[Numbers] = []
    with contextlib.suppress(KeyboardInterrupt), progress_bar() as on_progress:
        largest_magnitudes(subject, windows, on_progress, measured.append)
    if not measured:
        raise KeyboardInterrupt
    found = CalibrationFile(largest=measured[-1])
    output.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        rows = [[name, *(f"{sizes[role]:.4g}" for role in ("key", "value"))] for name, sizes in found.largest.items()]
        print(table(["module", "largest key", "largest value"], rows, text_columns=1))
    if len(measured) < len(windows):
        print_interrupted(f"{output} has the magnitudes of {len(measured)} of {len(windows)} windows")
        raise typer.Exit(INTERRUPTED)
