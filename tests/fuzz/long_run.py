"""Search for hours: seed after seed, in processes that are replaced, with counts in a file."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import multiprocessing
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from fuzz.draw import programs
from fuzz.search import Failure, Statistics, search

Result = TypeVar("Result")

PROGRAMS_OF_A_SEED = 10

_SEEDS_OF_A_PROCESS = 30
"""After this number of seeds a new process takes over, so that memory stays flat."""

_MINUTE = 60.0


@dataclass
class LongRun:
    """The counts of a search, and its failures.

    Attributes:
        first: the first seed.
        how: arguments of :func:`fuzz.search.run`.
        file: where the counts are written as JSON, each minute and at the end; None for nowhere. Runs with other seeds
            can be added up: all counts are sums.
        total: the counts of all seeds.
        seeds: the number of seeds, from ``first`` on, that have run.
        failures: the number of seeds with a failing program.
        died: the seeds whose process ended; they count as failures.
    """

    first: int
    how: dict[str, Any]
    file: Path | None = None
    total: Statistics = field(default_factory=Statistics)
    seeds: int = 0
    failures: int = 0
    died: list[int] = field(default_factory=list)
    _begin: float = field(default_factory=time.time)
    _written: float = 0.0

    def until(self, end: float, processes: int, initializer: Callable[[], None]) -> None:
        """Run seeds until ``time.time()`` is ``end``. A program that has begun is finished."""
        task = functools.partial(_seed, how=self.how, end=end)
        for number, result in results_until(end, self.first, task, processes, initializer):
            if result is None:
                self.died.append(number)
                self.failures += 1
                self.seeds += 1
            else:
                self.add(number, *result)
            self._write()

    def add(self, number: int, found: Statistics, failure: str) -> None:
        """Count a seed; ``failure`` is the text of its failing program, or empty."""
        self.total.add(found)
        self.seeds += 1
        if failure:
            self.failures += 1
            print(f"seed {number}:\n{failure}\n", flush=True)

    def _write(self, at_once: bool = False) -> None:
        if self.file is None or (time.time() < self._written + _MINUTE and not at_once):
            return
        self._written = time.time()
        counts = {
            "first_seed": self.first,
            "seeds": self.seeds,
            "failures": self.failures,
            "died": self.died,
            "how": self.how,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "hours": (time.time() - self._begin) / 3600,
            **self.total.as_dict(),
        }
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
        part.replace(self.file)

    def print(self) -> None:
        """Write the file a last time, and print the counts."""
        self._write(at_once=True)
        total, seconds = self.total, time.time() - self._begin
        rate = total.programs / seconds
        last = self.first + max(self.seeds, 1) - 1
        print(f"{total.programs} programs of seeds {self.first} to {last} in {seconds:.0f} s: {rate:.2f} a second")
        print(f"{total.compiled} compiled functions, each in several programs with other code around it")
        print(f"{self.failures} failures; {_named(total.verdicts)}")
        print(f"{total.safe} programs without a twist, {100 * total.share_rewritten:.0f} % of them packed")
        print(f"sites: {_named(total.outcomes)}")
        print(f"calls that ran plain: {sum(total.plain_calls.values())}")


def results_until(
    end: float, first: int, task: Callable[[int], Result], processes: int, initializer: Callable[[], None]
) -> Iterator[tuple[int, Result | None]]:
    """Run ``task`` for one seed after another, from ``first`` on, in processes that are replaced.

    No task begins after ``time.time()`` is ``end``. Each process begins with ``initializer``.

    Yields:
        Each seed and its result, in the order in which tasks end; None for seeds whose process died.
    """
    numbers = itertools.count(first)
    while time.time() < end:
        running: dict[Future[Result], int] = {}
        try:
            yield from _results_of_processes(end, numbers, task, processes, initializer, running)
        except BrokenProcessPool:
            print(f"a process died at one of the seeds {sorted(running.values())}", flush=True)
            yield from ((number, None) for number in running.values())  # new processes continue


def _results_of_processes(
    end: float,
    numbers: Iterator[int],
    task: Callable[[int], Result],
    processes: int,
    initializer: Callable[[], None],
    running: dict[Future[Result], int],
) -> Iterator[tuple[int, Result]]:
    """:func:`results_until` until a process dies; the seeds that run then are in ``running``."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=initializer, max_tasks_per_child=_SEEDS_OF_A_PROCESS
    ) as pool:
        while running or time.time() < end:
            while len(running) < processes and time.time() < end:
                number = next(numbers)
                running[pool.submit(task, number)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                result = future.result()
                yield running.pop(future), result


def _seed(number: int, how: dict[str, Any], end: float) -> tuple[Statistics, str]:
    """The counts of the programs of a seed, and the first failure as text."""
    found = Statistics()
    try:
        search(programs(), number, PROGRAMS_OF_A_SEED, found=found, end=end, **how)
    except Failure as failure:
        return found, str(failure)
    finally:
        torch._dynamo.reset()
    return found, ""


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def added(files: list[Path]) -> Statistics:
    """The sum of the counts in files of :class:`LongRun`."""
    total = Statistics()
    for file in files:
        counts = json.loads(file.read_text(encoding="utf-8"))
        names = [field.name for field in dataclasses.fields(Statistics)]
        own = {name: counts[name] for name in names}
        total.add(
            Statistics(**{name: Counter(own[name]) if isinstance(own[name], dict) else own[name] for name in own})
        )
    return total
