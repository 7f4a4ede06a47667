"""Shared by ``explain`` and ``verify``: the options that name a step of a model, and the report on this step."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from kvcompile.cli.output import JsonOption, print_json
from kvcompile.cli.subject import Device, Dtype, PolicyOption, check_writable

if TYPE_CHECKING:
    from kvcompile.report.report import Report


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


@dataclass(frozen=True)
class Step:
    """A step of a model, and where its report is written. Each field is an option of the command line."""

    model: Model
    policy: PolicyOption = None
    layers: Layers = None
    cache: Cache = CacheKind.static
    context: Context = 256
    tokens: Tokens = 1
    device: Device = None
    dtype: Dtype = None
    html: Html = None
    as_json: JsonOption = False

    def print_report(self, *, verified: bool = False) -> Report:
        """Compile the step and print its report; ``verified`` compares rewritten graphs with their originals."""
        from kvcompile.evaluation import models
        from kvcompile.evaluation.explained_step import explain_step
        from kvcompile.policy.policy import Policy

        policy = Policy.load(self.policy)
        check_writable(self.html)
        models.silence_transformers()
        if self.layers is None and models.has_weights(self.model):
            subject = models.load_model(self.model, self.device, self.dtype)
        else:
            subject = models.random_model(self.model, self.layers, self.device, self.dtype)
        report = explain_step(
            subject, policy, kind=self.cache.value, context=self.context, tokens=self.tokens, verified=verified
        )
        if self.html is not None:
            report.to_html(self.html)
        if self.as_json:
            print_json(report.to_dict())
        else:
            print(report)
        return report


def with_step_options(command: Callable[[Step], None]) -> Callable[..., None]:
    """A command that takes the options of :class:`Step`; Typer reads them from its signature."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(Step(**options))

    kinds = get_type_hints(Step, include_extras=True)
    parameters = [option.replace(annotation=kinds[name]) for name, option in inspect.signature(Step).parameters.items()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = kinds
    return run
