"""``kvcompile verify``: whether the rewritten graphs of a model give the same results as its original graphs."""

from __future__ import annotations

import typer

from kvcompile.cli.output import NEGATIVE, examples
from kvcompile.cli.step import Step, with_step_options

EXAMPLES = examples(
    "verify --model . --policy policy.yaml",
    "verify --model config.json --layers 2 --policy int4",
    "verify --model config.json --layers 1 --cache growing --tokens 5 --json",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(verify)


@with_step_options
def verify(step: Step) -> None:
    """Compile a step of a model, and compare each rewritten graph with its original on random inputs.

    Exits with 1 if a rewritten graph differs or cannot be checked, or if no attention is rewritten.
    """
    if not step.print_report(verified=True).is_verified:
        raise typer.Exit(NEGATIVE)
