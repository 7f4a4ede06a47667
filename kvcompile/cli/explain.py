"""``kvcompile explain``: which attention of a model is packed, and why other attention is not."""

from __future__ import annotations

import typer

from kvcompile.cli.output import NEGATIVE, examples
from kvcompile.cli.step import Step, with_step_options

EXAMPLES = examples(
    "explain --model . --policy policy.yaml",
    "explain --model config.json --layers 2 --policy fp8_e4m3 --html report.html",
    "explain --model config.json --layers 1 --cache growing --json",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(explain)


@with_step_options
def explain(step: Step) -> None:
    """Compile a step of a model and report every attention. Exits with 1 if attention is refused or runs unpacked."""
    report = step.print_report()
    if report.totals.refused or report.totals.plain_calls:
        raise typer.Exit(NEGATIVE)
