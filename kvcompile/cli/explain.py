"""``kvcompile explain``: which attention of a model is packed, and why other attention is not."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcompile.cli.output import NEGATIVE, JsonOption, examples, print_json
from kvcompile.cli.subject import Device, Dtype, PolicyOption, check_writable

if TYPE_CHECKING:
    from kvcompile.report.report import Report

EXAMPLES = examples(
    "explain --model . --policy policy.yaml",
    "explain --model config.json --layers 2 --policy fp8_e4m3 --html report.html",
    "explain --model config.json --layers 1 --cache growing --json",
)


class CacheKind(enum.StrEnum):
    """Kinds of Hugging Face caches."""

    static = "static"
    growing = "growing"


Model = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="A Hugging Face model: a folder or a name on the hub; or a config.json, for a model with random weights.",
    ),
]
Layers = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Only the first layers, with random weights.  [default: all]")
]
Cache = Annotated[CacheKind, typer.Option(help="The kind of the cache.")]
Context = Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Capacity of a static cache.")]
Tokens = Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of the step: 1 for decode, more for prefill.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page that draws every site.")]


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(explain)


def explain(
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
    """Compile a step of a model and report every attention. Exits with 1 if an attention is refused or runs plain."""
    report = print_report(model, policy, layers, cache, context, tokens, device, dtype, html, as_json, verified=False)
    if report.totals.refused or report.totals.plain_calls:
        raise typer.Exit(NEGATIVE)


def print_report(
    model: str,
    policy: str | None,
    layers: int | None,
    cache: CacheKind,
    context: int,
    tokens: int,
    device: str | None,
    dtype: str | None,
    html: Path | None,
    as_json: bool,
    verified: bool,
) -> Report:
    """Compile a step of a model and print the report; ``verified`` runs rewritten graphs beside their originals."""
    from kvcompile.evaluation import models
    from kvcompile.evaluation.explained_step import explain_step
    from kvcompile.policy.policy import Policy

    loaded = Policy.load(policy)
    check_writable(html)
    models.silence_transformers()
    if layers is None and models.has_weights(model):
        subject = models.load_model(model, device, dtype)
    else:
        subject = models.random_model(model, layers, device, dtype)
    report = explain_step(subject, loaded, kind=cache.value, context=context, tokens=tokens, verified=verified)
    if html is not None:
        report.to_html(html)
    if as_json:
        print_json(report.to_dict())
    else:
        print(report)
    return report
