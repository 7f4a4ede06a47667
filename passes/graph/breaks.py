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

import torch
from torch.fx import Graph, Node

from kvcompile.compat.observing import graph_break_reasons

_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>\S*)(?:\n\s*(?P<code>.*))?')
_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(?P<line>\d+)$")
_READS_A_NUMBER = re.compile(r"\.(item|tolist)\(")
_TORCH = str(Path(torch.__file__).parent)
_CAPTURES_NUMBERS = "capture_scalar_outputs = True"


@dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Attributes:
        captures_numbers: whether it breaks the graph because it reads numbers of a tensor. With
            ``torch._dynamo.config.capture_scalar_outputs`` it does not break the graph.
    """

    file: str
    line: int
    code: str
    captures_numbers: bool = False

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


def place_outside_of_torch(node: Node) -> Place | None:
    """The innermost line that leads to ``node`` and is not in PyTorch's own files; None without such a line."""
    frames = [frame for frame in _frames(node) if not frame["file"].startswith(_TORCH)]
    return Place(frames[-1]["file"], int(frames[-1]["line"]), frames[-1]["code"] or "") if frames else None


def graph_break_before(graph: Graph) -> Place | None:
    """The line of the graph break after which ``graph`` begins; None if it begins with the function."""
    outermost = next((frame for node in graph.nodes for frame in _frames(node)), None)
    resumed = _RESUMED.match(outermost["function"]) if outermost is not None else None
    if outermost is None or resumed is None:
        return None
    file, line, why = outermost["file"], int(resumed["line"]), None
    for reason in reversed(graph_break_reasons):
        stack = [(frame.filename, frame.lineno) for frame in reason.user_stack]
        if stack and (file, line) == stack[0]:  # the break may be in a function that this line calls
            file, line = stack[-1][0], stack[-1][1] or line
            why = reason.reason
            break
    code = linecache.getline(file, line).strip()
    captures_numbers = _CAPTURES_NUMBERS in why if why is not None else _READS_A_NUMBER.search(code) is not None
    return Place(file, line, code, captures_numbers)


def num_breaks() -> int:
    """The number of graph breaks so far."""
    return len(graph_break_reasons)


def breaks_since(count: int) -> list[Place]:
    """The lines of the graph breaks after the first ``count``, each once."""
    frames = [reason.user_stack[-1] for reason in graph_break_reasons[count:] if reason.user_stack]
    places = (Place(frame.filename, frame.lineno or 0, (frame.line or "").strip()) for frame in frames)
    return list(dict.fromkeys(places))


def function_of(graph: Graph) -> tuple[str, str] | None:
    """The file and the name of the function that ``graph`` is compiled for; None if no node has a stack trace."""
    outermost = next((frame for node in graph.nodes for frame in _frames(node)), None)
    return (outermost["file"], outermost["function"]) if outermost is not None else None


def _frames(node: Node) -> Iterator[re.Match[str]]:
    return _FRAME.finditer(node.meta.get("stack_trace") or "")
