"""``kvcompile verify``: whether the rewritten graphs of a model give what its original graphs give."""

from __future__ import annotations

import typer

from kvcompile.cli.explain import Cache, CacheKind, Context, Html, Layers, Model, Tokens, print_report
from kvcompile.cli.output import NEGATIVE, JsonOption, examples
from kvcompile.cli.subject import Device, Dtype, PolicyOption

EXAMPLES = examples(
    "verify --model . --policy policy.yaml",
    "verify --model config.json --layers 2 --policy int4",
    "verify --model config.json --layers 1 --cache growing --tokens 5 --json",
)


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(verify)


def verify(
    model: Model,
    policy: PolicyOption = None,
    layers: Layers = None,
    cache: Cache = CacheKind.static,
    context: Context = 256,
    tokens: Tokens = 1,
    device: Device = None,
    dtype: Dtype = None,
    html: Html = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a step of a model and run each rewritten graph beside its original, on random inputs.

    Exits with 1 if a rewritten graph differs or cannot be checked, or if no attention is rewritten.
    """
    report = print_report(model, policy, layers, cache, context, tokens, device, dtype, html, as_json, verified=True)
    if not report.is_verified:
        raise typer.Exit(NEGATIVE)
