"""The assembly of the commands. A new command is a module with ``register(app)``, and its name in ``COMMANDS``."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvcompile.cli.output import NEGATIVE, USAGE_ERROR, print_error
from kvcompile.errors import MAX_MESSAGE, KVCompileError, cut

COMMANDS = ("plan", "policy", "eval", "compare", "tune", "calibrate", "explain", "verify", "bench", "doctor")
"""Modules of this package, in the order of the help."""


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""The class of all errors about arguments; the module that defines it depends on the release of typer."""


class ErrorReporter(TyperGroup):
    """A group of commands that reports the users' mistakes as plain lines on stderr, never as a traceback."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _short_usage_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _short_usage_errors():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader of a pipe has closed it; typer ends the program quietly
        except KVCompileError as error:
            print_error(str(error))
        except OSError as error:
            print_error(cut(f"{error.filename}: {error.strerror}" if error.filename else str(error), MAX_MESSAGE))
        raise typer.Exit(USAGE_ERROR)


@contextlib.contextmanager
def _short_usage_errors() -> Iterator[None]:
    """Cut the message of an unknown option or command, which repeats what the user wrote, whatever its length."""
    try:
        yield
    except _UsageError as error:
        error.message = cut(error.message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    name="kvcompile",
    cls=ErrorReporter,
    help="Plan, check and inspect KV caches that torch.compile(model, backend='kvquant') keeps packed.",
    epilog="Exit codes: 0 success; 1 the answer is no, or a check failed; 2 a mistake in the arguments.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for name in COMMANDS:
    importlib.import_module(f"kvcompile.cli.{name}").register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"kvcompile {version('kvcompile')}")
        except PackageNotFoundError:
            print_error("kvcompile is not installed: pip install -e .")
            raise typer.Exit(NEGATIVE) from None
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command line itself."""


def main() -> None:
    """Run the command line and exit."""
    app()
