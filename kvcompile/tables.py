"""Text for a terminal: plain ASCII tables, and lines of at most ``WIDTH`` columns."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Columns of a table, at most."""

LABEL_WIDTH = 28
"""Columns of a label, at most; longer labels are folded."""


def wrapped(text: str, indent: int) -> str:
    """A line of text, broken at ``WIDTH``; all lines but the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table in plain ASCII. Columns that do not fit into ``WIDTH`` follow in further tables, with the labels again.

    Args:
        header: the titles of the columns.
        rows: the cells; the first is a label, which is folded if it is long. Other cells are never folded.
        text_columns: how many columns hold text, the labels included; the others hold numbers and are aligned right.
    """
    label_width = min(max(len(row[0]) for row in [header, *rows]), LABEL_WIDTH)
    tables: list[list[int]] = [[]]
    room = WIDTH
    for column in range(1, len(header)):
        width = max(len(row[column]) for row in [header, *rows]) + len(" | ")
        if tables[-1] and width > room:
            tables.append([])
        if not tables[-1]:
            room = WIDTH - label_width - len("|  |")
        room -= width
        tables[-1].append(column)
    return "\n\n".join(_render([0, *columns], label_width, text_columns, header, rows) for columns in tables)


def _render(
    columns: Sequence[int],
    label_width: int,
    text_columns: int,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    grid = Table(box=box.MARKDOWN, header_style="")
    for column in columns:
        if column == 0:
            grid.add_column(header[0], overflow="fold", width=label_width)
        else:
            grid.add_column(header[column], justify="left" if column < text_columns else "right", no_wrap=True)
    for row in rows:
        grid.add_row(*(row[column] for column in columns))
    text = io.StringIO()
    Console(file=text, width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
