"""Refuse caches whose tokens the ranks of a group cannot split, and caches that were split for another group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.calling import PackedInput
from kvcompile.passes.prove.cache import Cache
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.refusal import Reason, Refusal


def check_shards(
    candidates: Sequence[Candidate],
    shard: ContextShard | None,
    packed_nodes: Mapping[Node, PackedInput],
    parts: Collection[Node],
) -> None:
    """Refuse each site with a cache that does not suit ``shard``.

    Args:
        candidates: the sites, with the layouts of their caches.
        shard: the tokens that this process keeps; None without context parallelism.
        packed_nodes: the placeholders whose caller passes a packed cache.
        parts: the placeholders that are parts of a larger tensor of the caller.
    """
    for candidate in candidates:
        try:
            for cache in candidate.caches if candidate.accepted else ():
                _check(cache, candidate.layouts[cache.role], shard, packed_nodes.get(cache.base), parts)
        except Refusal as refusal:
            candidate.site.refuse(refusal)


def _check(
    cache: Cache,
    layout: PackedLayout,
    shard: ContextShard | None,
    packed: PackedInput | None,
    parts: Collection[Node],
) -> None:
    if packed is not None and packed.shard != shard:
        how = "whole" if packed.shard is None else f"as part {packed.shard.rank} of {packed.shard.size}"
        raise Refusal(Reason.packed_otherwise, role=cache.role, how=how)
    if shard is None:
        return
    detail = "it is a part of a larger tensor" if cache.base in parts else _why_not(cache, layout)
    if detail is not None:
        raise Refusal(Reason.not_split, role=cache.role, detail=detail)


def _why_not(cache: Cache, layout: PackedLayout) -> str | None:
    """Why ranks cannot split the tokens of a cache; None if they can."""
    if cache.kind == "functional":
        return "the model updates it out of place"
    if cache.kind not in ("static", "read-only"):
        return "it has no fixed size"
    if cache.is_pool:
        return "it is a pool of slots or blocks"
    if cache.computing:
        return "keys or values are computed from it"
    if cache.drops_tokens or any(change.moves or change.form == "cat" for change in cache.changes):
        return "its tokens move"
    return layout.why_not_split
