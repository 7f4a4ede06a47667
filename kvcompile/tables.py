"""Text for a terminal: plain ASCII tables, and lines of at most ``width()`` columns. No word is broken."""

from __future__ import annotations

import io
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100
"""Maximum width of a table in characters. In a narrower terminal, tables are narrower."""

MIN_WIDTH = 60
"""Width of a table in the narrowest terminal, in characters."""

LABEL_WIDTH = 28
"""Maximum width of a label in characters; longer labels are folded."""


def width() -> int:
    """The width of lines and tables in characters: the terminal's width, or ``WIDTH`` in a file or a pipe."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(MIN_WIDTH, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def broken(name: str, room: int) -> str:
    """A name in lines of at most ``room`` columns, broken after dots and slashes.

    A part between them that is too long for a line is also broken after underscores.
    """
    lines = [""]
    parts = re.split(r"(?<=[./])", name)
    for piece in (piece for part in parts for piece in ([part] if len(part) <= room else re.split(r"(?<=_)", part))):
        if lines[-1] and len(lines[-1]) + len(piece) > room:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def wrapped(text: str, indent: int) -> str:
    """A line of text, broken at ``width()``; all lines but the first are indented."""
    return textwrap.fill(text, width(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> str:
    """A table in plain ASCII. Columns that do not fit into ``width()`` go to further tables, which repeat the labels.

    Args:
        header: the titles of the columns.
        rows: the cells; the first is a label, which is folded if it is long. Other cells are never folded.
        text_columns: the number of columns of text, including labels; the others hold numbers and are aligned right.
    """
    label_width = min(max(len(row[0]) for row in [header, *rows]), LABEL_WIDTH)
    tables: list[list[int]] = [[]]
    room = whole = width()
    for column in range(1, len(header)):
        needed = max(len(row[column]) for row in [header, *rows]) + len(" | ")
        if tables[-1] and needed > room:
            tables.append([])
        if not tables[-1]:
            room = whole - label_width - len("|  |")
        room -= needed
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
        grid.add_row(*(broken(row[0], label_width) if column == 0 else row[column] for column in columns))
    text = io.StringIO()
    Console(file=text, width=width(), color_system=None, markup=False, emoji=False, highlight=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())
