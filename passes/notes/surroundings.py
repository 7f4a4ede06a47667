"""The surroundings of an attention site in a graph, small enough to keep and to draw.

All nodes with the same role for the site (:mod:`kvcompile.passes.notes.roles`) become one box. Each other node that
they use, or that uses them, becomes a box of its own. Boxes hold text only, so that they do not keep the graph alive.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.notes.roles import role_of

BoxKind = Literal["attention", "cache", "write", "read", "input", "output", "operation"]

MAX_CONSUMERS = 4
"""The most other users of a box that are drawn. A constant or a position has a user in every layer."""

_MAX_OPS = 4


@dataclass(frozen=True)
class Box:
    """One box of a drawing.

    Attributes:
        label: the name of a role, or of an operation.
        detail: the operations of the nodes, or their number; then dtype and shape of the result.
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


def surroundings_of_sites(graph: Graph, num_sites: int) -> list[Surroundings | None]:
    """The surroundings of every site; None for a site without any node that has a role for it."""
    members: list[dict[Node, str]] = [{} for _ in range(num_sites)]
    order: dict[Node, int] = {}
    for position, node in enumerate(graph.nodes):
        order[node] = position
        role = role_of(node)
        for site in role.sites if role is not None else ():
            members[site][node] = role.name if role is not None else ""
    return [_surroundings(names, order) if names else None for names in members]


def _surroundings(names: dict[Node, str], order: dict[Node, int]) -> Surroundings:
    groups: dict[Hashable, list[Node]] = {}
    for node, name in names.items():
        groups.setdefault(name, []).append(node)
    for node in list(names):
        for other in node.all_input_nodes:
            if other not in names:
                groups.setdefault(other, [other])
    for group in list(groups.values()):
        users = dict.fromkeys(user for node in group if node in names for user in node.users if user not in names)
        for user in list(users)[:MAX_CONSUMERS]:
            groups.setdefault(user, [user])
    ordered = sorted(groups.items(), key=lambda item: order[item[1][0]])
    places = {node: place for place, (_, nodes) in enumerate(ordered) for node in nodes}
    edges = {
        (places[source], place)
        for place, (_, nodes) in enumerate(ordered)
        for node in nodes
        for source in node.all_input_nodes
        if source in places and places[source] != place and (source in names or node in names)
    }
    boxes = (_role_box(key, nodes) if isinstance(key, str) else _node_box(nodes[0]) for key, nodes in ordered)
    return Surroundings(tuple(boxes), tuple(sorted(edges)))


def _role_box(name: str, nodes: list[Node]) -> Box:
    return Box(name, (*_operations(nodes), *_value(nodes[-1])), _kind_of_role(name))


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
    return (f"{str(value.dtype).removeprefix('torch.')} [{', '.join(map(str, value.shape))}]",)
