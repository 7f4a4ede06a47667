"""Shared by all commands: exit codes, errors, JSON, options."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvcompile.errors import InputError
from kvcompile.tables import wrapped

OK = 0
NEGATIVE = 1
"""The answer is no, or a check failed."""
USAGE_ERROR = 2
"""The user's mistake."""
INTERRUPTED = 130
"""The user pressed Ctrl-C; what was measured before is printed."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def print_error(message: str) -> None:
    """Print an error on stderr."""
    print(f"kvcompile: error: {message}", file=sys.stderr, flush=True)


def print_interrupted(remains: str) -> None:
    """Say on stderr that the user interrupted the measurement, and which results remain."""
    print(f"kvcompile: interrupted: {remains}", file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """Print ``data`` as JSON."""
    print(json.dumps(data, indent=2, allow_nan=False))


def print_wrapped(text: str, indent: int) -> None:
    """Print a line of text, broken at the width of the terminal; all lines but the first are indented."""
    print(wrapped(text, indent))


def items(text: str, option: str, examples: str) -> list[str]:
    """The items of a comma-separated list, the value of ``option``; ``examples`` says what to name in an empty list."""
    found = [item.strip() for item in text.split(",") if item.strip()]
    if not found:
        raise InputError(f"{option}: the list is empty; name {examples}, or leave the option out for its default")
    return found


def examples(*commands: str) -> str:
    """The end of a command's help: example commands."""
    return "\n".join(["\b", "Examples:", *(f"  python -m kvcompile {command}" for command in commands)])
