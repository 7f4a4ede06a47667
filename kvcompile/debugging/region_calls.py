"""The calls of regions in the text of a rewritten graph, in their order of execution."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

_COMMENT = re.compile(r"  # (\S[^\n]*)$")
_CALL = "invoke_subgraph"
_MOST = 2
"""The maximum number of calls that are named if the order is ambiguous."""


@dataclass(frozen=True)
class Statement:
    """A node of a graph in its text: its name, its role for a site or an empty text, and the names that it uses.

    ``region`` is the region that it calls, or an empty text.
    """

    name: str
    role: str
    uses: tuple[str, ...]
    region: str


def statements_of(text: str) -> tuple[list[Statement], list[str]]:
    """The statements in the text of a graph, and the name of each output; empty for an output that is not a name."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError):
        return [], []
    graphs = [node for node in body if isinstance(node, ast.ClassDef)]
    forward = next((node for graph in graphs for node in graph.body if isinstance(node, ast.FunctionDef)), None)
    lines, statements, returned = text.splitlines(), list[Statement](), list[str]()
    for node in forward.body if forward is not None else ():
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(node, ast.Return) and isinstance(value, (ast.Tuple, ast.List)):
            returned = [one.id if isinstance(one, ast.Name) else "" for one in value.elts]
        elif isinstance(target, ast.Name) and value is not None and not isinstance(value, ast.Constant):
            comment = _COMMENT.search(lines[node.lineno - 1])
            uses = tuple(inner.id for inner in ast.walk(value) if isinstance(inner, ast.Name))
            statements.append(Statement(target.id, comment[1] if comment else "", uses, _region_of(value)))
    return statements, returned


def _region_of(value: ast.expr) -> str:
    if not isinstance(value, ast.Call) or not ast.unparse(value.func).endswith(_CALL) or len(value.args) < 2:
        return ""
    name = value.args[1]
    return name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""


def roles_of_region_calls(statements: Sequence[Statement], prefix: str) -> dict[str, list[str]]:
    """The role of the first, second, ... call of each region whose name begins with ``prefix``.

    Generated code may run nodes in another order than the graph, as far as data dependencies allow. Call number k of a
    region can be any call that depends on at most k other calls of the region, if all calls that depend on it can
    follow.
    """
    before: dict[str, frozenset[str]] = {}
    calls: dict[str, list[Statement]] = {}
    for one in statements:
        needed = frozenset[str]().union(*(before.get(name, frozenset()) for name in one.uses))
        if one.region.startswith(prefix):
            calls.setdefault(one.region, []).append(one)
            needed |= {one.name}
        before[one.name] = needed
    roles = {}
    for region, own in calls.items():
        earlier = {one.name: sum(other.name in before[one.name] for other in own) - 1 for one in own}
        later = {one.name: sum(one.name in before[other.name] for other in own) - 1 for one in own}
        possible = [
            [one.role or region for one in own if earlier[one.name] <= number < len(own) - later[one.name]]
            for number in range(len(own))
        ]
        roles[region] = [_one_of(list(dict.fromkeys(names))) for names in possible]
    return roles


def _one_of(names: Sequence[str]) -> str:
    more = len(names) - _MOST
    return " or ".join(names) if more <= 0 else f"{' or '.join(names[:_MOST])} or one of {more} more"
