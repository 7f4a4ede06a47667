"""``kvcompile compare``: the errors of one policy, layer by layer, and better formats for the worst layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli.output import INTERRUPTED, JsonOption, examples, print_interrupted, print_json
from kvcompile.cli.progress import progress_bar
from kvcompile.cli.subject import (
    Chunk,
    Data,
    Decode,
    Device,
    Dtype,
    Model,
    PolicyOption,
    Prefill,
    Windows,
    check_writable,
    load,
    name_of,
)

if TYPE_CHECKING:
    from kvcompile.evaluation.results import Evaluation

EXAMPLES = examples(
    "compare --model . --policy int4_per_token_head",
    "compare --model . --policy policy.yaml --data text.txt --windows 1 --json",
    "compare --model . --policy turboquant_3bit_nc --output better.yaml",
)

Output = Annotated[
    Path | None, typer.Option(metavar="FILE.yaml", help="Write the policy with the suggested rules there.")
]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(compare)


def compare(
    model: Model,
    policy: PolicyOption = None,
    data: Data = None,
    prefill: Prefill = 1024,
    decode: Decode = 128,
    chunk: Chunk = 1,
    windows: Windows = 2,
    device: Device = None,
    dtype: Dtype = None,
    output: Output = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a packed model with the unquantized one: predictions, errors of layers, rules for the worst layers."""
    from kvcompile.evaluation.compare import compare_on
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.policy.policy import Policy

    schedule = Schedule(prefill, decode, chunk)
    loaded = Policy.load(policy)
    check_writable(output)
    subject, text = load(model, data, schedule, windows, device, dtype)
    measured: list[Evaluation] = []
    try:
        with progress_bar() as on_progress:
            found = compare_on(
                subject,
                text,
                policy or loaded,
                model_name=name_of(model),
                on_progress=on_progress,
                on_result=measured.append,
            )
    except KeyboardInterrupt:
        _print_interrupted(measured, as_json)
        raise typer.Exit(INTERRUPTED) from None
    if output is not None:
        better = found.suggestion.policy if found.suggestion is not None else loaded
        output.write_text(better.to_yaml(), encoding="utf-8")
    if as_json:
        print_json(found.to_dict())
    else:
        print(found)


def _print_interrupted(measured: list[Evaluation], as_json: bool) -> None:
    """Print the predictions if they were measured before Ctrl-C. Layers are measured later and are missing."""
    from kvcompile.evaluation.results_text import summary

    if measured and as_json:
        print_json(measured[-1].to_dict())
    elif measured:
        print(summary(measured[-1]))
    print_interrupted("only the predictions were measured" if measured else "nothing was measured")
