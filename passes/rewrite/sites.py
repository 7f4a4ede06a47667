"""The packed caches of all accepted sites: their layouts, and their summaries for the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node

from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.prove.cache import Cache
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.site import CacheSummary

Layouts = dict[Node, tuple[Cache, PackedLayout]]
"""The packed caches and their layouts, by the last state of the cache."""


def layouts_of(candidates: Iterable[Candidate]) -> Layouts:
    """The caches of accepted candidates and their layouts. A cache with several readers appears once."""
    layouts: Layouts = {}
    for candidate in candidates:
        for cache in candidate.caches:
            layouts.setdefault(cache.root, (cache, candidate.layouts[cache.role]))
    return layouts


def summarise_caches(candidates: Iterable[Candidate], layouts: Layouts, sources: Mapping[Node, str]) -> None:
    """Note on every site how its caches are stored, for the report."""
    for candidate in candidates:
        candidate.site.caches = tuple(_summary(cache, layouts[cache.root][1], sources) for cache in candidate.caches)


def _summary(cache: Cache, layout: PackedLayout, sources: Mapping[Node, str]) -> CacheSummary:
    return CacheSummary(
        role=cache.role,
        kind=cache.kind,
        write_form=cache.write_form,
        source=sources.get(cache.base, cache.root.name),
        shape=tuple(size if isinstance(size, int) else str(size) for size in cache.input_shape),
        dtype=dtype_name(cache.dtype),
        format=layout.description,
        bytes_per_token_before=cache.head_dim * cache.dtype.itemsize,
        bytes_per_token_after=layout.bytes_per_token,
        residual_bytes=layout.residual_bytes,
    )
