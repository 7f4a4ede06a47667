"""A progress bar for long measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column


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
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None)

        def on_progress(doing: str, done: int, total: int) -> None:
            known = progress.tasks[0]
            if known.total is not None and (known.total != total or done < known.completed):
                progress.reset(task, total=total)
            progress.update(task, description=doing, completed=done, total=total)

        yield on_progress
