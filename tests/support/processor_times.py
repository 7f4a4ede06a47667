"""The processor time of each test: ``pytest tests --processor-times=FILE`` notes it, this program sums it up by file.

Wall time says little where tests run beside each other and start programs. ``python processor_times.py FILE`` shows all
folders, and the files and the tests that take longest.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 40

elsewhere: dict[int, float] = {}
"""Seconds of processes that outlive the tests for which they work, by process id; their callers note the seconds."""


def processor_seconds() -> float:
    """Processor seconds of this process, of the programs that it has waited for, and of processes in ``elsewhere``."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + sum(elsewhere.values())


class ProcessorTimes:
    """A plugin that appends the name and the seconds of each test to a file, which workers share.

    The time before a worker's first test, which imports and collects, is noted as ``start``.
    """

    def __init__(self, file: Path) -> None:
        self.file = file.open("a", buffering=1)
        self.end = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self._note("start" if self.end == 0.0 else "between tests")
        result = yield
        self._note(item.nodeid)
        return result

    def _note(self, name: str) -> None:
        begin, self.end = self.end, processor_seconds()
        self.file.write(json.dumps([name, round(self.end - begin, 3)]) + "\n")


def main(file: Path) -> None:
    tests, files, rooms, counts = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for name, seconds in map(json.loads, file.read_text().splitlines()):
        place = name.partition("::")[0]
        tests[name] += seconds
        files[place] += seconds
        rooms[place.rpartition("/")[0] or place] += seconds
        counts[place] += 1
    print(f"{sum(files.values()):8.1f} s in all")
    for room, seconds in rooms.most_common():
        print(f"{seconds:8.1f} s {room}")
    for place, seconds in files.most_common(SHOWN):
        print(f"{seconds:8.1f} s {counts[place]:5} {place}")
    for name, seconds in tests.most_common(SHOWN):
        print(f"{seconds:8.1f} s {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
