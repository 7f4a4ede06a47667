"""The passes that pack a functional ATen graph, in order.

:data:`PIPELINE` lists all changes of a graph between AOTAutograd and Inductor. Each pass relies on the conditions that
earlier passes keep. :func:`run` runs the passes; docs/passes.md shows the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvcompile.compat.inductor import fx_graph_cse
from kvcompile.compat.observing import dynamo_timed
from kvcompile.kernels.layout.axes import divided_axes
from kvcompile.passes.calling import with_parts_of_stacks
from kvcompile.passes.canonical.copy_returned_views import copy_returned_views
from kvcompile.passes.canonical.divide_heads import divide_heads, with_merged_axes
from kvcompile.passes.canonical.divide_last import merge_last
from kvcompile.passes.canonical.divide_ranges import divide_ranges
from kvcompile.passes.canonical.drop_offset_checks import drop_offset_checks
from kvcompile.passes.canonical.drop_returned_inputs import drop_returned_inputs
from kvcompile.passes.canonical.drop_whole_copies import drop_whole_copies
from kvcompile.passes.canonical.grow_whole_caches import grow_whole_caches
from kvcompile.passes.canonical.join_equal_writes import join_equal_writes
from kvcompile.passes.canonical.read_written_tokens import read_written_tokens
from kvcompile.passes.canonical.select_only_index import select_only_index
from kvcompile.passes.graph.names import name_inputs
from kvcompile.passes.marker import Marker, expand_markers
from kvcompile.passes.notes.sites import SiteNotes
from kvcompile.passes.notes.surroundings import SiteSurroundings, calls_of_sites, surroundings_of_sites
from kvcompile.passes.packing import Packing
from kvcompile.passes.pools.page import page_pools
from kvcompile.passes.prove.cache import ComputedAttention
from kvcompile.passes.prove.check_divided_heads import check_divided_heads
from kvcompile.passes.prove.check_shards import check_shards
from kvcompile.passes.prove.find import CacheFinder
from kvcompile.passes.prove.formats import choose_formats, packed_but_moved
from kvcompile.passes.prove.fuse_computed import layouts_of_operands
from kvcompile.passes.prove.settle import settle_sites
from kvcompile.passes.prove.sites import prove_sites
from kvcompile.passes.rewrite.caches import CacheRewriter
from kvcompile.passes.rewrite.expand_pools import expand_pools
from kvcompile.passes.rewrite.make_replayable import can_replay, make_replayable
from kvcompile.passes.rewrite.merge_counters import merge_counters
from kvcompile.passes.rewrite.merge_projections import merge_projections
from kvcompile.passes.rewrite.merge_stores import has_stores, merge_stores
from kvcompile.passes.rewrite.sites import layouts_of, summarise_caches
from kvcompile.passes.stacks.split import contiguous_parts, split_stacks


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    Attributes:
        name: a verb and its object. The time of the pass and its graph in a dump carry this name.
        run: the function that changes the state.
        relies_on: what must hold before the pass.
        keeps: what holds after the pass, for all later passes.
    """

    name: str
    run: Callable[[Packing], None]
    relies_on: str
    keeps: str


