"""Prove the caches of every site, or note why they cannot be packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.modules import sites_of
from kvcompile.passes.graph.names import with_graph_break
from kvcompile.passes.graph.sizes_from_data import has_unread_size
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.prove.cache import ComputedAttention
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.prove.find import CacheFinder
from kvcompile.passes.refusal import Reason, Refusal

_FROM_DATA = "a size of its query, keys, values or mask is only known from the data of a step"


def prove_sites(gm: GraphModule, finder: CacheFinder) -> list[Candidate]:
    """A candidate for every marker of ``gm``, with the caches that ``finder`` proves."""
    candidates = [Candidate(site) for site in sites_of(gm)]
    for candidate, marker in zip(candidates, markers_of(gm.graph), strict=True):
        with _refusals_noted(candidate, gm.graph):
            _prove(finder, marker, candidate)
    for candidate in candidates:
        if candidate.accepted:
            with _refusals_noted(candidate, gm.graph):
                for cache in candidate.caches:
                    finder.uses.check_reads(cache)
    return candidates


@contextlib.contextmanager
def _refusals_noted(candidate: Candidate, graph: Graph) -> Iterator[None]:
    """Refuse the site of ``candidate`` if the block raises a refusal, or needs a size that only data determine."""
    try:
        yield
    except Refusal as refusal:
        candidate.site.refuse(with_graph_break(refusal, graph))
    except GuardOnDataDependentSymNode:
        candidate.site.refuse(Refusal(Reason.unrecognised, detail=_FROM_DATA))


def _prove(finder: CacheFinder, marker: Node, candidate: Candidate) -> None:
    """Prove the caches of a site, and check that its attention can be computed on packed caches; raises Refusal."""
    call = Marker.of(marker)
    try:
        _check_shapes(call)
        candidate.attention = finder.attention(marker)
    except Refusal as refusal:
        if call.unsupported is None or refusal.reason is Reason.no_cache:
            raise
    _check_call(call)
    if isinstance(candidate.attention, ComputedAttention):
        candidate.site.attention += f", {candidate.attention.note}"


def _check_call(marker: Marker) -> None:
    if marker.unsupported is not None:
        raise Refusal(Reason.unrecognised, detail=marker.unsupported)
    if marker.dropout_p:
        raise Refusal(Reason.dropout, p=marker.dropout_p)


def _check_shapes(marker: Marker) -> None:
    if marker.mask is not None and (len(shape_of(marker.mask)) > 4 or len(shape_of(marker.query)) != 4):
        shapes = {"mask": list(shape_of(marker.mask)), "query": list(shape_of(marker.query))}
        raise Refusal(Reason.unknown_mask, **shapes)
    if has_unread_size(node for node in (marker.query, marker.mask) if node is not None):
        raise Refusal(Reason.unrecognised, detail=_FROM_DATA)
