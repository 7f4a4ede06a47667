"""Compares the outcomes of tests that ran plainly with the outcomes of the same tests on packed caches."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outside.plugin import Known
from outside.running import TestRun


@dataclass
class Verdict:
    """The results of one judge in one way.

    Attributes:
        judge: the project and the module or model.
        way: how the tests ran.
        tests: how many tests do not skip themselves when they run plainly.
        passed_plain: how many of these tests pass plainly.
        passed: how many tests pass both plainly and on packed caches.
        broken: the tests that pass plainly only -> the message of their failure.
        known: other tests that pass plainly only -> why this is no fault of packed caches.
        reached: how many tests used packed caches.
        packed_caches: how many packed caches were made in place of plain ones, by ways that compile nothing.
        sites: how many attention sites of compiled graphs were rewritten, over all tests.
        packed_calls: calls of graphs that ran on packed caches.
        plain_calls: calls of the same graphs that ran as plain Inductor would.
        refused: reason -> how many modules were refused for it, over all tests.
        plain_because: reason -> how many calls ran as plain Inductor would for it.
        versions: the project and the libraries that ran.
        date: the day of the run.
    """

    judge: str
    way: str
    tests: int = 0
    passed_plain: int = 0
    passed: int = 0
    broken: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)
    reached: int = 0
    packed_caches: int = 0
    sites: int = 0
    packed_calls: int = 0
    plain_calls: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    plain_because: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was packed, so that the tests judged nothing."""
        return not self.packed_calls and not self.packed_caches

    def problems(self) -> list[str]:
        """Why the verdict is bad, one line for each problem; nothing if it is good."""
        found = [f"{test}: {message}" for test, message in self.broken.items()]
        if self.is_empty:
            reasons = ", ".join(self.refused) or "no attention was compiled"
            found.append(f"{self.judge}, {self.way}: an empty judge, because no test ran on a packed cache: {reasons}")
        return found

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def compare(
    judge: str, way: str, plain: Mapping[str, TestRun], packed: Mapping[str, TestRun], known: Sequence[Known] = ()
) -> Verdict:
    """The verdict of tests that ran plainly and packed. A test that did not run packed counts as broken."""
    passed_plain = [test for test, run in plain.items() if run.outcome == "passed"]
    broken = {
        test: packed[test].message if test in packed else "it did not run"
        for test in passed_plain
        if test not in packed or packed[test].outcome != "passed"
    }
    broken |= {test: run.message for test, run in packed.items() if test not in plain and run.outcome != "passed"}
    failed = set(broken)
    understood = {
        test: one.reason
        for one in known
        for test, message in broken.items()
        if one.test in test and re.search(one.message, message)
    }
    broken = {test: message for test, message in broken.items() if test not in understood}
    refused: Counter[str] = Counter()
    because: Counter[str] = Counter()
    for run in packed.values():
        refused.update(run.refused)
        because.update(run.plain_because)
    return Verdict(
        judge=judge,
        way=way,
        tests=sum(run.outcome != "skipped" for run in plain.values()),
        passed_plain=len(passed_plain),
        passed=sum(test not in failed for test in passed_plain),
        broken=broken,
        known=understood,
        reached=sum(run.packed_calls > 0 or run.packed_caches > 0 for run in packed.values()),
        packed_caches=sum(run.packed_caches for run in packed.values()),
        sites=sum(run.sites for run in packed.values()),
        packed_calls=sum(run.packed_calls for run in packed.values()),
        plain_calls=sum(run.plain_calls for run in packed.values()),
        refused=dict(refused),
        plain_because=dict(because),
    )
