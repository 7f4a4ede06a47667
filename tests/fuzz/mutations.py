"""Plant each fault, and run the programs of the fixed seeds until one of them shows it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from fuzz.fault import Event, noting_calls
from fuzz.faults import FAULTS
from fuzz.fixed_seeds import GROUPS, SEED, corner_programs
from fuzz.oracle import Outcome
from fuzz.probe import Probe
from fuzz.probes import PROBES
from fuzz.program import Program
from fuzz.search import run, search

SURVIVORS: dict[str, str] = {
    "a shift of tokens is read as new tokens": "the copied tokens are another use of the cache, so the site is refused",
    "a window may drop more tokens than it appends": "the copy back has the size of the window, so it drops as many "
    "tokens as it appends; other orders of both are rewritten rightly, too",
    "the parts of a stack are counted from the last": "no part is both written and read then, so the sites are refused",
}
"""The faults that no program shows, by title, with the reason: another check finds them, or the dropped check is too
strict."""


@dataclass(frozen=True)
class Case:
    """A program of the fixed seeds, or a probe.

    Attributes:
        number: its place among them, from 1 on; it tells cases apart.
        program: the program.
        calls: its calls of functions that have faults.
    """

    number: int
    program: Program | Probe
    calls: frozenset[Event]

    def run(self) -> Outcome:
        return _run(self.program)


@dataclass(frozen=True)
class Catch:
    """The search for a fault.

    Attributes:
        title: the title of the fault.
        reaching: the number of programs that call its function.
        tries: how many of them ran, or ``probe`` if a probe shows the fault.
        verdict: the difference that it makes: ``wrong`` or ``crash``; empty if no program shows it.
    """

    title: str
    reaching: int
    tries: int | str
    verdict: str = ""


def mutation_table(pool: Any, most_tries: int, with_seeds: bool) -> int:
    """Print a table of all faults; returns 1 if one without an explanation is not caught.

    Args:
        pool: runs programs in processes.
        most_tries: how many programs run for one fault at most.
        with_seeds: whether the programs of the fixed seeds follow the corner programs.
    """
    cases = fixed_cases(pool, with_seeds)
    print(f"{len(cases)} programs, {len(FAULTS)} faults\n")
    print("| fault | function | programs that call it | tries | shown as |")
    print("|---|---|---|---|---|", flush=True)
    missed = 0
    tasks = [(fault.title, in_order(fault.title, cases), most_tries) for fault in FAULTS]
    for fault, catch in zip(FAULTS, pool.imap(_first_catch, tasks), strict=True):
        shown = f"{catch.tries} | {catch.verdict}" if catch.verdict else f"- | {_unseen(catch.title)}"
        print(f"| {fault.title} | `{fault.place}` | {catch.reaching} | {shown} |", flush=True)
        missed += not catch.verdict and catch.title not in SURVIVORS
    for title, why in SURVIVORS.items():
        print(f"\n{title}: {why}")
    return int(missed > 0)


def _unseen(title: str) -> str:
    return "explained" if title in SURVIVORS else "not detected"


def fixed_cases(pool: Any, with_seeds: bool) -> list[Case]:
    """The corner programs that run without a fault, the probes, and the programs of the fixed seeds, groups in turn.

    Programs with lossy formats are left out: they are compared in fewer cases.
    """
    corners = [case for case in pool.map(_case_of, [*corner_programs(), *PROBES], 4) if case is not None]
    lossless = [number for number, group in enumerate(GROUPS) if group.name != "lossy"] if with_seeds else []
    groups = pool.map(_cases_of, lossless, 1)
    longest = max(map(len, groups), default=0)
    mixed = [group[place] for place in range(longest) for group in groups if place < len(group)]
    return [Case(number, *case) for number, case in enumerate([*corners, *mixed], start=1)]


def _run(program: Program | Probe) -> Outcome:
    return program.run() if isinstance(program, Probe) else run(program)


def _case_of(program: Program | Probe) -> tuple[Program | Probe, frozenset[Event]] | None:
    with noting_calls(FAULTS) as called:
        result = _run(program)
    return (program, frozenset(called)) if result.verdict in ("equal", "loud") else None


def _cases_of(number: int) -> list[tuple[Program, frozenset[Event]]]:
    cases: list[tuple[Program, frozenset[Event]]] = []
    with noting_calls(FAULTS) as called:

        def note(program: Program, result: Any) -> None:
            if result.verdict in ("equal", "loud"):
                cases.append((program, frozenset(called)))
            called.clear()

        search(GROUPS[number].strategy, SEED, GROUPS[number].count, shrinks=False, stops=False, on_result=note)
    return cases


def in_order(title: str, cases: list[Case]) -> list[Case]:
    """The programs that call the function of a fault: its probe, then programs with rare outcomes of these calls.

    A check that is dropped matters only where the check raises, which it does in few programs.
    """
    outcomes = {case.number: [call for call in case.calls if call[0] == title] for case in cases}
    counts = Counter(call for calls in outcomes.values() for call in calls)
    reaching = [case for case in cases if outcomes[case.number]]
    probes = [case for case in reaching if isinstance(case.program, Probe) and case.program.fault == title]
    others = [case for case in reaching if case not in probes]
    return [*probes, *sorted(others, key=lambda case: min(counts[call] for call in outcomes[case.number]))]


def _first_catch(task: tuple[str, list[Case], int]) -> Catch:
    title, cases, most_tries = task
    fault = next(fault for fault in FAULTS if fault.title == title)
    programs = sum(isinstance(case.program, Program) for case in cases)
    for tries, case in enumerate(cases[:most_tries], start=1):
        with fault.planted():
            result = case.run()
        if result.failed:
            return Catch(title, programs, tries if isinstance(case.program, Program) else "probe", result.verdict)
    torch._dynamo.reset()
    return Catch(title, programs, most_tries)
