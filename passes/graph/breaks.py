"""Find the graph break after which a graph begins.

Where Dynamo cannot trace a line, it compiles the code before it and lets Python run the line. It compiles the rest of
the function as a new function, ``torch_dynamo_resume_in_<function>_at_<line>``.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph, Node

from kvcompile.compat.observing import graph_break_reasons

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>\S*)(?:\n\s*(?P<code>.*))?')
_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(?P<line>\d+)$")
_READS_A_NUMBER = re.compile(r"\.(item|tolist)\(")


@dataclass(frozen=True)
class Place:
    """A line of the user's code."""

    file: str
    line: int
    code: str

    @property
    def where(self) -> str:
        """``model.py:12``."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def innermost_place(node: Node) -> Place | None:
    """The line of the model's innermost function that calls ``node``."""
    frames = list(_frames(node))
    return Place(frames[-1]["file"], int(frames[-1]["line"]), frames[-1]["code"] or "") if frames else None


def graph_break_before(graph: Graph) -> Place | None:
    """The line of the graph break after which ``graph`` begins; None if it begins with the function."""
    outermost = next((frame for node in graph.nodes for frame in _frames(node)), None)
    resumed = _RESUMED.match(outermost["function"]) if outermost is not None else None
    if outermost is None or resumed is None:
        return None
    file, line = outermost["file"], int(resumed["line"])
    for reason in reversed(graph_break_reasons):
        stack = [(frame.filename, frame.lineno) for frame in reason.user_stack]
        if stack and (file, line) == stack[0]:  # the break may be in a function that this line calls
            file, line = stack[-1][0], stack[-1][1] or line
            break
    return Place(file, line, linecache.getline(file, line).strip())


def reads_a_number(place: Place) -> bool:
    """Whether the line asks for the numbers in a tensor, which breaks the graph."""
    return _READS_A_NUMBER.search(place.code) is not None


def _frames(node: Node) -> Iterator[re.Match[str]]:
    return _FRAME.finditer(node.meta.get("stack_trace") or "")
