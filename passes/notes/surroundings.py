"""The surroundings of an attention site in a graph, small enough to keep and to draw.

In the rewritten graph, all nodes with the same role for the site (:mod:`kvcompile.passes.notes.roles`) become one box,
and each other node that they use, or that uses them, becomes a separate box. Before the rewrite, a box is a call in
the user's code (:mod:`kvcompile.passes.notes.calls`): nodes of one call with the same role are together. Boxes hold
text only, so that they do not keep the graph alive.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from kvcompile.compat.operators import OpOverload
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.passes.marker import is_marker, markers_of, owners_of_originals
from kvcompile.passes.notes.calls import Call, call_of
from kvcompile.passes.notes.roles import role_of

BoxKind = Literal["attention", "cache", "write", "read", "input", "output", "operation"]

MAX_CONSUMERS = 4
"""The most other users of a box that are drawn. A constant or a position has a user in every layer."""

_MAX_OPS = 4


@dataclass(frozen=True)
class Box:
    """One box of a drawing.

    Attributes:
        label: the name of a role, or of an operation, or the text of a call without a role.
        detail: the text of the user's call and its place, or the operations of the nodes, or their number; then dtype
            and shape of the result.
        kind: its kind, which decides how it is drawn.
    """

    label: str
    detail: tuple[str, ...]
    kind: BoxKind


@dataclass(frozen=True)
class Surroundings:
    """Boxes in the order of the graph, and edges ``(from, to)`` between their positions."""

    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SiteSurroundings:
    """The surroundings of one site in the ATen graph and in the rewritten graph; None where it has none."""

    before: Surroundings | None = None
    after: Surroundings | None = None


@dataclass(frozen=True)
class _Group:
    """The properties that the nodes of one box have in common.

    Attributes:
        role: the name of their role; empty for nodes without a role.
        call: the user's call that they come from; None if calls are not told apart, or not known.
        node: a node that is alone in its box.
    """

    role: str = ""
    call: Call | None = None
    node: Node | None = None


_GroupOf = Callable[[Node, str], _Group]
"""Takes a node and the name of its role, which is empty without a role; returns the group of its box."""


def surroundings_of_sites(graph: Graph, num_sites: int) -> list[Surroundings | None]:
    """The surroundings of every site; None for a site without any node that has a role for it."""
    return _of_sites(graph, _members(graph, num_sites), _by_role)


def calls_of_sites(graph: Graph, num_sites: int) -> list[Surroundings | None]:
    """The surroundings of every site before the rewrite, as the user's code has them."""
    members = _members(graph, num_sites)
    places = {marker: site for site, marker in enumerate(markers_of(graph))}
    for node, markers in owners_of_originals(graph).items():
        for marker in markers:
            members[places[marker]].setdefault(node, "attention")
    calls = {node: call_of(node) for node in graph.nodes}
    for names in members:
        _complete_calls(names, calls)
    return _of_sites(graph, members, _ByCall(graph, calls))


def _complete_calls(names: dict[Node, str], calls: dict[Node, Call | None]) -> None:
    """Give the role of a node to its neighbours from the same call, such as a view of the written tokens."""
    waiting = [node for node in names if calls[node] is not None]
    while waiting:
        node = waiting.pop()
        for other in (*node.all_input_nodes, *node.users):
            if other not in names and calls[other] == calls[node]:
                names[other] = names[node]
                waiting.append(other)


def _members(graph: Graph, num_sites: int) -> list[dict[Node, str]]:
    """For every site its nodes with a role, and the names of these roles."""
    members: list[dict[Node, str]] = [{} for _ in range(num_sites)]
    for node in graph.nodes:
        role = role_of(node)
        for site in role.sites if role is not None else ():
            members[site][node] = role.name if role is not None else ""
    return members


def _of_sites(graph: Graph, members: list[dict[Node, str]], group_of: _GroupOf) -> list[Surroundings | None]:
    order = {node: position for position, node in enumerate(graph.nodes)}
    return [_surroundings(names, order, group_of) if names else None for names in members]


def _by_role(node: Node, role: str) -> _Group:
    return _Group(role) if role else _Group(node=node)


