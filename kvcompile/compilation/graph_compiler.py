"""Compiling one Dynamo graph, with packed caches where the passes prove them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from kvcompile.call.adjacent_parameters import why_not_adjacent
from kvcompile.call.adoption import may_unpack
from kvcompile.call.digest import digest_of
from kvcompile.call.inputs import graph_inputs
from kvcompile.call.key_outliers import KeyGuard
from kvcompile.call.packed_call import AdoptingCall, CallPlan, DequantizedInput
from kvcompile.call.packed_code import Outcome, PackedCode, receiving_outcomes, without_symbols
from kvcompile.call.plain_or_packed import admit_packed_caches, admit_unpacked_caches
from kvcompile.call.shards import LocalShards, explained_error
from kvcompile.call.stored_call import CallParts, StoredCall, StoredCode, check_storable, note_plain_caches
from kvcompile.call.unpacking_call import UnpackingCall
from kvcompile.compat.ahead_of_time import is_ahead_of_time, keeping_code
from kvcompile.compat.autograd_cache import CAN_STORE, storing_by_key, storing_own_code, without_autograd_cache
from kvcompile.compat.graphs import copied_graph
from kvcompile.compat.inductor import BoxedBool, can_call_subgraphs, compile_fx, compile_fx_inner, views_by_method
from kvcompile.compat.observing import dynamo_timed
from kvcompile.compat.symbols import binding_replaced_symbols
from kvcompile.compat.tracing import detect_fake_mode, forget_real_tensors
from kvcompile.compilation import plain
from kvcompile.compilation.control_flow import check_control_flow
from kvcompile.compilation.rewriter import GraphRewriter
from kvcompile.debugging.stages import GraphStages, Stage
from kvcompile.kernels.ops import IMPLEMENTATIONS
from kvcompile.kernels.precompile import precompile
from kvcompile.options import BackendOptions
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.parallel.agreement import Agreement
from kvcompile.parallel.context_parallel import check_agreement
from kvcompile.passes.calling import Rewritten, in_dynamo_order
from kvcompile.passes.graph.modules import sites_of
from kvcompile.passes.graph.names import source_name
from kvcompile.passes.graph.regions import expand_regions
from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.marker import add_digest
from kvcompile.passes.notes.calls import call_of
from kvcompile.passes.notes.surroundings import SiteSurroundings
from kvcompile.passes.packing import Packing
from kvcompile.passes.refusal import GiveUp, Reason, Refusal
from kvcompile.passes.rewrite.caches import is_mutated
from kvcompile.passes.site import Site, num_layers_in_graph
from kvcompile.report import report
from kvcompile.report.launch_hint import hint_at_cuda_graphs, is_recordable_step
from kvcompile.report.origin import Origin
from kvcompile.report.recompile_limit import watch
from kvcompile.report.weight_bytes import weight_bytes

GenerateCode = Callable[[Packing | None], Callable[..., Any]]
"""Takes a rewritten graph, or None for a graph that stays plain. Returns a function that computes the graph's outputs.

For a rewritten graph, the function takes one list of inputs and may change this list. For a plain graph, each input is
an argument.
"""


class _NothingRewritten(GiveUp):
    """Raised to leave AOTAutograd when no site can be packed. Plain Inductor then compiles the unchanged graph."""


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], options: BackendOptions, generate_code: GenerateCode | None = None
) -> Callable[..., Any]:
    """Compile Dynamo's graph. ``generate_code`` takes the place of Inductor; calls then pack copies of plain caches."""
    compiler = GraphCompiler(gm, list(example_inputs), options, generate_code)
    try:
        with compiler.stages.compiling():
            return compiler.compile()
    except Exception as error:
        explained = explained_error(error, compiler.original_inputs)
        if compiler.agreement is not None:
            compiler.agreement.fail(explained or error)
        if explained is not None:
            raise explained from error
        raise
    finally:
        compiler.release()


