"""Stage B, on the functional ATen graph: the pipeline that packs every proven KV cache.

copies   what is copied over all of a cache is what it holds     (whole_copies)
splits   a part of a split that attention reads is a slice        (head_ranges)
find     prove the caches behind each marker, or say why not      (find_caches, trace_read, match_write)
choose   ask the policy for formats and check that they fit       (here)
settle   a cache is packed only if all its readers are            (here)
rewrite  placeholders, stores, attention, outputs                 (rewrite_caches, insert_ops)
expand   give the remaining markers back to Inductor              (expand_markers)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import GraphModule, Node

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.calling import PackedInput, Rewritten
from kvcompile.passes.canonical.drop_whole_copies import drop_whole_copies
from kvcompile.passes.canonical.slice_splits import slice_splits
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.modules import layer_index
from kvcompile.passes.graph.names import name_inputs
from kvcompile.passes.marker import Marker, expand_markers, markers_of
from kvcompile.passes.notes.sites import SiteParts
from kvcompile.passes.prove.cache import Attention, AttentionOnLatents, Cache
from kvcompile.passes.prove.find import CacheFinder
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.rewrite.caches import CacheRewriter
from kvcompile.passes.rewrite.expand_pools import expand_pools
from kvcompile.passes.rewrite.merge_stores import has_stores, merge_stores
from kvcompile.passes.site import CacheSummary, FormatPair, Site

ChooseFormats = Callable[[str, int | None, int], FormatPair | None]
"""(module, layer, number of layers) -> formats, or None to leave the layer alone."""


@dataclass
class _Candidate:
    site: Site
    attention: Attention | AttentionOnLatents | None = None
    layouts: dict[str, PackedLayout] = field(default_factory=dict)


def quantize_kv_cache(
    gm: GraphModule,
    example_inputs: list[Any],
    choose_formats: ChooseFormats,
    packed_inputs: Mapping[int, PackedInput],
    source_names: Mapping[int, str],
    on_analysed: Callable[[GraphModule, list[Site]], None] = lambda gm, sites: None,
    held_inputs: Collection[int] = (),
) -> tuple[list[Site], Rewritten | None]:
    """Rewrite ``gm`` in place.

    Args:
        gm: functional ATen graph with markers ``kvcompile::sdpa``.
        example_inputs: its fake inputs.
        choose_formats: the policy.
        packed_inputs: the inputs, by position, whose caller passes packed caches.
        source_names: what the user calls each input.
        on_analysed: shown the graph when every site is decided and nothing is rewritten; its nodes have their parts.
        held_inputs: the plain inputs, by position, that may be packed although the graph does not write them.

    Returns:
        one Site for every marker, and the caller's duties; None if nothing was rewritten (``gm`` then means the same).
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    packed_nodes = {placeholders[index]: packed for index, packed in packed_inputs.items()}
    held_nodes = frozenset(placeholders[index] for index in held_inputs)
    sources = {placeholders[index]: name for index, name in source_names.items()}
    name_inputs(sources)
    drop_whole_copies(gm.graph)
    slice_splits(gm.graph)
    candidates = _find(CacheFinder(gm.graph, packed_nodes, held_nodes), gm)
    _choose(candidates, choose_formats, packed_nodes)
    _settle(candidates)
    sites = [candidate.site for candidate in candidates]
    parts = SiteParts(sites, [candidate.attention for candidate in candidates])
    parts.note_logical(gm)
    on_analysed(gm, sites)
    accepted = [candidate for candidate in candidates if candidate.site.rewritten]
    if not accepted:
        return sites, None

    rewriter = CacheRewriter(gm, example_inputs)
    layouts: dict[Node, tuple[Cache, PackedLayout]] = {}
    for candidate in accepted:
        for cache in _caches(candidate):
            layouts.setdefault(cache.root, (cache, candidate.layouts[cache.role]))
        candidate.site.caches = tuple(_summary(cache, layouts[cache.root][1], sources) for cache in _caches(candidate))
    for cache, layout in layouts.values():
        with parts.storing(gm, cache):
            rewriter.rewrite_cache(cache, layout)
    for candidate in accepted:
        attention = candidate.attention
        assert attention is not None, "an accepted site has its caches proven"
        if isinstance(attention, AttentionOnLatents):
            continue  # it stays as the model wrote it, on what is computed from dequantized latents
        with parts.attending(gm, candidate.site):
            rewriter.rewrite_attention(attention, layouts[attention.key.root][1], layouts[attention.value.root][1])
    rewriter.erase_logical([cache for cache, _ in layouts.values()])
    expand_markers(gm.graph)
    expand_pools(gm.graph)
    if has_stores(gm.graph):
        gm.graph = fx_graph_cse(gm.graph)  # keys and values go to the same positions, which each write has normalised
        merge_stores(gm.graph)
    return sites, rewriter.finish(gm)


