"""What a node does for an attention site, kept in the node's metadata, so that a graph can be read and drawn by site.

Stage B notes the parts of every site while it knows them: before the rewrite the nodes of the logical caches, after it
the nodes that it inserted. Nothing that is compiled depends on these notes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

_KEY = "kvcompile_role"


@dataclass(frozen=True)
class NodeRole:
    """What a node does, and for whom.

    Attributes:
        name: e.g. ``key cache``, ``key write``, ``key read``, ``attention``, ``packed key cache``, ``key store``.
        sites: positions of the sites it serves among the markers of the graph; several share one cache.
        modules: the qualified names of those sites.
    """

    name: str
    sites: tuple[int, ...]
    modules: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.modules[0] or 'top level'}{more}: {self.name}"


def role_of(node: Node) -> NodeRole | None:
    """What ``node`` was noted to do."""
    role: NodeRole | None = node.meta.get(_KEY)
    return role


def note_role(node: Node, role: NodeRole) -> None:
    """Note what ``node`` does, unless that is known already."""
    node.meta.setdefault(_KEY, role)


@contextlib.contextmanager
def noting_new_nodes(gm: GraphModule, role: Callable[[Node], NodeRole]) -> Iterator[None]:
    """Note the part of every node that is made in the block."""
    made: list[Node] = []

    def remember(node: Node) -> None:
        made.append(node)

    gm._register_create_node_hook(remember)
    try:
        yield
    finally:
        gm._unregister_create_node_hook(remember)
    for node in made:  # only now: node_copy overwrites the metadata of the node that it has made
        note_role(node, role(node))
