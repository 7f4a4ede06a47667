"""Name nodes in messages: inputs as the user's code names them, operations by their operator and the calling line.

This is the only file that turns a source of Dynamo into words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from kvcompile.compat.graphs import source_of
from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.breaks import graph_break_before, innermost_place
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import is_marker
from kvcompile.passes.refusal import Reason, Refusal

AXIS_NAMES = {"b": "sequences", "h": "heads", "t": "tokens", "d": "channels"}
"""The dimensions of a cache, in words."""

_KEY = "kvcompile_source"
_VARIABLE = re.compile(r"\b[LG]\['(\w+)'\]")
_MEMBER = re.compile(r"\._(?:modules|buffers|parameters)\['(\w+)'\]|\.__dict__\['(\w+)'\]")
_UNNAMED = re.compile(r"\b[LG]\['(?:__|\.)")
_BEFORE_BREAK = "a value that the code before the graph break at"
_MAY_KEEP_ONE_GRAPH = "torch._dynamo.config.capture_scalar_outputs = True may keep one graph"


def name_inputs(names: Mapping[Node, str]) -> None:
    """Note Dynamo's names of a graph's inputs, such as ``L['cache'].layers[0].keys``."""
    for node, name in names.items():
        node.meta[_KEY] = name


def source_name(placeholder: Node) -> str:
    """Dynamo's name of an input of its graph: ``L['cache'].layers[0].keys``."""
    return source_of(placeholder)


def input_name(placeholder: Node) -> str:
    """The user's name of an input of Dynamo's graph."""
    return in_words(source_name(placeholder)) or _unnamed(placeholder.graph)


def in_words(source: str) -> str | None:
    """The name in the user's code of an input that Dynamo calls ``source``; None if it has no name there.

    ``L['self']._modules['layers']._modules['0'].keys`` becomes ``self.layers[0].keys``.
    """
    if _UNNAMED.search(source):
        return None
    return _MEMBER.sub(_member, _VARIABLE.sub(r"\1", source))


def _member(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    return f"[{name}]" if name.isdigit() else f".{name}"


def cache_name(state: Node) -> str:
    """The user's name of the cache that ``state`` is a value of; it completes "its key cache ..."."""
    first = first_state(state)
    if first.op != "placeholder":
        return f"made by {operation(first)}"
    name = in_words(str(first.meta.get(_KEY, first.name)))
    return f"({_unnamed(first.graph)})" if name is None else name


def tensor_name(placeholder: Node) -> str:
    """The user's name of an input that is larger than a cache; it completes "its key cache is a part of ..."."""
    return cache_name(placeholder).strip("()")


def _unnamed(graph: Graph) -> str:
    place = graph_break_before(graph)
    if place is None:
        return "a value without a name in the code"
    return f"{_BEFORE_BREAK} {place.where} computed"


def with_graph_break(refusal: Refusal, graph: Graph) -> Refusal:
    """``refusal`` of a site in ``graph``, with a note of the graph break before the graph if that is the likely cause.

    It is the likely cause if the code before the break computes the cache, or if this graph only reads the cache.
    """
    place = graph_break_before(graph)
    is_from_before = _BEFORE_BREAK in refusal.particulars.get("source", "")
    if place is None or not (is_from_before or refusal.reason is Reason.plain_read_only):
        return refusal
    note = f"the graph begins after the graph break at {place}"
    return refusal.with_note(f"{note}; {_MAY_KEEP_ONE_GRAPH}" if place.captures_numbers else note)


def user_name(user: Node) -> str:
    """The user of a cache: the caller, or an operation."""
    return "the caller" if user.op == "output" else operation(user)


def operation(node: Node) -> str:
    """The operator of ``node`` and the line of the model that calls it: ``aten.pow (model.py:12: x = keys.pow(2))``."""
    return operations([node])


def operations(nodes: Sequence[Node]) -> str:
    """The operators of several nodes, and the line of the last: ``aten.unsqueeze, aten.view (model.py:12: ...)``.

    An operator of the model may have become several nodes, so neighbours of the same name count as one.
    """
    names = [name for name, _ in itertools.groupby(map(_operator, nodes))]
    return with_line(", ".join(names), nodes[-1])


def with_line(name: str, node: Node) -> str:
    """``name`` and the line of the model that calls ``node``."""
    place = innermost_place(node)
    return f"{name} ({place})" if place is not None else name


def _operator(node: Node) -> str:
    """The operator that the model called. Functionalisation and decompositions may have replaced it by others."""
    if is_marker(node):
        return "attention"
    if node.target is GATHER_SLOTS:
        return "an index that gathers tokens"
    called = node.meta.get("original_aten", node.target)
    return str(called.overloadpacket) if isinstance(called, OpOverload) else node.name