def run(packing: Packing) -> Iterator[Pass]:
    """Run the pipeline on ``packing``; yields each pass right after it ran.

    The pipeline ends after ``note_sites`` if no site is accepted. The meaning of the graph is then unchanged.
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
    graph = packing.gm.graph
    arriving = {index: known.stack for index, known in enumerate(packing.inputs)}
    packing.packed_stacks = {index: stack for index, stack in arriving.items() if stack is not None}
    divided = divide_ranges(graph)
    packing.stacks = split_stacks(packing.gm, packing.example_inputs, packing.packed_stacks, divided.inputs)
    packing.inputs = with_parts_of_stacks(packing.inputs, packing.stacks)
    merge_last(graph, divided)  # the stacks that were not split


def _divide_heads(packing: Packing) -> None:
    if packing.shard is not None:
        return  # ranks split caches that have a dimension of heads
    packing.divided = divide_heads(packing.gm.graph)
    packing.inputs = [
        replace(known, packed=replace(known.packed, axes=divided_axes(known.packed.axes)))
        if place in packing.divided.indices and known.packed is not None
        else known
        for place, known in enumerate(packing.inputs)
    ]


# Analysis: nothing is changed


def _find_caches(packing: Packing) -> None:
    inputs = zip(packing.placeholders, packing.inputs, strict=True)
    persistent = frozenset(node for node, known in inputs if known.is_persistent)
    packing.candidates = prove_sites(packing.gm, CacheFinder(packing.gm.graph, packing.packed_nodes(), persistent))
    for place, refusal in packing.refused.items():
        packing.candidates[place].site.refuse(refusal)
    check_divided_heads(packing.candidates, packing.divided)


def _choose_formats(packing: Packing) -> None:
    packed = packing.packed_nodes()
    choose_formats(packing.candidates, packing.policy, packed)
    unpacked = packed_but_moved(packing.candidates, packed)
    inputs = zip(packing.placeholders, packing.inputs, strict=True)
    found = (known.dynamo_index for node, known in inputs if node in unpacked)
    packing.unpacked = tuple(index for index in found if index is not None)


def _check_shards(packing: Packing) -> None:
    placeholders = packing.placeholders
    parts = {placeholders[place] for stack in packing.stacks for place in stack.places.values()}
    check_shards(packing.candidates, packing.shard, packing.packed_nodes(), parts)


def _note_sites(packing: Packing) -> None:
    packing.notes = SiteNotes(packing.sites, [candidate.attention for candidate in packing.candidates])
    packing.notes.note_logical(packing.gm)
    packing.surroundings = [SiteSurroundings(before) for before in calls_of_sites(packing.gm.graph, len(packing.sites))]


# The rewrite


def _pack_caches(packing: Packing) -> None:
    packing.layouts = layouts_of(packing.accepted)
    summarise_caches(packing.accepted, packing.layouts, packing.sources())
    packing.rewriter = CacheRewriter(
        packing.gm, packing.example_inputs, packing.shard, exact_prompts=packing.exact_prompts
    )
    assert packing.notes is not None
    attentions = [one.attention for one in packing.accepted if one.attention is not None]
    dequantized = {cache.root for attention in attentions for cache in attention.dequantized}
    for cache, layout in packing.layouts.values():
        with packing.notes.storing(packing.gm, cache):
            packing.rewriter.rewrite_cache(cache, layout, dequantizes=cache.root in dequantized)


def _fuse_attention(packing: Packing) -> None:
    assert packing.rewriter is not None
    assert packing.notes is not None
    for candidate in packing.accepted:
        attention = candidate.attention
        assert attention is not None, "an accepted site has its caches proven"
        if isinstance(attention, ComputedAttention):
            continue  # it stays unchanged, and reads keys and values of dequantized caches
        packing.reduces_masks |= Marker.of(attention.marker).hidden_rows_are_nan
        key, value = layouts_of_operands(attention, candidate.layouts)
        with packing.notes.attending(packing.gm, candidate.site):
            packing.rewriter.rewrite_attention(attention, key, value)


def _erase_logical_caches(packing: Packing) -> None:
    assert packing.rewriter is not None
    packing.rewriter.erase_logical([cache for cache, _ in packing.layouts.values()])


def _share_values(packing: Packing) -> None:
    """Keys and values are stored at the same positions, and layers may share a mask: compute each value once."""
    if has_stores(packing.gm.graph) or packing.reduces_masks:
        packing.gm.graph = fx_graph_cse(packing.gm.graph)


def _merge_stores(packing: Packing) -> None:
    merge_stores(packing.gm.graph)
    assert packing.rewriter is not None
    rewritten = with_merged_axes(packing.rewriter.finish(packing.gm), packing.divided)
    packing.rewritten = replace(rewritten, stacks=packing.stacks)


def _lay_out_parts(packing: Packing) -> None:
    assert packing.rewritten is not None
    contiguous_parts(packing.gm, packing.rewritten, packing.packed_stacks)


def _merge_projections(packing: Packing) -> None:
    assert packing.rewritten is not None
    if packing.may_be_adjacent is not None:
        adjacent = merge_projections(packing.gm, packing.inputs, packing.may_be_adjacent)
        examples = list(packing.rewritten.example_inputs)
        for place in adjacent:
            examples[place] = packing.placeholders[place].meta["val"]
        packing.rewritten = replace(packing.rewritten, example_inputs=examples, adjacent=adjacent)


def _merge_counters(packing: Packing) -> None:
    assert packing.rewritten is not None
    if packing.rewritten.on_cuda:  # on a CPU no launch is saved
        merge_counters(packing.gm.graph)


def _note_rewritten(packing: Packing) -> None:
    after = surroundings_of_sites(packing.gm.graph, len(packing.sites))
    packing.surroundings = [
        SiteSurroundings(around.before, packed if site.rewritten else None)
        for site, around, packed in zip(packing.sites, packing.surroundings, after, strict=True)
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
    "Each node names the sites that it serves, for the report and the dump. Compiled code does not depend on it.",
)
"""A graph without an accepted site leaves the pipeline after this pass."""

PIPELINE = (
    Pass(
        "remove_dead_code",
        _remove_dead_code,
        "AOTAutograd has functionalised the graph: only the copies at its end mutate inputs.",
        "Every node is used, so that every use of a cache counts.",
    ),
    Pass(
        "drop_offset_checks",
        lambda packing: drop_offset_checks(packing.gm.graph),
        "Every node is used, so that every use of a cache counts.",
        "No node only checks where a view begins in memory.",
    ),
    Pass(
        "drop_returned_inputs",
        lambda packing: drop_returned_inputs(packing.gm.graph),
        "If the graph returns an input that it writes, AOTAutograd returns the caller's tensor.",
        "No output is a copy back into an input.",
    ),
    Pass(
        "copy_returned_views",
        lambda packing: copy_returned_views(packing.gm.graph, packing.own_outputs),
        "No output is a copy back into an input.",
        "An output that is a new tensor in the model is a value that the graph makes.",
    ),
    Pass(
        "join_equal_writes",
        lambda packing: join_equal_writes(packing.gm.graph),
        "The graph is functional. An output that is a new tensor in the model is a value that the graph makes.",
        "Equal writes of an input are one node, unless several of them leave the graph. Every node is used.",
    ),
    Pass(
        "read_written_tokens",
        lambda packing: read_written_tokens(packing.gm.graph),
        "Equal writes of an input are one node.",
        "Old tokens of a cache joined with new ones are a slice of the cache if the new ones are also written to it.",
    ),
    Pass(
        "grow_whole_caches",
        lambda packing: grow_whole_caches(packing.gm.graph),
        "Equal writes of an input are one node.",
        "A cache grows by one node, also where the model grows its parts or a view of it. Every node is used.",
    ),
    Pass(
        "split_stacks",
        _split_stacks,
        "No output is a copy back into an input.",
        "Each input that attention reads holds one cache: an index or a range of channels selects it. Apart from this "
        "split, the positions of the inputs are final.",
    ),
    Pass(
        "page_pools",
        lambda packing: page_pools(packing.gm, packing.packed_nodes()),
        "Each input that attention reads holds one cache.",
        "A paged pool is a cache of one sequence, which attention reads by an index of slots.",
    ),
    Pass(
        "divide_heads",
        _divide_heads,
        "Each input that attention reads holds one cache, and no pool is left to find.",
        "Heads and channels of a cache have a dimension each. An input or output whose shape was changed is noted.",
    ),
    Pass(
        "name_inputs",
        lambda packing: name_inputs(packing.sources()),
        "The positions of the inputs are final.",
        "A refusal names an input as the user's code does.",
    ),
    Pass(
        "drop_whole_copies",
        lambda packing: drop_whole_copies(packing.gm.graph),
        "Each input that attention reads holds one cache.",
        "A copy over a whole input is replaced by the copied value, unless that value is a view of an input.",
    ),
    Pass(
        "select_only_index",
        lambda packing: select_only_index(packing.gm.graph),
        "Heads and channels of a cache have a dimension each.",
        "A write through a view without a dimension of size 1 selects its only index.",
    ),
    Pass(
        "find_caches",
        _find_caches,
        "All earlier passes.",
        "Every use of an accepted site's caches is a known write, a known read, or the copy back. The graph is "
        "unchanged.",
    ),
    Pass(
        "choose_formats",
        _choose_formats,
        "The caches of accepted sites are proven.",
        "Every proven cache has a layout that can hold it. The graph is unchanged.",
    ),
    Pass(
        "check_shards",
        _check_shards,
        "Every proven cache has a layout.",
        "The ranks of a group can split every cache of an accepted site, or this process keeps it whole. The graph is "
        "unchanged.",
    ),
    Pass(
        "settle_sites",
        lambda packing: settle_sites(packing.candidates),
        "Each site has been judged alone.",
        "All sites that read one cache are accepted, or all are refused. The graph is unchanged.",
    ),
    DECIDED,
    Pass(
        "pack_caches",
        _pack_caches,
        "Sites are settled, and at least one is accepted.",
        "A packed placeholder stands beside each logical one. Every write of an accepted cache is a store.",
    ),
    Pass(
        "fuse_attention",
        _fuse_attention,
        "Each store stands at its logical write.",
        "Attention of accepted sites reads packed data, after every store that it must see.",
    ),
    Pass(
        "erase_logical_caches",
        _erase_logical_caches,
        "No remaining node reads a logical cache of an accepted site.",
        "The packed placeholder has replaced the logical one.",
    ),
    Pass(
        "merge_heads",
        lambda packing: merge_last(packing.gm.graph, packing.divided),
        "The packed placeholder has replaced the logical one.",
        "Plain inputs and outputs have the shapes that the caller knows.",
    ),
    Pass(
        "expand_markers",
        lambda packing: expand_markers(packing.gm.graph),
        "Markers of accepted sites are gone.",
        "Refused attention is the operator that the model called.",
    ),
    Pass(
        "expand_pools",
        lambda packing: expand_pools(packing.gm.graph),
        "Pools of accepted sites are packed.",
        "Refused pools are indexed as in the model. The graph holds no operator that only the passes know.",
    ),
    Pass(
        "share_values",
        _share_values,
        "The rewrite has inserted all its nodes.",
        "Stores to the same positions share one node. Layers with the same mask reduce it once.",
    ),
    Pass(
        "merge_stores",
        _merge_stores,
        "Stores to the same positions share one node.",
        "The stores of keys and values to the same positions are one operator. The caller's duties are known.",
    ),
    Pass(
        "lay_out_parts",
        _lay_out_parts,
        "The caller's duties are known.",
        "A plain part of a split stack has the strides that adoption gives it.",
    ),
    Pass(
        "merge_projections",
        _merge_projections,
        "The caller's duties are known.",
        "With the option merge_projections, small projections of the same activations are one product, whose weights "
        "the caller keeps adjacent in memory.",
    ),
    Pass(
        "merge_counters",
        _merge_counters,
        "The caller's duties are known.",
        "On a GPU, one operator increases the numbers of tokens of all layers, and no other node reads them.",
    ),
    Pass(
        "note_rewritten",
        _note_rewritten,
        "The meaning of the graph is final.",
        "The report can draw each rewritten site.",
    ),
    Pass(
        "make_replayable",
        _make_replayable,
        "Every other change of the graph is done.",
        "One CUDA graph serves all caches of the same shapes: caches are passed by reference, other mutated inputs "
        "in buffers.",
    ),
)