class GraphCompiler:
    """Compiles one Dynamo graph."""

    def __init__(
        self,
        gm: GraphModule,
        example_inputs: list[Any],
        options: BackendOptions,
        generate_code: GenerateCode | None = None,
    ) -> None:
        self.options = options
        self.generate_code = generate_code
        self.original, self.original_inputs = gm, example_inputs
        self._has_collected = False
        self.marked = copied_graph(gm)  # compile_fx takes ownership of its graph
        sources = [source_name(node) for node in gm.graph.find_nodes(op="placeholder")]
        self.shards = LocalShards(self.marked, example_inputs, sources)
        self.example_inputs = self.shards.example_inputs
        self.inputs = graph_inputs(self.marked, self.example_inputs, sources)
        self.agreement = Agreement(options.shard) if options.shard is not None else None
        self.packing: Packing | None = None
        self.outcome: Outcome | None = None
        self.graph: report.GraphReport | None = None
        self.origin: Origin | None = None
        self.verified_steps: int | None = None
        self.is_ahead_of_time = generate_code is None and is_ahead_of_time()
        self.stages = GraphStages(options.policy, dict(enumerate(sources)))

    def compile(self) -> Callable[..., Any]:
        self.stages.show(Stage.dynamo, self.original)
        with dynamo_timed("kvquant_mark_attention"):
            marked = mark_attention(self.marked)
        if not marked:
            return self._compile_plain()
        self.origin = Origin.of(self.marked, self.options.policy)
        self.stages.show(Stage.marked, self.marked)
        compiled = self._compile_marked()
        if self.agreement is not None:
            self.agreement.exchange(None)  # a rank without code would block the others in the first collective
        return compiled

    def _compile_marked(self) -> Callable[..., Any]:
        if self._records_gradients():
            sites = sites_of(self.marked)
            for site in sites:
                site.refuse(Refusal(Reason.training))
            self._agree(sites)
            self._report(sites)
            if self.generate_code is None and any(isinstance(x, PackedSubclass) for x in self.original_inputs):
                # AOTAutograd of PyTorch 2.13 fails on a mutated tensor subclass in a graph with a backward pass.
                return copied_graph(self.original).forward
            return self._compile_plain()
        try:
            compiled = self._compile_packed()
        except _NothingRewritten:
            return self._compile_plain()
        outcome, graph = self.outcome, self.graph
        assert outcome is not None, "otherwise _NothingRewritten"
        if graph is None:  # the code comes from PyTorch's cache
            graph = self._report(outcome.sites, outcome.surroundings)
        if outcome.is_recordable_step and not self.options.decide_about_cuda_graphs:
            hint_at_cuda_graphs()
        if self.is_ahead_of_time:
            return self._storable(compiled, outcome, graph)
        fallback = self._plain_for_any_inputs() if self.generate_code is None else None
        placeholders = self.original.graph.find_nodes(op="placeholder")
        admit_packed_caches(placeholders, self.original_inputs, outcome.caches, outcome.stacks, self.options.shard)
        guard = None
        if self.options.policy.key_outliers != "ignore":
            guard = KeyGuard(outcome.caches, outcome.sources, outcome.sites, report.note)
        call = AdoptingCall(
            compiled, outcome.caches, outcome.stacks, fallback, graph, guard, self.conceals, self.shards,
            self.options.shard, packs_copies=self.generate_code is not None,
        )  # fmt: skip
        # Return a method, because tools such as depyf look for the code object of the returned callable.
        return self._unpacking(call.__call__, self._to_unpack(outcome.unpacked))

    def _storable(self, compiled: Any, outcome: Outcome, graph: report.GraphReport) -> StoredCall:
        looks_at_keys = self.options.policy.key_outliers != "ignore"
        parts = CallParts(outcome.caches, outcome.stacks, outcome.sources, self.conceals, looks_at_keys)
        note_plain_caches(parts, self.inputs)
        return StoredCall(compiled, self.options.inductor_config, parts, graph)

    @property
    def conceals(self) -> bool:
        """Whether AOTAutograd unwraps tensor subclasses, so packed caches must be concealed."""
        return any(known.dynamo_index is None for known in self.inputs)

    def release(self) -> None:
        """Forget the graph and its inputs, which the compiled code would keep alive through ``_inner_compile``."""
        if self.is_ahead_of_time:
            forget_real_tensors(self.original)
        self.example_inputs, self.original_inputs, self.packing = [], [], None
        self.shards.example_inputs = []
        del self.original, self.marked

    def _records_gradients(self) -> bool:
        """Whether a backward pass may follow. It may not if the graph switches gradients off before it computes."""
        tensors = [value for value in self.original_inputs if isinstance(value, torch.Tensor)]
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
            return False
        nodes = (node for node in self.original.graph.nodes if node.op not in ("placeholder", "get_attr"))
        values = [node.meta.get("example_value") for node in nodes]
        # A leaf is a parameter that a call returned unchanged, such as float() of a float32 tensor.
        return any(isinstance(x, torch.Tensor) and x.requires_grad and not x.is_leaf for x in values)

    def _compile_plain(self) -> Any:
        if self.generate_code is not None:
            return self.generate_code(None)
        check_control_flow(self.original, self.original_inputs)
        config = self.options.inductor_config
        if not self.is_ahead_of_time:
            return self._compile_unpacked()
        check_storable(is_divided=False)
        with keeping_code():
            return StoredCode(plain.compile_plain(self.original, config, self.original_inputs), config)

    def _compile_unpacked(self) -> Any:
        """The plain code of a graph, for its inputs after a call has unpacked some of them."""
        places = self._to_unpack(self.packing.unpacked) if self.packing is not None else ()
        inputs = [self._plain_like(index) if index in places else x for index, x in enumerate(self.original_inputs)]
        compiled = plain.compile_for_calls(self.original, self.options.inductor_config, inputs)
        return self._unpacking(compiled, places, self._plain_for_any_inputs()) if places else compiled

    def _plain_for_any_inputs(self) -> Callable[..., Any]:
        return plain.plain_for_any_inputs(copied_graph(self.original), self.options.inductor_config)

    def _unpacking(
        self, compiled: Callable[..., Any], places: Sequence[int], while_packed: Callable[..., Any] | None = None
    ) -> Callable[..., Any]:
        """The function that unpacks the inputs at ``places`` and calls ``compiled``, as :class:`UnpackingCall` does."""
        if not places:
            return compiled
        placeholders = self.original.graph.find_nodes(op="placeholder")
        admit_unpacked_caches(placeholders, places)
        caches = {index: source_name(placeholders[index]) for index in places}
        return UnpackingCall(compiled, caches, while_packed).__call__

    def _to_unpack(self, places: Sequence[int]) -> Sequence[int]:
        """The places of the inputs that calls unpack: none if the code serves other callers, or several ranks."""
        if self.generate_code is not None or self.is_ahead_of_time or self.options.shard is not None:
            return ()
        return [place for place in places if may_unpack(self.original_inputs[place])]

    def _compile_packed(self) -> Any:
        if self.is_ahead_of_time:
            check_storable(is_divided=self.options.shard is not None or self.shards.are_used)
            return self._compile_with(self.marked, uuid4().hex)  # a random key finds no code in the cache
        return self._compile_with(self.marked, self._digest())

    def _compile_with(self, marked: GraphModule, digest: str | None) -> Any:
        """The code of AOTAutograd and Inductor. Its key covers ``digest``; without one, AOTAutograd's cache is off."""
        if digest is not None:
            add_digest(marked.graph, digest)
            for node in marked.graph.find_nodes(op="placeholder"):
                node.type = None  # the key would differ between a plain cache and the packed cache that replaces it
            marked.recompile()
        cache = without_autograd_cache() if digest is None else storing_own_code()
        with keeping_code() if self.is_ahead_of_time else cache, receiving_outcomes(self._know):
            return compile_fx(
                marked,
                self._logical_inputs(),
                inner_compile=self._inner_compile,
                config_patches=self.options.inductor_config,
            )

    def _digest(self) -> str | None:
        """The digest of the graph. None if PyTorch must not store its code."""
        alone = self.options.shard is None  # stored code would have to name its rank and its group
        generates = self.generate_code is None
        if not CAN_STORE or not generates or self.stages.are_wanted or self.options.verify or not alone:
            return None
        calls = [call_of(node) for node in self.marked.graph.nodes]
        return digest_of(
            self.options.policy, sites_of(self.marked), self.inputs, self.conceals, calls, self._merges_projections
        )

    def _know(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def _inner_compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        may_be_adjacent = self._may_be_adjacent if self._merges_projections else None
        rewriter = GraphRewriter(self.options, self.inputs, self.example_inputs, self.stages, may_be_adjacent)
        given_static, cudagraphs = set(kwargs["static_input_idxs"]), bool(kwargs["cudagraphs"])
        packing = self.packing = rewriter.rewrite(gm, example_inputs, given_static, cudagraphs)
        self.verified_steps = rewriter.verified_steps
        self._agree(packing.sites)
        self.graph = self._report(packing.sites, packing.surroundings)
        rewritten = packing.rewritten
        if rewritten is None:
            raise _NothingRewritten
        self.outcome = self._outcome_of(packing, rewritten)
        _precompile_kernels(gm.graph)
        static = {index for index, known in enumerate(packing.inputs) if known.is_static}
        if rewritten.by_reference:
            static |= {action.index for action in rewritten.inputs} | set(rewritten.buffered_inputs)
        kwargs["static_input_idxs"] = sorted(static)
        if kwargs["cudagraphs"] and not packing.cudagraphs:
            kwargs["cudagraphs"] = BoxedBool(False)
        mutated = (index for index, node in enumerate(packing.placeholders) if is_mutated(node))
        plan = CallPlan.of(rewritten, example_inputs, _dequantized_inputs(packing), self.conceals, mutated)
        if self.generate_code is not None or not can_call_subgraphs():
            expand_regions(gm)
        compiled: Any
        if self.generate_code is not None:
            compiled = self.generate_code(packing)
        else:
            with contextlib.nullcontext() if self.is_ahead_of_time else storing_by_key(), views_by_method():
                compiled = compile_fx_inner(gm, binding_replaced_symbols(rewritten.example_inputs), **kwargs)
        return PackedCode(compiled, plan, self.outcome, packing.cudagraphs, self.is_ahead_of_time)

    @property
    def _merges_projections(self) -> bool:
        """Whether small projections become one product, whose weights this process can keep adjacent."""
        return self.options.merge_projections and self.generate_code is None and not self.is_ahead_of_time

    def _may_be_adjacent(self, places: Sequence[int]) -> bool:
        """Whether a call can keep the inputs of the ATen graph at ``places`` adjacent in memory."""
        indices = [self.inputs[place].dynamo_index for place in places]
        given = self.shards.of(self.original_inputs)
        tensors = [None if index is None else given[index] for index in indices]
        reason = why_not_adjacent(tensors)
        if reason is not None and not self._has_collected:
            gc.collect()  # reference cycles of earlier compilations may hold the parameters; once is enough for a graph
            self._has_collected = True
            reason = why_not_adjacent(tensors)
        if reason is not None:
            names = ", ".join(self.inputs[place].source for place in places)
            report.note(f"merge_projections: {names} stay apart: {reason}")
        return reason is None

    def _agree(self, sites: Sequence[Site]) -> None:
        if self.agreement is not None:
            check_agreement(self.agreement, sites)

    def _outcome_of(self, packing: Packing, rewritten: Rewritten) -> Outcome:
        caches, stacks = in_dynamo_order(packing.inputs, len(self.inputs), len(self.example_inputs), rewritten)
        return Outcome(
            sites=tuple(packing.sites),
            surroundings=tuple(packing.surroundings),
            caches=without_symbols(caches),
            stacks=stacks,
            sources=tuple(packing.inputs[action.index].source for action in rewritten.inputs),
            unpacked=packing.unpacked,
            is_recordable_step=is_recordable_step(packing),
        )

    def _logical_inputs(self) -> list[Any]:
        """The example inputs, with plain fakes in the place of packed caches and of inputs that may be plain caches.

        AOTAutograd's key must be the same before and after a cache is packed. The key differs between fakes and real
        tensors. Plain fakes have the strides of the packed caches, because strides decide whether ``reshape`` and
        ``contiguous`` give a view, whose writes change the cache, or a copy.
        """
        placeholders = self.marked.graph.find_nodes(op="placeholder")
        inputs = list(self.example_inputs)
        for index, value in enumerate(inputs):
            if isinstance(value, PackedSubclass):
                inputs[index] = self._plain_like(index)
            elif type(value) is torch.Tensor and value.dim() >= 3 and not value.requires_grad:
                inputs[index] = placeholders[index].meta["example_value"]
        return inputs

    def _plain_like(self, index: int) -> torch.Tensor:
        """A plain fake with the shape, strides and dtype of a packed input of Dynamo's graph."""
        fake_mode = detect_fake_mode(self.original_inputs)
        assert fake_mode is not None, "Dynamo traces in a fake mode"
        like = self.original.graph.find_nodes(op="placeholder")[index].meta["example_value"]
        with fake_mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)

    def _report(self, sites: Sequence[Site], surroundings: Sequence[SiteSurroundings] = ()) -> report.GraphReport:
        passes = self.packing.seconds if self.packing is not None else {}
        weights = weight_bytes(self.example_inputs)
        graph = report.record(sites, surroundings, weights, passes, self.origin, self.verified_steps)
        watch(self.marked.graph)
        self.stages.reported(graph)
        graph.enforce(self.options.on_unsupported)
        layers = num_layers_in_graph(sites)
        if layers is not None or not any(known.arrives_packed for known in self.inputs):
            self.options.policy.check_rules(sites, layers)
        return graph


def _precompile_kernels(graph: Graph) -> None:
    """Compile the Triton kernels of a rewritten graph while Inductor generates its code."""
    for op in IMPLEMENTATIONS:
        for node in graph.find_nodes(op="call_function", target=op):
            args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
            precompile(op, tuple(args), dict(kwargs))


def _dequantized_inputs(packing: Packing) -> list[DequantizedInput]:
    """The packed inputs that are not proven KV caches: the graph takes their dequantized values."""
    assert packing.rewritten is not None
    proven = {action.index for action in packing.rewritten.inputs}
    return [
        DequantizedInput(index, is_mutated(node))
        for index, (node, known) in enumerate(zip(packing.placeholders, packing.inputs, strict=True))
        if known.arrives_packed and index not in proven
    ]
