"""The role of a node for attention sites, kept in the node's metadata, so that a graph can be read and drawn by site.

Packing notes the roles of the nodes of logical caches before the rewrite, and the roles of the nodes that the rewrite
inserts. Compiled code does not depend on these notes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from kvcompile.compat.graphs import calling_for_new_nodes

_KEY = "kvcompile_role"


@dataclass(frozen=True)
class NodeRole:
    """The role of a node, and the sites that it serves.

    Attributes:
        name: e.g. ``key cache``, ``key write``, ``key read``, ``attention``, ``packed key cache``, ``key store``.
        sites: positions of its sites among the markers of the graph. Several sites may share a cache.
        modules: the qualified module names of these sites.
    """

    name: str
    sites: tuple[int, ...]
    modules: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.modules[0] or 'top level'}{more}: {self.name}"


def role_of(node: Node) -> NodeRole | None:
    """The role that was noted for ``node``; None if it has no role."""
    role: NodeRole | None = node.meta.get(_KEY)
    return role


def note_role(node: Node, role: NodeRole) -> None:
    """Note the role of ``node``, unless it has one."""
    node.meta.setdefault(_KEY, role)


@contextlib.contextmanager
def noting_new_nodes(gm: GraphModule, role: Callable[[Node], NodeRole]) -> Iterator[None]:
    """Note the role of every node that is made in the block."""
    made: list[Node] = []

    def remember(node: Node) -> None:
        made.append(node)

    with calling_for_new_nodes(gm, remember):
        yield
    for node in made:  # at the end, because node_copy overwrites the metadata of the node that it makes
        note_role(node, role(node))
