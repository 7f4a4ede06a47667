"""Stage B, on the functional ATen graph: every pass, in order.

:data:`PIPELINE` is the whole of what happens to a graph between AOTAutograd and Inductor. Each pass relies on what the
passes before it keep; docs/passes.md is made from this list. :func:`run` carries it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch._dynamo.utils import dynamo_timed
from torch._functorch.compile_utils import fx_graph_cse

from kvcompile.kernels.layout.axes import RANK_3_AXES, rank_4_axes
from kvcompile.passes.calling import GraphInput, with_parts_of_stacks
from kvcompile.passes.canonical.drop_returned_inputs import drop_returned_inputs
from kvcompile.passes.canonical.drop_whole_copies import drop_whole_copies
from kvcompile.passes.canonical.normalise_dims import normalise_dims
from kvcompile.passes.canonical.slice_splits import slice_splits
from kvcompile.passes.canonical.widen_rank_3 import widen_rank_3_caches
from kvcompile.passes.graph.names import name_inputs
from kvcompile.passes.marker import Marker, expand_markers
from kvcompile.passes.notes.sites import SiteNotes
from kvcompile.passes.notes.surroundings import SiteView, neighbourhoods
from kvcompile.passes.packing import Packing
from kvcompile.passes.pools.page import page_pools
from kvcompile.passes.prove.cache import AttentionOnLatents
from kvcompile.passes.prove.find import CacheFinder
from kvcompile.passes.prove.formats import choose_formats
from kvcompile.passes.prove.settle import settle_sites
from kvcompile.passes.prove.sites import prove_sites
from kvcompile.passes.rewrite.caches import CacheRewriter
from kvcompile.passes.rewrite.expand_pools import expand_pools
from kvcompile.passes.rewrite.make_replayable import can_replay, make_replayable
from kvcompile.passes.rewrite.merge_stores import has_stores, merge_stores
from kvcompile.passes.rewrite.sites import layouts_of, summarise_caches
from kvcompile.passes.stacks.split import contiguous_parts, split_stacks


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    Attributes:
        name: a verb and its object; also the name of its time and of its graph in a dump.
        run: carries it out.
        relies_on: what must hold before.
        keeps: what holds afterwards, for all passes behind it.
    """

    name: str
    run: Callable[[Packing], None]
    relies_on: str
    keeps: str


def run(packing: Packing) -> Iterator[Pass]:
    """Carry out the pipeline on ``packing``; yields each pass after it ran, with the graph as it left it.

    Ends after ``note_sites`` if no site is accepted; the graph then means what it meant before.
    """
    for step in PIPELINE:
        begin = time.perf_counter()
        with dynamo_timed(f"kvquant_{step.name}"):
            step.run(packing)
        packing.seconds[step.name] = time.perf_counter() - begin
        yield step
        if step is DECIDED and not packing.accepted:
            return


# Before analysis: fewer forms


def _remove_dead_code(packing: Packing) -> None:
    packing.gm.graph.eliminate_dead_code()


def _split_stacks(packing: Packing) -> None:
    arriving = {index: known.stack for index, known in enumerate(packing.inputs)}
    packing.packed_stacks = {index: stack.dims for index, stack in arriving.items() if stack is not None}
    packing.stacks = split_stacks(packing.gm, packing.example_inputs, packing.packed_stacks)
    packing.inputs = with_parts_of_stacks(packing.inputs, packing.stacks)


def _page_pools(packing: Packing) -> None:
    packed = {index: known.packed for index, known in enumerate(packing.inputs)}
    page_pools(
        packing.gm,
        {index: known.heads_first for index, known in packed.items() if known is not None and known.is_pool_of_blocks},
    )


def _widen_rank_3(packing: Packing) -> None:
    packing.widened = widen_rank_3_caches(packing.gm.graph)
    packing.inputs = [
        _widened(known) if index in packing.widened.inputs else known for index, known in enumerate(packing.inputs)
    ]


def _widened(known: GraphInput) -> GraphInput:
    """An input that was given a fourth dimension; passes may use a packed cache there if it lacks just that one."""
    if known.packed is None or known.packed.axes not in RANK_3_AXES:
        return replace(known, packed=None)
    return replace(known, packed=replace(known.packed, axes=rank_4_axes(known.packed.axes)))