class _ByCall:
    """Groups nodes by the user's calls. The copy back into a cache belongs to the last call that writes it."""

    def __init__(self, graph: Graph, calls: dict[Node, Call | None]) -> None:
        self._calls = calls
        self._writes = self._last_writes(graph)

    def __call__(self, node: Node, role: str) -> _Group:
        if role.endswith(" write back"):
            return _Group(role.removesuffix(" back"), self._writes.get(node, self._calls[node]))
        if node.op in ("placeholder", "output"):
            return _by_role(node, role)
        call = self._calls[node]
        return _Group(role, call) if role or call is not None else _Group(node=node)

    def _last_writes(self, graph: Graph) -> dict[Node, Call | None]:
        """For every copy into an input, the call of the value that is copied."""
        copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        return {copy: self._calls[copy.args[1]] for copy in copies if isinstance(copy.args[1], Node)}


def _surroundings(names: dict[Node, str], order: dict[Node, int], group_of: _GroupOf) -> Surroundings:
    groups: dict[_Group, list[Node]] = {}
    for node, name in names.items():
        groups.setdefault(group_of(node, name), []).append(node)
    near: dict[Node, None] = {}
    for node in names:
        near |= dict.fromkeys(other for other in node.all_input_nodes if other not in names)
    for group in groups.values():
        users = dict.fromkeys(user for node in group for user in node.users if user not in names and user not in near)
        near |= dict.fromkeys(list(users)[:MAX_CONSUMERS])
    for node in near:
        groups.setdefault(group_of(node, ""), []).append(node)
    for group in groups.values():
        group.sort(key=order.__getitem__)
    ordered = sorted(groups.items(), key=lambda item: order[item[1][0]])
    places = {node: place for place, (_, nodes) in enumerate(ordered) for node in nodes}
    edges = {
        (places[source], place)
        for place, (_, nodes) in enumerate(ordered)
        for node in nodes
        for source in node.all_input_nodes
        if source in places and places[source] != place and (source in names or node in names)
    }
    return Surroundings(tuple(_box(group, nodes) for group, nodes in ordered), tuple(sorted(edges)))


def _box(group: _Group, nodes: list[Node]) -> Box:
    if group.call is not None:
        return _call_box(group.role, group.call, nodes)
    if group.role:
        nodes = [*filter(is_marker, nodes)] or nodes  # the marker stands for the operations of its original
        return Box(group.role, (*_operations(nodes), *_value(nodes[-1])), _kind_of_role(group.role))
    return _node_box(nodes[0])


def _call_box(role: str, call: Call, nodes: list[Node]) -> Box:
    result = next(filter(is_marker, nodes), nodes[-1])
    if role:
        return Box(role, (call.code, call.where, *_value(result)), _kind_of_role(role))
    return Box(call.code, (call.where, *_value(result)), "operation")


def _node_box(node: Node) -> Box:
    if node.op == "placeholder":
        return Box("input", _value(node), "input")
    if node.op == "output":
        return Box("returned", (), "output")
    return Box(operation_name(node), _value(node), "operation")


def _kind_of_role(name: str) -> BoxKind:
    if name.endswith("attention"):
        return "attention"
    word = name.removesuffix(" back").rsplit(" ", 1)[-1]
    kinds: dict[str, BoxKind] = {"cache": "cache", "read": "read", "write": "write", "store": "write", "rows": "write"}
    return kinds.get(word, "operation")


def _operations(nodes: Iterable[Node]) -> tuple[str, ...]:
    """The operations of some nodes in order, each once; their number if there are many."""
    calls = [node for node in nodes if node.op != "placeholder" and node.target is not operator.getitem]
    names = list(dict.fromkeys(map(operation_name, calls)))
    if len(names) > _MAX_OPS:
        return (f"{len(calls)} operations",)
    return (", ".join(names),) if names else ()


def operation_name(node: Node) -> str:
    """The name of the operation that ``node`` calls: ``index_put``, ``kvcompile.store``, ``split[1]``."""
    if node.target is operator.getitem and isinstance(node.args[0], Node):
        return f"{operation_name(node.args[0])}[{node.args[1]}]"
    target = node.args[0] if str(node.target) == "auto_functionalized_v2" else node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket).removeprefix("aten.").removeprefix("prims.")
    return str(getattr(target, "__name__", target))


def _value(node: Node) -> tuple[str, ...]:
    """The dtype and shape of a node, ``float16 [1, 8, s27, 128]``; empty if it makes no tensor."""
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ()
    return (f"{dtype_name(value.dtype)} [{', '.join(map(str, value.shape))}]",)
