"""Marks the calls on packed caches in code that Inductor generated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

_CHECKS = ("assert_size_stride", "assert_alignment")
_OPERATORS = "torch.ops.kvcompile."
_VIEWS = ("torch.ops.aten.view", "torch.ops.aten.reshape", "reinterpret_tensor")

PACKED_INPUT = re.compile(r"^#\s+(\w+_packed)\b.*  (\S[^\n]*?: packed [^\n]*)$", re.MULTILINE)
"""A packed cache among the inputs that the text of a rewritten graph lists: its name, and its role for a site."""


def packed_inputs(rewritten: str) -> dict[str, str]:
    """Maps the packed caches among the inputs of a rewritten graph, given as text, to their roles."""
    return dict(PACKED_INPUT.findall(rewritten))


def marked(code: str, packed: Mapping[str, str]) -> str:
    """The code with a comment above every call of a kernel on packed caches, and of an operator of kvcompile.

    Args:
        code: Python that Inductor generated. Code that does not parse is returned unchanged.
        packed: from :func:`packed_inputs`.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return code
    comments = dict(_comments(tree, packed))
    lines = code.splitlines(keepends=True)
    for number in sorted(comments, reverse=True):
        line = lines[number - 1]
        indent = line[: len(line) - len(line.lstrip())]
        lines.insert(number - 1, f"{indent}# kvquant: {comments[number]}\n")
    return "".join(lines)


def _comments(tree: ast.Module, packed: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """The line and the comment of every marked statement. Views of a packed cache are packed caches, too."""
    roles = dict(packed)
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Expr, ast.Assign))]
    for statement in sorted(statements, key=lambda node: node.lineno):
        value = statement.value
        called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        names = dict.fromkeys(node.id for node in ast.walk(value) if isinstance(node, ast.Name) and node.id in roles)
        if isinstance(statement, ast.Assign) and (not called or called.startswith(_VIEWS)):
            for target in statement.targets:
                if isinstance(target, ast.Name) and names:
                    roles[target.id] = roles[next(iter(names))]
        elif called and called not in _CHECKS:
            found = list(dict.fromkeys(roles[name] for name in names))
            if called.startswith(_OPERATORS):
                found.insert(0, called.removeprefix("torch.ops."))
            if found:
                yield statement.lineno, "; ".join(found)
