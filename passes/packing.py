"""One functional graph on its way through the passes, and the state that the passes share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.calling import GraphInput, PackedInput, Rewritten, SplitStack, StackInput
from kvcompile.passes.canonical.divide_last import Divided
from kvcompile.passes.notes.sites import SiteNotes
from kvcompile.passes.notes.surroundings import SiteSurroundings
from kvcompile.passes.prove.cache import Cache
from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.prove.formats import ChooseFormats
from kvcompile.passes.refusal import Refusal
from kvcompile.passes.rewrite.caches import CacheRewriter
from kvcompile.passes.rewrite.merge_projections import MayBeAdjacent
from kvcompile.passes.site import Site


@dataclass
class Packing:
    """The state that the passes of :mod:`kvcompile.passes.pipeline` share.

    Attributes:
        gm: functional ATen graph with markers ``kvcompile::sdpa``; passes change it in place.
        example_inputs: its fake inputs, in the order of its placeholders.
        inputs: the caller's record of each input, in the same order.
        policy: chooses the formats of each layer.
        cudagraphs: whether Inductor is asked to record the graph as a CUDA graph.
        shard: the tokens of every cache that this process keeps; None if it keeps all.
        exact_prompts: whether attention to the new tokens of a prompt is exact.
        own_outputs: the outputs that share no memory with an input in the model, by position.
        refused: the sites that a check of an earlier rewrite refuses, by position.
        may_be_adjacent: whether the caller can keep some inputs adjacent; None if projections are not merged.
        packed_stacks: the inputs that arrive as packed stacks.
        stacks: the inputs that were split into their parts.
        divided: the inputs and outputs whose heads got a separate dimension.
        candidates: the sites, in the order of the graph, with their proven caches.
        unpacked: the packed inputs of Dynamo's graph whose tokens it moves although their formats cannot, by position.
        notes: the role of each node, and its site.
        surroundings: the nodes around each site, before and after the rewrite.
        rewriter: rewrites caches and attention; None until a site is accepted.
        layouts: each packed cache and its layout, by the node of the cache's last state.
        reduces_masks: whether the rewrite looks for rows of a mask that hide every key.
        rewritten: the caller's duties; None until the graph is rewritten.
        seconds: the time of every pass that ran, in seconds, by name.
    """

    gm: GraphModule
    example_inputs: list[Any]
    inputs: Sequence[GraphInput]
    policy: ChooseFormats
    cudagraphs: bool = False
    shard: ContextShard | None = None
    exact_prompts: bool = False
    own_outputs: frozenset[int] = frozenset()
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    may_be_adjacent: MayBeAdjacent | None = None
    packed_stacks: Mapping[int, StackInput] = field(default_factory=dict)
    stacks: tuple[SplitStack, ...] = ()
    divided: Divided = field(default_factory=Divided)
    candidates: list[Candidate] = field(default_factory=list)
    unpacked: tuple[int, ...] = ()
    notes: SiteNotes | None = None
    surroundings: list[SiteSurroundings] = field(default_factory=list)
    rewriter: CacheRewriter | None = None
    layouts: dict[Node, tuple[Cache, PackedLayout]] = field(default_factory=dict)
    reduces_masks: bool = False
    rewritten: Rewritten | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def sites(self) -> list[Site]:
        """A Site for every marker of the graph."""
        return [candidate.site for candidate in self.candidates]

    @property
    def accepted(self) -> list[Candidate]:
        """The candidates that are packed."""
        return [candidate for candidate in self.candidates if candidate.accepted]

    @property
    def placeholders(self) -> list[Node]:
        """The inputs of the graph."""
        return list(self.gm.graph.find_nodes(op="placeholder"))

    def packed_nodes(self) -> dict[Node, PackedInput]:
        """The placeholders whose caller passes a packed cache."""
        inputs = zip(self.placeholders, self.inputs, strict=True)
        return {node: known.packed for node, known in inputs if known.packed is not None}

    def sources(self) -> dict[Node, str]:
        """The user's name of each placeholder."""
        return {node: known.source for node, known in zip(self.placeholders, self.inputs, strict=True)}
