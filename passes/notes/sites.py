"""Note the roles of nodes for every attention site: logical caches before the rewrite, inserted nodes during it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch.fx import GraphModule, Node

from kvcompile.compat.tensors import schema_of
from kvcompile.passes.graph.aten import view_chain
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.notes.roles import NodeRole, note_role, noting_new_nodes
from kvcompile.passes.prove.cache import Attention, Cache, ComputedAttention
from kvcompile.passes.site import Site


class SiteNotes:
    """The sites of one graph, and the caches that were proven behind them."""

    def __init__(self, sites: Sequence[Site], attentions: Sequence[Attention | ComputedAttention | None]) -> None:
        """``sites`` and ``attentions`` have one entry for every marker; an attention without proven caches is None."""
        self._sites = sites
        self._attentions = attentions
        self._readers: dict[Node, list[int]] = {}
        for index, attention in enumerate(attentions):
            for cache in attention.caches if attention is not None else ():
                self._readers.setdefault(cache.root, []).append(index)

    def note_logical(self, gm: GraphModule) -> None:
        """Note the roles of the nodes of the graph before the rewrite."""
        for index, (marker, attention) in enumerate(zip(markers_of(gm.graph), self._attentions, strict=True)):
            note_role(marker, self._role("attention", [index]))
            operands = _operands(marker) if attention is None else _proven(attention)
            for name, root, nodes in operands:
                for node in nodes:
                    note_role(node, self._role(name, self._readers.get(root, [index])))

    def storing(self, gm: GraphModule, cache: Cache) -> AbstractContextManager[None]:
        """Note the nodes that are made in the block, in which the storage and the writes of ``cache`` are rewritten."""
        return noting_new_nodes(gm, lambda node: self._role(_packed_name(node, cache), self._readers[cache.root]))

    def attending(self, gm: GraphModule, site: Site) -> AbstractContextManager[None]:
        """Note the nodes that are made in the block, in which the marker of ``site`` is rewritten."""
        index = next(index for index, other in enumerate(self._sites) if other is site)
        return noting_new_nodes(gm, lambda node: self._role("packed attention", [index]))

    def _role(self, name: str, sites: Sequence[int]) -> NodeRole:
        return NodeRole(name, tuple(sites), tuple(self._sites[index].module for index in sites))


def _reads(attention: Attention | ComputedAttention) -> list[tuple[Cache, Sequence[Node]]]:
    """The caches of a site, and the nodes that read each for it."""
    if isinstance(attention, Attention):
        key, value = attention.key, attention.value
        key_chain = _computing_users(key) if attention.computes_keys else attention.key_read.chain
        return [(key, key_chain), (value, attention.value_read.chain)]
    return [(cache, _computing_users(cache)) for cache in attention.caches]


def _computing_users(cache: Cache) -> list[Node]:
    """The nodes that use a cache to compute keys or values."""
    return [user for user in cache.root.users if user in cache.computing]


def _proven(attention: Attention | ComputedAttention) -> Iterator[tuple[str, Node, Sequence[Node]]]:
    """(name of the role, value of the cache that is read, nodes) for the caches of a site."""
    for cache, chain in _reads(attention):
        yield f"{cache.role} read", cache.root, chain
        written = "rows" if cache.kind == "fresh" else "write"
        yield (
            f"{cache.role} {written}",
            cache.root,
            [node for write in cache.writes for node in (*write.own, write.node)],
        )
        yield f"{cache.role} cache", cache.root, [cache.base]
        yield f"{cache.role} write back", cache.root, [cache.write_back] if cache.write_back is not None else []


def _operands(marker: Node) -> Iterator[tuple[str, Node, Sequence[Node]]]:
    """(name of the role, origin of the operand, nodes) for the operands of a site whose caches were not proven."""
    call = Marker.of(marker)
    for role, operand in (("key", call.key), ("value", call.value)):
        root, chain = view_chain(operand, frozenset())
        yield f"{role} read", root, chain
        yield f"{role} source", root, [root]


def _packed_name(node: Node, cache: Cache) -> str:
    if node.op == "placeholder":
        return f"packed {cache.role} cache"
    mutates = (schema := schema_of(node.target)) is not None and schema.is_mutable
    return f"{cache.role} write back" if mutates else f"{cache.role} store"
