"""Look for programs whose packed and plain results differ, count what happened, and write a failure as a test."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from fuzz.drive_text import program_text
from fuzz.oracle import How, Outcome, compare, compiled_text
from fuzz.program import Program

_RESET_EVERY = 40
"""Programs between two resets of Dynamo, which free its guards and code."""


@dataclass
class Statistics:
    """Counts of a search.

    Attributes:
        verdicts: programs by verdict.
        safe: programs without a twist that the plain run accepts, and ``rewritten``: how many of them were packed.
        outcomes: sites by outcome.
        plain_calls: calls that ran as plain Inductor would, by reason.
        seconds: the time that programs ran.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    safe: int = 0
    rewritten: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    plain_calls: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def programs(self) -> int:
        return sum(self.verdicts.values())

    @property
    def share_rewritten(self) -> float:
        return self.rewritten / max(1, self.safe)

    def count(self, program: Program, result: Outcome, seconds: float) -> None:
        self.seconds += seconds
        self.verdicts[result.verdict] += 1
        self.outcomes.update(result.outcomes)
        self.plain_calls.update(result.plain_calls)
        if program.is_safe and result.verdict != "invalid":
            self.safe += 1
            self.rewritten += result.rewritten

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a file of counts."""
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        counts = {name: dict(value) if isinstance(value, Counter) else value for name, value in own.items()}
        return {**counts, "programs": self.programs}

    def add(self, other: Statistics) -> None:
        for name in ("verdicts", "outcomes", "plain_calls"):
            getattr(self, name).update(getattr(other, name))
        self.safe += other.safe
        self.rewritten += other.rewritten
        self.seconds += other.seconds


class Failure(AssertionError):
    """A program whose packed and plain results differ.

    Attributes:
        program: the program.
        result: the comparison.
    """

    def __init__(self, program: Program, result: Outcome) -> None:
        self.program, self.result = program, result
        super().__init__(f"{result.verdict}: {result.detail}\n\n{as_test(program)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.program, self.result)  # processes pass it on


def run(program: Program, **how: Any) -> Outcome:
    """Compare the packed and the plain run of a program; ``how`` as for :class:`fuzz.oracle.How`."""
    return compare(compiled_text(program_text(program)), How(**{**own_settings(program), **how}))


def own_settings(program: Program) -> dict[str, Any]:
    names = ("policy", "dtype", "operators", "dynamic")
    return {name: getattr(program, name) for name in names}


def search(
    programs: SearchStrategy[Program],
    number: int,
    count: int,
    shrinks: bool = True,
    stops: bool = True,
    on_result: Callable[[Program, Outcome], None] | None = None,
    found: Statistics | None = None,
    **how: Any,
) -> Statistics:
    """Draw and run ``count`` programs; the same ``number`` draws the same programs.

    Args:
        programs: the strategy.
        number: the seed.
        count: how many programs are drawn.
        shrinks: whether a failing program is made smaller.
        stops: whether a failing program ends the search.
        on_result: called after each program.
        found: counts what happened, also if a program fails.
        how: arguments of :func:`run`.

    Raises:
        Failure: of the smallest failing program.
    """
    found = found if found is not None else Statistics()
    failing: list[Failure] = []
    seen: set[Program] = set()
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]

    @settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @seed(number)
    @given(programs)
    def each(program: Program) -> None:
        if program in seen and not failing:
            return
        seen.add(program)
        begin = time.perf_counter()
        result = run(program, **how)
        if refused := {"differs", "not_verified"} & result.outcomes.keys():
            result.verdict, result.detail = "wrong", f"verify refuses it: {', '.join(sorted(refused))}"
        if not failing:
            found.count(program, result, time.perf_counter() - begin)
        if found.programs % _RESET_EVERY == 0 or failing:
            torch._dynamo.reset()
        if on_result is not None and not failing:
            on_result(program, result)
        if result.failed and stops:
            failure = Failure(program, result)
            failing.append(failure)
            raise failure

    try:
        each()
    except Failure:
        raise failing[-1] from None
    return found


def as_test(program: Program) -> str:
    """The program as a test for ``test_found.py``."""
    body = program_text(program).replace("\n\n\n", "\n\n").rstrip()
    settings = ", ".join(f"{name}={value!r}" for name, value in own_settings(program).items())
    lines = [*body.splitlines(), "", f"check(drive, {settings})"]
    return "def test_a_program_that_differed() -> None:\n" + "\n".join(f"    {line}" if line else "" for line in lines)
