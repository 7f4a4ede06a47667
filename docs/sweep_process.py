"""Processes of the sweep. Every model type runs in its own, so that a crash or a hang costs only one type."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

TIMEOUT = 900
"""Seconds for one process."""

Record = Callable[[dict[str, Any]], None]
"""Keeps one result, even if the process dies later."""


class Process:
    """A function that runs in its own process, which writes a line of JSON for each result."""

    def __init__(self, file: Path, work: Callable[[Record], None], device: str = "cpu") -> None:
        """
        Args:
            file: where the results go.
            work: calls its argument with each result. If ``device`` is a GPU, it must be possible to pickle it.
            device: the device that the function uses. CUDA fails in a fork of a process that has used CUDA. Processes
                for a GPU are therefore forks of a server, which imports modules and does nothing else.
        """
        self._file, self._work = file, work
        self._end = time.monotonic() + TIMEOUT
        method = "fork" if device == "cpu" else "forkserver"
        self._process = multiprocessing.get_context(method).Process(target=_write, args=(file, work))
        self._process.start()

    def is_over(self) -> bool:
        if self._process.is_alive() and time.monotonic() > self._end:
            self._process.kill()
        self._process.join(0)
        return not self._process.is_alive()

    def finished(self) -> list[dict[str, Any]]:
        """The results so far."""
        lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def ending(self) -> str:
        return f"its process ended with {self._process.exitcode}"


def _write(path: Path, work: Callable[[Record], None]) -> None:
    with path.open("w", encoding="utf-8", buffering=1) as file:
        work(lambda result: _write_line(file, result))


def _write_line(file: TextIO, result: dict[str, Any]) -> None:
    file.write(json.dumps(result) + "\n")


Started = TypeVar("Started", bound=Process)


def finished_processes(starts: Iterable[Callable[[], Started]], jobs: int) -> Iterator[Started]:
    """Start processes, ``jobs`` at a time; yields them as they finish."""
    waiting = list(starts)
    running: list[Started] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(waiting.pop(0)())
        done = [process for process in running if process.is_over()]
        yield from done
        running = [process for process in running if process not in done]
        time.sleep(0.1)