# Analysis: nothing is changed


def _find_caches(packing: Packing) -> None:
    inputs = zip(packing.placeholders, packing.inputs, strict=True)
    persistent = frozenset(node for node, known in inputs if known.is_persistent)
    packing.candidates = prove_sites(packing.gm, CacheFinder(packing.gm.graph, packing.packed_nodes(), persistent))


def _note_sites(packing: Packing) -> None:
    packing.notes = SiteNotes(packing.sites, [candidate.attention for candidate in packing.candidates])
    packing.notes.note_logical(packing.gm)
    packing.views = [SiteView(before) for before in neighbourhoods(packing.gm.graph, len(packing.sites))]


# The rewrite


def _pack_caches(packing: Packing) -> None:
    packing.layouts = layouts_of(packing.accepted)
    summarise_caches(packing.accepted, packing.layouts, packing.sources())
    packing.rewriter = CacheRewriter(packing.gm, packing.example_inputs)
    assert packing.notes is not None
    for cache, layout in packing.layouts.values():
        with packing.notes.storing(packing.gm, cache):
            packing.rewriter.rewrite_cache(cache, layout)


def _fuse_attention(packing: Packing) -> None:
    assert packing.rewriter is not None
    assert packing.notes is not None
    for candidate in packing.accepted:
        attention = candidate.attention
        assert attention is not None, "an accepted site has its caches proven"
        if isinstance(attention, AttentionOnLatents):
            continue  # it stays as the model wrote it, on what is computed from dequantized latents
        packing.reduces_masks |= Marker.of(attention.marker).hidden_rows_are_nan
        key, value = (packing.layouts[cache.root][1] for cache in (attention.key, attention.value))
        with packing.notes.attending(packing.gm, candidate.site):
            packing.rewriter.rewrite_attention(attention, key, value)


def _erase_logical_caches(packing: Packing) -> None:
    assert packing.rewriter is not None
    packing.rewriter.erase_logical([cache for cache, _ in packing.layouts.values()])


def _share_values(packing: Packing) -> None:
    """Keys and values go to the same positions, which each write has normalised; layers may share a mask."""
    if has_stores(packing.gm.graph) or packing.reduces_masks:
        packing.gm.graph = fx_graph_cse(packing.gm.graph)


def _merge_stores(packing: Packing) -> None:
    merge_stores(packing.gm.graph)
    assert packing.rewriter is not None
    packing.rewritten = replace(packing.rewriter.finish(packing.gm), stacks=packing.stacks)


def _restore_rank_3(packing: Packing) -> None:
    assert packing.rewritten is not None
    packing.rewritten = packing.widened.restore(packing.gm, packing.rewritten)


def _lay_out_parts(packing: Packing) -> None:
    assert packing.rewritten is not None
    contiguous_parts(packing.gm, packing.rewritten, packing.packed_stacks)


def _note_rewritten(packing: Packing) -> None:
    after = neighbourhoods(packing.gm.graph, len(packing.sites))
    packing.views = [
        SiteView(view.before, packed if site.rewritten else None)
        for site, view, packed in zip(packing.sites, packing.views, after, strict=True)
    ]


def _make_replayable(packing: Packing) -> None:
    assert packing.rewritten is not None
    packing.cudagraphs = packing.cudagraphs and can_replay(packing.gm, packing.rewritten)
    if packing.cudagraphs and packing.rewritten.on_cuda:
        static = [index for index, known in enumerate(packing.inputs) if known.is_static]
        packing.rewritten = make_replayable(packing.gm, packing.rewritten, static)


DECIDED = Pass(
    "note_sites",
    _note_sites,
    "Every site is decided.",
    "Each node of a logical cache says which sites it serves. Nothing that is compiled depends on it.",
)
"""After this pass a graph without an accepted site leaves the pipeline."""

