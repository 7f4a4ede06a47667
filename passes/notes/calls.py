"""The call in the user's code that a node comes from: its text, its file and its line.

AOTAutograd decomposes a call into several nodes, and gives each of them the stack of the call that Dynamo traced.
"""

from __future__ import annotations

import ast
import functools
import linecache
import warnings
from dataclasses import dataclass

from torch.fx import Node

from kvcompile.passes.graph.breaks import place_outside_of_torch

MAX_CODE = 200
"""The most characters of a call's text."""


@dataclass(frozen=True)
class Call:
    """A call in the user's code.

    Attributes:
        code: its text in one line, or the text of its statement: ``cache.index_copy_(2, pos, k)``.
        where: its file and line: ``model.py:12``.
    """

    code: str
    where: str


def call_of(node: Node) -> Call | None:
    """The call that ``node`` comes from, outside of PyTorch's own files; None if its code is not known."""
    place = place_outside_of_torch(node)
    if place is None or not place.code:
        return None
    code = _code_of_call(place.file, place.line, _name_of_target(node)) or place.code
    return Call(code if len(code) <= MAX_CODE else f"{code[: MAX_CODE - 1]}…", place.where)


def _name_of_target(node: Node) -> str:
    """The name of the function or method that Dynamo traced as ``node``; empty for other calls."""
    stack = node.meta.get("source_fn_stack")
    if not stack:
        return ""
    target = stack[-1][1]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


@functools.lru_cache(maxsize=1024)
def _code_of_call(file: str, line: int, name: str) -> str | None:
    """The text of the call of ``name`` in the statement at ``line``, else the text of the statement; None if neither.

    The statement may have several lines. A statement with a body, such as ``if``, has no text here. If several
    statements share the line, exactly one of them must contain the call.
    """
    around = [statement for statement in _statements(file) if _spans(statement, line)]
    shortest = min((_num_lines(node) for node in around), default=0)
    statements = [node for node in around if _num_lines(node) == shortest]
    if not statements or any(hasattr(statement, "body") for statement in statements):
        return None
    nodes = [node for statement in statements for node in ast.walk(statement)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _called(node) == name and _spans(node, line)]
    if len(statements) > 1:
        return " ".join(ast.unparse(calls[0]).split()) if len(calls) == 1 else None
    found = next(iter(calls), statements[0])
    return " ".join(ast.unparse(found).split())


@functools.lru_cache(maxsize=32)
def _statements(file: str) -> tuple[ast.stmt, ...]:
    """All statements of ``file``; empty if it cannot be read or parsed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
            return tuple(node for node in nodes if isinstance(node, ast.stmt))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _num_lines(statement: ast.stmt) -> int:
    return (statement.end_lineno or statement.lineno) - statement.lineno + 1


def _spans(node: ast.stmt | ast.expr, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _called(call: ast.Call) -> str:
    """The last name of the called function: ``cat`` in ``torch.cat(...)``."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
