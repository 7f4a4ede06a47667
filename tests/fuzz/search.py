"""Look for programs whose packed and plain results differ, count what happened, and write a failure as a test."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from fuzz.drive_text import drive_text
from fuzz.oracle import How, Outcome, compare, drive_of, step_of
from fuzz.program import Program
from fuzz.step_text import step_text

_RESET_EVERY = 40
"""Compiled functions between two resets of Dynamo, which free its guards and code."""


@dataclass
class Statistics:
    """Counts of a search.

    Attributes:
        verdicts: programs by verdict.
        compiled: the number of compiled functions; several programs have the same one.
        safe: programs without a twist that the plain run accepts, and ``rewritten``: how many of them were packed.
        outcomes: sites by outcome.
        plain_calls: calls that ran as plain Inductor would, by reason.
        seconds: the time that programs ran.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    compiled: int = field(default=0, kw_only=True)
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
        self.compiled += other.compiled
        self.safe += other.safe
        self.rewritten += other.rewritten
        self.seconds += other.seconds


class Failure(AssertionError):
    """A program whose packed and plain results differ.

    Attributes:
        program: the program.
        result: the comparison.
        earlier: programs with the same compiled function that must run before.
    """

    def __init__(self, program: Program, result: Outcome, earlier: tuple[Program, ...] = ()) -> None:
        self.program, self.result, self.earlier = program, result, earlier
        super().__init__(f"{result.verdict}: {result.detail}\n\n{as_test(*earlier, program)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Failure, (self.program, self.result, self.earlier)  # so that a process can send it to another


def run(program: Program, step: dict[str, Any] | None = None, **how: Any) -> Outcome:
    """Compare the packed and the plain run of a program.

    Args:
        program: the program.
        step: its compiled function, as :func:`fuzz.oracle.step_of` returns it; by default a new one.
        how: as for :class:`fuzz.oracle.How`.
    """
    drive = drive_of(drive_text(program), step_of(step_text(program)) if step is None else step)
    return compare(drive, How(**{**own_settings(program), **how}))


def own_settings(program: Program) -> dict[str, Any]:
    names = ("policy", "dtype", "operators", "dynamic", "starts_packed", "exact_prompts", "seed")
    return {name: getattr(program, name) for name in names}


def search(
    programs: SearchStrategy[Program],
    number: int,
    count: int,
    shrinks: bool = True,
    stops: bool = True,
    on_result: Callable[[Program, Outcome], None] | None = None,
    found: Statistics | None = None,
    end: float = math.inf,
    **how: Any,
) -> Statistics:
    """Draw and run ``count`` programs; the same ``number`` draws the same programs.

    Args:
        programs: the strategy.
        number: the seed.
        count: the number of drawn programs, without the programs that they run ``again``.
        shrinks: whether a failing program is made smaller.
        stops: whether a failing program ends the search.
        on_result: called after each program.
        found: counts what happened, also if a program fails.
        end: no program begins after this time (``time.time()``). A failing program is not made smaller then.
        how: arguments of :func:`run`.

    Raises:
        Failure: of the smallest failing program.
    """
    found = found if found is not None else Statistics()
    failing: list[Failure] = []
    last: Program | None = None
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
    def check(program: Program) -> None:
        nonlocal last
        if time.time() >= end:
            if failing and program == last:
                raise failing[-1]
            return
        if program in seen and not failing:
            return
        seen.add(program)
        step, earlier = step_of(step_text(program)), list[Program]()
        outcomes: Counter[str] = Counter()
        for each in program.runs:
            if time.time() >= end:
                break
            begin = time.perf_counter()
            result = run(each, step, **how)
            result.earlier = outcomes.copy()
            outcomes.update(result.outcomes if each.is_safe else {})  # a safe run calls no graph of an unsafe one
            if refused := {"differs", "not_verified"} & result.outcomes.keys():
                result.verdict, result.detail = "wrong", f"verify refuses it: {', '.join(sorted(refused))}"
            if not failing:
                found.count(each, result, time.perf_counter() - begin)
            if on_result is not None and not failing:
                on_result(each, result)
            if result.failed and stops:
                torch._dynamo.reset()
                needs_earlier = bool(earlier) and not run(each, **how).failed
                failing.append(Failure(each, result, tuple(earlier) if needs_earlier else ()))
                last = program
                torch._dynamo.reset()
                raise failing[-1]
            earlier.append(each)
        found.compiled += not failing
        if found.compiled % _RESET_EVERY == 0 or failing:
            torch._dynamo.reset()

    try:
        check()
    except Failure:
        raise failing[-1] from None
    return found


def as_test(*programs: Program) -> str:
    """Programs with the same compiled function as a test for ``test_found.py``."""
    lines = step_text(programs[0]).splitlines()
    for number, program in enumerate(programs):
        name = f"drive_{number}" if number else "drive"
        settings = ", ".join(f"{name}={value!r}" for name, value in own_settings(program).items())
        lines += ["", *drive_text(program, name).splitlines(), "", f"check({name}, {settings})"]
    return "def test_a_program_that_differed() -> None:\n" + "\n".join(f"    {line}" if line else "" for line in lines)