def sites_of(gm: GraphModule) -> list[Site]:
    """A Site for every marker of a graph, nothing decided."""
    markers = [Marker.of(node) for node in markers_of(gm.graph)]
    modules = [marker.module for marker in markers]
    layers = [layer_index(module) for module in modules]
    if all(layer is None for layer in layers):
        layers = list(range(len(markers)))
    return [
        Site(module, layer, marker.describe()) for module, layer, marker in zip(modules, layers, markers, strict=True)
    ]


def num_layers(sites: list[Site]) -> int:
    """How many layers the sites of one graph come from."""
    return 1 + max((site.layer or 0 for site in sites), default=0)


def refuse(site: Site, refusal: Refusal) -> None:
    site.reason, site.reason_code = str(refusal), refusal.reason.name


def _find(finder: CacheFinder, gm: GraphModule) -> list[_Candidate]:
    candidates = [_Candidate(site) for site in sites_of(gm)]
    for candidate, marker in zip(candidates, markers_of(gm.graph), strict=True):
        try:
            _prove(finder, marker, candidate)
        except Refusal as refusal:
            refuse(candidate.site, refusal)
    for candidate in candidates:
        if not candidate.site.rewritten:
            continue
        try:
            for cache in _caches(candidate):
                finder.check_reads(cache)
        except Refusal as refusal:
            refuse(candidate.site, refusal)
    return candidates


def _prove(finder: CacheFinder, marker: Node, candidate: _Candidate) -> None:
    """Prove the caches of a site, and that attention on them can be packed; raises Refusal."""
    call = Marker.of(marker)
    try:
        _check_shapes(call)
        candidate.attention = finder.attention(marker)
    except Refusal as refusal:
        if call.unsupported is None or refusal.reason is Reason.no_cache:
            raise
    _check_call(call)
    if isinstance(candidate.attention, AttentionOnLatents):
        candidate.site.attention += ", computed from latents"


def _check_call(marker: Marker) -> None:
    if marker.unsupported is not None:
        raise Refusal(Reason.unrecognised, detail=marker.unsupported)
    if marker.dropout_p:
        raise Refusal(Reason.dropout, p=marker.dropout_p)


def _check_shapes(marker: Marker) -> None:
    if marker.mask is not None and (len(shape_of(marker.mask)) > 4 or len(shape_of(marker.query)) != 4):
        shapes = {"mask": list(shape_of(marker.mask)), "query": list(shape_of(marker.query))}
        raise Refusal(Reason.unknown_mask, **shapes)


def _choose(
    candidates: list[_Candidate], choose_formats: ChooseFormats, packed_nodes: Mapping[Node, PackedInput]
) -> None:
    layers = num_layers([candidate.site for candidate in candidates])
    for candidate in candidates:
        if not candidate.site.rewritten:
            continue
        try:
            formats = choose_formats(candidate.site.module, candidate.site.layer, layers)
            candidate.layouts = {
                cache.role: _layout(cache, formats, packed_nodes.get(cache.base)) for cache in _caches(candidate)
            }
            for cache in _caches(candidate):
                _check_shared(cache, candidate.layouts[cache.role])
                _check_moves(cache, candidate.layouts[cache.role])
        except Refusal as refusal:
            refuse(candidate.site, refusal)


