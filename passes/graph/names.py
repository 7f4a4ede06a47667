"""What a reason calls a node: an input as the user does, an operation by its operator and the line that calls it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.fx import Node

from kvcompile.passes.graph.pool_ops import GATHER_SLOTS
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import is_marker

_KEY = "kvcompile_source"
_LINE = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+), in .*\n\s*(?P<code>.*)')


def name_inputs(names: Mapping[Node, str]) -> None:
    """Note what the user calls the inputs of a graph."""
    for node, name in names.items():
        node.meta[_KEY] = name


def cache_name(state: Node) -> str:
    """What the user calls the cache of which ``state`` is a value."""
    first = first_state(state)
    if first.op == "placeholder":
        return str(first.meta.get(_KEY, first.name))
    return f"made by {operation(first)}"


def user_name(user: Node) -> str:
    """Who uses a cache: the caller, or an operation."""
    return "the caller" if user.op == "output" else operation(user)


def operation(node: Node) -> str:
    """What ``node`` calls, and the line of the model that does: ``aten.pow (model.py:12: x = keys.pow(2))``."""
    name, line = _operator(node), _line(node)
    return f"{name} ({line})" if line else name


def _operator(node: Node) -> str:
    """The operator that the model called; functionalisation and decompositions may have put others in its place."""
    if is_marker(node):
        return "attention"
    if node.target is GATHER_SLOTS:
        return "an index that gathers tokens"
    called = node.meta.get("original_aten", node.target)
    return str(called.overloadpacket) if isinstance(called, torch._ops.OpOverload) else node.name


def _line(node: Node) -> str | None:
    """Where the innermost function of the model calls it."""
    frames = list(_LINE.finditer(node.meta.get("stack_trace") or ""))
    return "{}:{line}: {code}".format(Path(frames[-1]["file"]).name, **frames[-1].groupdict()) if frames else None
