"""A progress bar for long measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text


class TimeLeft(ProgressColumn):
    """The time left at the mean speed of the running part, which includes the compilations so far."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.total is None or task.elapsed is None:
            return Text("left: -:--:--")
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"left: {timedelta(seconds=round(left))}")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, if stderr is a terminal: what runs, percentage, time so far, time left.

    A measurement may have several parts, each with its own steps. The time left counts the running part only.

    Yields:
        A function that updates the bar with a description, the steps done, and the total number of steps.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=4, no_wrap=True, overflow="ellipsis")),
        BarColumn(table_column=Column(ratio=1)),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeLeft(),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def on_progress(doing: str, done: int, total: int) -> None:
            known = progress.tasks[0]
            if known.total is not None and (known.total != total or done < known.completed):
                progress.reset(task, total=total)
            progress.update(task, description=doing, completed=done, total=total)

        yield on_progress
