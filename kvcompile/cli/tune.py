"""``kvcompile tune``: the best formats for every layer's keys and values within a budget of bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcompile.cli.output import INTERRUPTED, JsonOption, examples, items, print_interrupted, print_json
from kvcompile.cli.progress import progress_bar
from kvcompile.cli.subject import (
    Chunk,
    Data,
    Decode,
    Device,
    Dtype,
    Model,
    Prefill,
    Windows,
    check_writable,
    load,
    name_of,
)

EXAMPLES = examples(
    "tune --model . --budget-bits 4.5 --output policy.yaml",
    "tune --model . --budget-bits 4.5 --data text.txt --windows 4 --json",
    "tune --model . --budget-bits 5 --formats fp8_e4m3,int4_per_token_head",
    "tune --model . --budget-bits 2.5 --transforms transforms.safetensors",
)

BudgetBits = Annotated[
    float,
    typer.Option(
        metavar="BITS",
        help="Bits per element of the cache on average, scales and padding included.",
    ),
]
Formats = Annotated[
    str | None, typer.Option(metavar="LIST", help="Formats to choose from.  [default: all up to 8 bits, and bfloat16]")
]
TransformsFile = Annotated[
    Path | None,
    typer.Option(
        "--transforms",
        metavar="FILE",
        help="Transforms of the model, from `calibrate`: the search also considers calibrated formats.",
    ),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE.yaml", help="Write the policy there.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(tune)


def tune(
    model: Model,
    budget_bits: BudgetBits,
    data: Data = None,
    formats: Formats = None,
    transforms: TransformsFile = None,
    prefill: Prefill = 960,
    decode: Decode = 64,
    chunk: Chunk = 1,
    windows: Windows = 2,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = None,
    as_json: JsonOption = False,
) -> None:
    """Find formats for every layer's keys and values: within a budget of bits, with the least change of predictions."""
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.evaluation.tune import InterruptedTuning, search_formats, tune_on

    schedule = Schedule(prefill, decode, chunk)
    given = None if formats is None else items(formats, "--formats", "formats")
    names = search_formats(given, budget_bits, has_transforms=transforms is not None)
    check_writable(output)
    subject, text = load(model, data, schedule, windows, device, dtype)
    name = name_of(model)
    interrupted = False
    try:
        with progress_bar() as on_progress:
            found = tune_on(
                subject, text, budget_bits, formats=names, transforms=transforms, model_name=name,
                on_progress=on_progress,
            )  # fmt: skip
    except InterruptedTuning as stop:
        found, interrupted = stop.tuning, True
    except KeyboardInterrupt:
        print_interrupted("nothing was written, because no window was estimated")
        raise typer.Exit(INTERRUPTED) from None
    if output is not None:
        found.save(output)
    if as_json:
        print_json(found.to_dict())
    else:
        print(found)
    if interrupted:
        print_interrupted(f"{found.progress}; the policy is the best choice from these estimates and measurements")
        raise typer.Exit(INTERRUPTED)
