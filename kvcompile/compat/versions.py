"""The releases of PyTorch that kvcompile was tested with, and a warning for newer releases."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass


class UntestedVersionWarning(UserWarning):
    """PyTorch is newer than every release that kvcompile was tested with. This is only a warning."""


@dataclass(frozen=True)
class Tested:
    """A test of kvcompile with a release of PyTorch.

    Attributes:
        torch: the release.
        triton: the release of Triton that it was tested with.
        python: the version of Python.
        device: where the tests ran.
        extent: which tests ran.
        date: the day, as YYYY-MM-DD.
    """

    torch: str
    triton: str
    python: str
    device: str
    extent: str
    date: str


TESTED = (
    Tested("2.11.0", "3.6.0", "3.12", "CPU, H100, H200", "whole suite, GPU tests", "2026-11-29"),
    Tested("2.13.0", "3.7.1", "3.11", "CPU", "whole suite", "2026-12-01"),
    Tested("2.14.1", "3.8.0", "3.11", "CPU", "whole suite", "2026-11-29"),
    Tested("2.14.1", "3.8.0", "3.13", "CPU", "sample", "2026-11-28"),
    Tested("2.15.0", "3.9.0", "3.11", "CPU", "whole suite", "2026-11-28"),
    Tested("2.15.0", "3.9.0", "3.13", "CPU", "whole suite", "2026-11-29"),
    Tested("2.15.0", "3.9.0", "3.14", "CPU", "sample", "2026-11-29"),
)
"""The latest test of every release and version of Python, oldest release first.

The documentation and ``doctor`` show this table."""

COLUMNS = ("PyTorch", "Triton", "Python", "device", "tests", "date")


def rows() -> list[tuple[str, ...]]:
    """The cells of :data:`TESTED`, in the order of :data:`COLUMNS`."""
    return [(one.torch, one.triton, one.python, one.device, one.extent, one.date) for one in TESTED]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version without trailing zeros: 2.13.0+cpu is (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    found = [int(number) for number in match[0].split(".")] if match is not None else []
    while found and found[-1] == 0:
        found.pop()
    return tuple(found)


def untested(version: str) -> str | None:
    """A warning if this release of PyTorch is newer than all tested releases, else None. Patch releases are ignored."""
    newest = max(numbers(one.torch)[:2] for one in TESTED)
    if numbers(version)[:2] <= newest:
        return None
    return (
        f"PyTorch {version} is newer than {'.'.join(map(str, newest))}, the newest release that this kvcompile was "
        "tested with; `python -m kvcompile doctor --try` checks this machine, and a newer kvcompile may support "
        "this PyTorch"
    )


@functools.cache
def warn_if_untested(version: str) -> None:
    """Warn, once in a process, if this release of PyTorch is newer than all tested releases."""
    message = untested(version)
    if message is not None:
        warnings.warn(message, UntestedVersionWarning, stacklevel=2)