PIPELINE = (
    Pass(
        "remove_dead_code",
        _remove_dead_code,
        "AOTAutograd has functionalised the graph: only the copies at its end mutate inputs.",
        "Every node has a user, is an output or mutates an input, so that every use of a cache counts.",
    ),
    Pass(
        "drop_returned_inputs",
        lambda packing: drop_returned_inputs(packing.gm.graph),
        "AOTAutograd returns the caller's own tensor where the graph returns an input that it has written.",
        "No output is the copy back into an input.",
    ),
    Pass(
        "normalise_dims",
        lambda packing: normalise_dims(packing.gm.graph),
        "Operators keep PyTorch's meaning of negative dimensions.",
        "Dimensions of views and writes are counted from the first.",
    ),
    Pass(
        "split_stacks",
        _split_stacks,
        "Dimensions are counted from the first.",
        "No input that attention reads holds several caches; positions of inputs are those after splitting.",
    ),
    Pass(
        "page_pools",
        _page_pools,
        "No input that attention reads holds several caches.",
        "A pool of slots or blocks is a cache of one sequence, read by an index of slots.",
    ),
    Pass(
        "widen_rank_3",
        _widen_rank_3,
        "Pools are caches of rank 4.",
        "Every cache that attention reads has four dimensions.",
    ),
    Pass(
        "name_inputs",
        lambda packing: name_inputs(packing.sources()),
        "Positions of inputs do not change any more.",
        "A reason calls an input what the user calls it.",
    ),
    Pass(
        "drop_whole_copies",
        lambda packing: drop_whole_copies(packing.gm.graph),
        "Every cache has four dimensions.",
        "A copy over all of an input is the value that is copied, unless that is a view of an input.",
    ),
    Pass(
        "slice_splits",
        lambda packing: slice_splits(packing.gm.graph),
        "Every cache has four dimensions.",
        "Attention reads slices of heads or tokens, never a part of a split.",
    ),
    Pass(
        "find_caches",
        _find_caches,
        "All of the above.",
        "Each use of the caches of an accepted site is a known write, a known read, or the copy back. The graph is "
        "unchanged.",
    ),
    Pass(
        "choose_formats",
        lambda packing: choose_formats(packing.candidates, packing.policy, packing.packed_nodes()),
        "The caches of accepted sites are proven.",
        "Each of these caches has a layout that can hold it. The graph is unchanged.",
    ),
    Pass(
        "settle_sites",
        lambda packing: settle_sites(packing.candidates),
        "Every refusal of a site by itself is known.",
        "A cache is read by accepted sites only, or by refused ones only. The graph is unchanged.",
    ),
    DECIDED,
    Pass(
        "pack_caches",
        _pack_caches,
        "Sites are settled, and at least one is accepted.",
        "Packed placeholders stand beside logical ones; every write of an accepted cache is a store.",
    ),
    Pass(
        "fuse_attention",
        _fuse_attention,
        "Stores stand where the logical writes stand.",
        "Attention of accepted sites reads packed data, after every store that it has to see.",
    ),
    Pass(
        "erase_logical_caches",
        _erase_logical_caches,
        "Nothing that is left reads a logical cache of an accepted site.",
        "Each packed placeholder stands alone in the place of the logical one.",
    ),
    Pass(
        "expand_markers",
        lambda packing: expand_markers(packing.gm.graph),
        "Markers of accepted sites are gone.",
        "Refused attention is what the model wrote.",
    ),
    Pass(
        "expand_pools",
        lambda packing: expand_pools(packing.gm.graph),
        "Pools of accepted sites are packed.",
        "No operator of stage B alone is left: refused pools are indexed as the model wrote it.",
    ),
    Pass(
        "share_values",
        _share_values,
        "All nodes of the rewrite are inserted.",
        "Stores to the same positions take the same node, and layers with one mask reduce it once.",
    ),
    Pass(
        "merge_stores",
        _merge_stores,
        "Stores to the same positions take the same node.",
        "Each such pair is one operator. What the caller has to do is known.",
    ),
    Pass(
        "restore_rank_3",
        _restore_rank_3,
        "What the caller has to do is known.",
        "Inputs and outputs that are not packed have the rank that the caller gives them.",
    ),
    Pass(
        "lay_out_parts",
        _lay_out_parts,
        "The kinds of all packed inputs are known.",
        "A plain part beside packed ones has the strides that adoption gives it.",
    ),
    Pass(
        "note_rewritten",
        _note_rewritten,
        "The graph means what it will mean.",
        "The report can draw each rewritten site.",
    ),
    Pass(
        "make_replayable",
        _make_replayable,
        "Nothing else changes the graph.",
        "Under CUDA graphs a recording serves any caches of the same shapes: they are passed by reference, and other "
        "mutated inputs by value.",
    ),
)