def _layout(cache: Cache, formats: FormatPair | None, packed: PackedInput | None) -> PackedLayout:
    """The layout that the policy gives to a cache; one that is packed already keeps its own."""
    if packed is not None:
        if not packed.is_cache:
            raise Refusal(Reason.unknown_read, role=cache.role, op="a view of packed data")
        if packed.layout.role != cache.role:
            raise Refusal(Reason.unknown_read, role=cache.role, op=f"bytes packed as a {packed.layout.role}")
        if packed.axes != cache.input_axes:
            detail = f"bytes packed in the order {packed.axes}, not {cache.input_axes}"
            raise Refusal(Reason.unknown_read, role=cache.role, op=detail)
        if packed.growing and cache.kind == "static":
            raise Refusal(Reason.growing_written, role=cache.role)
        return packed.layout
    if formats is None:
        raise Refusal(Reason.policy_auto)
    if cache.serves_both and formats.key != formats.value:
        detail = f"the policy gives it two formats, {formats.key} and {formats.value}"
        raise Refusal(Reason.shared_key_value, detail=detail)
    layout = formats.layout(cache.role, cache.head_dim, cache.dtype)
    unsupported = layout.unsupported(cache.dtype)
    if unsupported is not None:
        raise Refusal(Reason.unsupported_format, format=layout.format_name, detail=unsupported)
    return layout


def _check_shared(cache: Cache, layout: PackedLayout) -> None:
    """Raise Refusal if attention cannot read a cache of this layout as it does."""
    on_gpu = cache.root.meta["val"].device.type == "cuda"
    holds_latents = cache.serves_both or cache.computing
    if on_gpu and not layout.format.has_levels and not (holds_latents and layout.residual is None):
        detail = "on a GPU it is for latents that serve as keys and values, none of them kept as they are"
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    if cache.serves_both and cache.is_pool:
        raise Refusal(Reason.shared_key_value, detail="sequences share it as a pool of slots")
    if cache.serves_both and layout.format.granularity == "channel":
        raise Refusal(Reason.shared_key_value, detail=f"the scales of {layout.format_name} are those of key channels")


def _check_moves(cache: Cache, layout: PackedLayout) -> None:
    """Raise Refusal if the graph moves tokens that share their bytes with others."""
    if layout.residual is not None and any(change.moves for change in cache.changes):
        detail = "the model moves tokens within its window, and this format keeps or scales some of them together"
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)
    if layout.residual is not None and cache.is_pool:
        detail = (
            "sequences share a pool of slots, and this format keeps or scales tokens of neighbouring slots together; "
            "use one whose scales are per token, without residual_length and sink_tokens"
        )
        raise Refusal(Reason.unsupported_format, format=layout.description, detail=detail)


def _settle(candidates: list[_Candidate]) -> None:
    """Refuse every site that shares a cache with a refused one, until nothing changes."""
    changed = True
    while changed:
        changed = False
        lost = {
            cache.root: candidate.site
            for candidate in candidates
            if not candidate.site.rewritten
            for cache in _caches(candidate)
        }
        for candidate in candidates:
            if not candidate.site.rewritten:
                continue
            for cache in _caches(candidate):
                if cache.root in lost:
                    partner = lost[cache.root]
                    name = partner.module or "without a module"
                    refusal = Refusal(Reason.partner_refused, role=cache.role, site=name, detail=partner.reason)
                    refuse(candidate.site, refusal)
                    changed = True
                    break


def _caches(candidate: _Candidate) -> tuple[Cache, ...]:
    return candidate.attention.caches if candidate.attention is not None else ()


def _summary(cache: Cache, layout: PackedLayout, sources: Mapping[Node, str]) -> CacheSummary:
    return CacheSummary(
        role=cache.role,
        kind=cache.kind,
        write_form=cache.write_form,
        source=sources.get(cache.base, cache.root.name),
        shape=tuple(size if isinstance(size, int) else str(size) for size in cache.input_shape),
        dtype=str(cache.dtype).removeprefix("torch."),
        format=layout.description,
        bytes_per_token_before=cache.head_dim * cache.dtype.itemsize,
        bytes_per_token_after=layout.bytes_per_token,
        residual_bytes=layout.residual_bytes,
    )
