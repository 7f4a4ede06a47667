"""``kvcompile eval``: the quality of policies, measured on the compiled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli.output import (
    INTERRUPTED,
    JsonOption,
    examples,
    items,
    print_interrupted,
    print_json,
    print_wrapped,
)
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

if TYPE_CHECKING:
    from kvcompile.evaluation.results import Evaluation

EXAMPLES = examples(
    "eval --model . --policies int8_per_token_head,turboquant_4bit_nc",
    "eval --model . --policies policy.yaml --data text.txt --windows 1 --chunk 8",
    "eval --model . --policies fp8_e4m3 --output quality.json --plot quality.png",
)

Policies = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Presets, formats, policy files.  [default: all presets without calibration]"),
]
Layers = Annotated[bool, typer.Option("--layers", help="Also print the error of every layer's attention.")]
Promote = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.yaml",
        help="Give layers with outlier keys a format that stores them well, and write the policy; takes one policy.",
    ),
]
Recall = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Plant N numbers in the prefill of each window, and ask for them in the later steps."
    ),
]
ExactPrompt = Annotated[
    bool,
    typer.Option(
        "--exact-prompt",
        help="Let the prefill attend to its own tokens in full precision, as a compiled model does. Without it, every "
        "step reads packed tokens, as in a sequence that is decoded from its start.",
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
    recall: Recall = None,
    exact_prompt: ExactPrompt = False,
    promote: Promote = None,
    output: Output = None,
    plot: Plot = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the loss of quality under policies: the compiled model against the unquantized model."""
    from kvcompile.evaluation import measure
    from kvcompile.evaluation.calibrate import Calibration
    from kvcompile.evaluation.errors import EvaluationError
    from kvcompile.evaluation.plot import check_plot, draw
    from kvcompile.evaluation.recall import plant_numbers
    from kvcompile.evaluation.schedule import Schedule
    from kvcompile.evaluation.text import encoder
    from kvcompile.policy.policy import Policy
    from kvcompile.policy.presets import preset_names

    schedule = Schedule(prefill, decode, chunk)
    names = preset_names() if policies is None else items(policies, "--policies", "presets or policy files")
    parsed = [Policy.load(name) for name in names]
    if promote is not None and len(parsed) != 1:
        raise EvaluationError(f"--promote changes one policy, and --policies names {len(parsed)}; name one")
    if plot is not None:
        check_plot(plot)
    check_writable(output, plot, promote)
    subject, read = load(model, data, schedule, windows, device, dtype)
    if recall is not None:
        read = plant_numbers(read, recall, encoder(subject, model))
    if promote is not None:
        policy = parsed[0].model_copy(update={"key_outliers": "promote"})
        promote.write_text(Calibration(subject, read.windows[0], [policy]).promoted(policy).to_yaml(), "utf-8")
        names = [str(promote)]
    evaluation: Evaluation | None = None

    def keep(measured: Evaluation) -> None:
        nonlocal evaluation
        evaluation = measured
        _write(evaluation, output)

    interrupted = False
    try:
        with progress_bar() as on_progress:
            evaluation = measure.evaluate(
                subject,
                read,
                names,
                model_name=name_of(model),
                exact_prompt=exact_prompt,
                on_progress=on_progress,
                on_result=keep,
            )
    except KeyboardInterrupt:
        interrupted = True
    if evaluation is not None:
        if plot is not None:
            draw(evaluation, plot)
        if as_json:
            print_json(evaluation.to_dict())
        else:
            _print(evaluation, layers)
    if interrupted:
        measured = len(evaluation.results) if evaluation is not None else 0
        print_interrupted(f"{measured} of {len(names)} policies were measured")
        raise typer.Exit(INTERRUPTED)


def _write(evaluation: Evaluation, output: Path | None) -> None:
    if output is not None:
        text = json.dumps(evaluation.to_dict(), indent=2, allow_nan=False)
        output.write_text(text + "\n", encoding="utf-8")


def _print(evaluation: Evaluation, with_layers: bool) -> None:
    from kvcompile.evaluation.results_text import (
        EXACT_LEGEND,
        RECALL_LEGEND,
        circumstances,
        exact_tokens,
        layers,
        legend,
        recall,
        summary,
    )

    print_wrapped(circumstances(evaluation), indent=2)
    print(f"\n{summary(evaluation)}\n")
    if with_layers:
        print(f"{layers(evaluation)}\n")
    print_wrapped(legend(evaluation), indent=2)
    if any(result.exact_tokens for result in evaluation.results):
        print(f"\n{exact_tokens(evaluation)}\n")
        print_wrapped(EXACT_LEGEND, indent=2)
    if any(result.recalled for result in evaluation.results):
        print(f"\n{recall(evaluation)}\n")
        print_wrapped(RECALL_LEGEND, indent=2)
    for result in evaluation.results:
        for note in result.notes:
            print_wrapped(f"note: {result.policy}: {note}", indent=6)
