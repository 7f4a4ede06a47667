"""The ``kvquant`` backend of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.utils import dynamo_timed
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.call.inputs import InputPlaces
from kvcompile.call.key_outliers import KeyGuard
from kvcompile.call.packed_call import AdoptingCall, DequantizedInput, PackedCall
from kvcompile.debugging.stages import GraphStages, Stage
from kvcompile.kernels.layout.axes import BLOCK_AXES, RANK_3_AXES, rank_4_axes
from kvcompile.options import BackendOptions
from kvcompile.packed.pool import PackedPool, slots_of
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import WHOLE_AXES, PackedTensor
from kvcompile.passes.calling import InputAction, PackedInput, Rewritten, SplitStack
from kvcompile.passes.canonical.drop_returned_inputs import drop_returned_inputs
from kvcompile.passes.canonical.normalise_dims import make_dims_positive
from kvcompile.passes.canonical.widen_rank_3 import widen_rank_3_caches
from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.notes.surroundings import SiteView, neighbourhoods
from kvcompile.passes.pipeline import num_layers, quantize_kv_cache, refuse, sites_of
from kvcompile.passes.pools.page import page_pools
from kvcompile.passes.refusal import Reason, Refusal
from kvcompile.passes.rewrite.caches import is_mutated
from kvcompile.passes.rewrite.make_replayable import can_replay, suit_cuda_graphs
from kvcompile.passes.site import Site
from kvcompile.passes.stacks.split import contiguous_parts, names_of_parts, places_of, split_stacks
from kvcompile.report import report
from kvcompile.report.weight_bytes import weight_bytes


class _NothingRewrittenError(Exception):
    """Leaves AOTAutograd when no site can be packed: the untouched graph is then compiled as plain Inductor does."""


def kvquant(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph with its KV caches quantized; the function that ``torch.compile`` calls.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs, real tensors and symbolic integers.
        mode: a ``torch.compile`` mode (``max-autotune``, ``reduce-overhead``, ...); not together with options.
        options: ``policy`` (preset name, path, dict or Policy), ``on_unsupported`` (``error``, ``warn``, ``ignore``)
            and Inductor configuration keys.

    Raises:
        OptionsError: an unknown mode or option.
        PolicyError: an unknown preset, format or field of a policy.
        UnsupportedSiteError: under ``on_unsupported="error"``, for a cached attention that cannot be packed.
    """
    parsed = BackendOptions.parse(mode, options)
    compiler = _GraphCompiler(gm, list(example_inputs), parsed)
    try:
        with compiler.stages.compiling():
            return compiler.compile()
    finally:
        compiler.release()


class _GraphCompiler:
    """Compiles one Dynamo graph."""

    def __init__(self, gm: GraphModule, example_inputs: list[Any], options: BackendOptions) -> None:
        self.options = options
        self.example_inputs = example_inputs
        self.original = gm
        self.marked = _copy(gm)  # compile_fx takes ownership of what it is given
        self.rewritten: Rewritten | None = None
        self.places = InputPlaces(_fake_inputs(gm, example_inputs))
        self.stacks: tuple[SplitStack, ...] = ()
        self.sources = _source_names(gm)
        self.sites: list[Site] = []
        self.views: list[SiteView] = []
        self.stages = GraphStages(options.policy, self.sources)

    def compile(self) -> Callable[..., Any]:
        self.stages.show(Stage.dynamo, self.original)
        with dynamo_timed("kvquant_mark_attention"):
            marked = mark_attention(self.marked)
        if not marked:
            return _compile_plain(self.original, self.options.inductor_config, self.example_inputs)
        self.stages.show(Stage.marked, self.marked)
        if self._records_gradients():
            self.sites = sites_of(self.marked)
            for site in self.sites:
                refuse(site, Refusal(Reason.training))
            self._report()
            return _compile_plain(self.original, self.options.inductor_config, self.example_inputs)
        try:
            compiled = self._compile_packed()
        except _NothingRewrittenError:
            return _compile_plain(self.original, self.options.inductor_config, self.example_inputs)
        fallback = _plain_for_any_inputs(_copy(self.original), self.options.inductor_config)
        assert self.rewritten is not None, "otherwise _NothingRewrittenError"
        caches, stacks = self.places.in_dynamo(self.rewritten.inputs, self.stacks)
        guard = self._guard(caches, names_of_parts(self.sources, stacks))
        # The method, not the object: tools such as depyf look for the code of what a backend returns.
        return AdoptingCall(compiled, caches, stacks, fallback, guard, self.places.has_subclasses).__call__

    def _guard(self, caches: Sequence[InputAction], names: Mapping[int, str]) -> KeyGuard | None:
        if self.options.policy.key_outliers == "ignore":
            return None
        return KeyGuard(caches, names, self.sites, report.note)

    def release(self) -> None:
        """Forget the graph and its inputs, which the compiled code would keep alive through ``_inner_compile``."""
        self.example_inputs = []
        del self.original, self.marked

    def _records_gradients(self) -> bool:
        tensors = [value for value in self.example_inputs if isinstance(value, torch.Tensor)]
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)

    def _compile_packed(self) -> Any:
        # AOTAutograd's cache must stay out: its key does not cover inner_compile, so that a hit would skip our passes.
        # Inductor's own cache is keyed by the rewritten graph, which shows everything that the policy decided.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(
                self.marked,
                self._logical_inputs(),
                inner_compile=self._inner_compile,
                config_patches=self.options.inductor_config,
            )

    def _inner_compile(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with dynamo_timed("kvquant_quantize_kv_cache"):
            self._rewrite(gm, list(example_inputs))
        self._report()
        if self.rewritten is None:
            raise _NothingRewrittenError
        kwargs["static_input_idxs"] = places_of(kwargs["static_input_idxs"], self.stacks)
        if kwargs["cudagraphs"]:
            kwargs |= self._suit_cuda_graphs(gm, kwargs["static_input_idxs"])
        compiled = compile_fx_inner(gm, self.rewritten.example_inputs, **kwargs)
        dequantized = self._dequantized_inputs(gm)
        return PackedCall(compiled, self.rewritten, example_inputs, dequantized, self.places.has_subclasses)

    def _suit_cuda_graphs(self, gm: GraphModule, static_inputs: Sequence[int]) -> dict[str, Any]:
        """Prepare the rewritten graph for CUDA graphs, or do without; returns arguments for ``compile_fx_inner``."""
        assert self.rewritten is not None
        if not can_replay(gm, self.rewritten):
            return {"cudagraphs": BoxedBool(False)}
        if not self.rewritten.on_cuda:
            return {}
        self.rewritten = suit_cuda_graphs(gm, self.rewritten, static_inputs)
        static = {*static_inputs, *(action.index for action in self.rewritten.inputs)}
        return {"static_input_idxs": sorted(static - set(self.rewritten.returned_inputs))}

    def _rewrite(self, gm: GraphModule, example_inputs: list[Any]) -> None:
        mismatch = self._input_mismatch(example_inputs)
        if mismatch:
            self.sites = sites_of(gm)
            for site in self.sites:
                refuse(site, Refusal(Reason.input_mismatch, detail=mismatch))
            self.stages.show(Stage.aten, gm, self.sites)
            return
        gm.graph.eliminate_dead_code()  # what reads a cache for nothing does not see it
        drop_returned_inputs(gm.graph)
        make_dims_positive(gm.graph)
        self.stacks = split_stacks(gm, example_inputs, self._packed_stacks())
        page_pools(gm, self._packed_pools())
        rank_3 = widen_rank_3_caches(gm.graph)
        names = names_of_parts(self.places.in_aten(self.sources), self.stacks)
        self.stages.name_aten_inputs(names)
        self.sites, self.rewritten = quantize_kv_cache(
            gm,
            example_inputs,
            self.options.policy.formats_for,
            self._packed_inputs(rank_3.inputs),
            names,
            self._view_analysed,
            self._held_inputs(),
        )
        if self.rewritten is not None:
            self.rewritten = replace(rank_3.restore(gm, self.rewritten), stacks=self.stacks)
            contiguous_parts(gm, self.rewritten, self._packed_stacks())
            self.stages.show(Stage.rewritten, gm, self.sites)
            after = neighbourhoods(gm.graph, len(self.sites))
            self.views = [
                SiteView(view.before, packed if site.rewritten else None)
                for site, view, packed in zip(self.sites, self.views, after, strict=True)
            ]

    def _view_analysed(self, gm: GraphModule, sites: list[Site]) -> None:
        self.stages.show(Stage.aten, gm, sites)
        self.views = [SiteView(before) for before in neighbourhoods(gm.graph, len(sites))]

    def _packed_inputs(self, rank_3: Collection[int]) -> dict[int, PackedInput]:
        """The inputs that are packed caches, or views of some that still have all axes of one.

        ``rank_3``: those, by position, that have a fourth dimension in the graph.
        """
        caches = {index: slots_of(value) for index, value in self._arriving_packed().items()}
        pools = self._packed_pools()

        def axes_of(index: int, cache: PackedTensor) -> str:
            if index in pools:
                return BLOCK_AXES[pools[index]]
            return rank_4_axes(cache.axes) if index in rank_3 else cache.axes

        return {
            index: PackedInput(
                value.packed_layout, axes_of(index, value), value.growing, value.is_whole or value.can_be_copied_whole
            )
            for index, value in caches.items()
            if isinstance(value, PackedTensor) and value.axes in (RANK_3_AXES if index in rank_3 else WHOLE_AXES)
        }

    def _packed_pools(self) -> dict[int, bool]:
        """The inputs that are packed pools of blocks, and whether these hold heads before tokens."""
        packed = self._arriving_packed()
        return {index: value.heads_first for index, value in packed.items() if isinstance(value, PackedPool)}

    def _dequantized_inputs(self, gm: GraphModule) -> list[DequantizedInput]:
        """The packed inputs that are no proven caches: the graph uses their values in ways of its own."""
        assert self.rewritten is not None
        proven = {action.index for action in self.rewritten.inputs}
        placeholders = gm.graph.find_nodes(op="placeholder")
        return [
            DequantizedInput(index, is_mutated(placeholders[index]))
            for index in self._arriving_packed()
            if index not in proven
        ]

    def _arriving_packed(self) -> dict[int, PackedSubclass]:
        """The inputs that are packed, by their positions after stacks were split."""
        inputs = self.places.in_aten(dict(enumerate(self.example_inputs)))
        packed = {index: value for index, value in inputs.items() if isinstance(value, PackedSubclass)}
        for stack in self.stacks:
            whole = packed.pop(stack.index, None)
            if isinstance(whole, PackedStack):
                parts = dict(whole.items())
                chosen = {place: parts[part] for part, place in stack.places.items()}
                packed |= {place: part for place, part in chosen.items() if isinstance(part, PackedSubclass)}
        return packed

    def _packed_stacks(self) -> dict[int, tuple[int, ...]]:
        """The stacked dimensions of inputs that are packed stacks."""
        inputs = self.places.in_aten(dict(enumerate(self.example_inputs)))
        return {index: value.stacked_dims for index, value in inputs.items() if isinstance(value, PackedStack)}

    def _held_inputs(self) -> list[int]:
        """The plain inputs that an object of the caller holds, as a cache does its keys: the encoder's part of a cache
        is read at every step and written at none. A tensor that is passed by itself may be made anew for every call,
        and one that a module holds may be a weight: those are packed only where the graph writes them.
        """
        held = {
            index: value
            for index, value in enumerate(self.example_inputs)
            if type(value) is torch.Tensor
            and _is_held(self.sources[index])
            and not (value.requires_grad or value._is_view())
            and value.is_contiguous()
        }
        return places_of(self.places.in_aten(held), self.stacks)

    def _logical_inputs(self) -> list[Any]:
        """The example inputs, with packed caches replaced by plain fakes of their logical shape."""
        fake_mode = torch._guards.detect_fake_mode(self.example_inputs)
        assert fake_mode is not None, "Dynamo traces in a fake mode"
        placeholders = self.marked.graph.find_nodes(op="placeholder")
        inputs = list(self.example_inputs)
        for index, value in enumerate(inputs):
            if isinstance(value, PackedSubclass):
                logical = placeholders[index].meta["example_value"]
                with fake_mode:
                    inputs[index] = torch.empty(logical.shape, dtype=logical.dtype, device=logical.device)
        return inputs

    def _input_mismatch(self, aten: Sequence[Any]) -> str | None:
        """How AOTAutograd's inputs differ from Dynamo's, or None if they correspond."""
        if len(aten) != self.places.count:
            return f"{self.places.count} became {len(aten)}"
        for index, before in self.places.in_aten(dict(enumerate(self.example_inputs))).items():
            after = aten[index]
            if isinstance(before, torch.Tensor) != isinstance(after, FakeTensor):
                return f"input {index} changed its kind"
            if isinstance(before, torch.Tensor) and (before.dim() != after.dim() or before.dtype != after.dtype):
                return f"input {index} changed its shape or dtype"
        return None

    def _report(self) -> None:
        graph = report.record(self.sites, self.views, weight_bytes(self.example_inputs))
        self.stages.reported(graph)
        graph.enforce(self.options.on_unsupported)
        self.options.policy.check_rules(self.sites, num_layers(self.sites))


def _compile_plain(gm: GraphModule, inductor_config: dict[str, Any], inputs: Sequence[Any]) -> Any:
    """What plain Inductor gives; ``gm`` stays as it is."""
    return compile_fx(_copy(gm), list(inputs), config_patches=inductor_config)


def _plain_for_any_inputs(gm: GraphModule, inductor_config: dict[str, Any]) -> Callable[..., Any]:
    """As plain Inductor would run ``gm``, compiled when it is called, outside of the compilation that made ``gm``.

    Dynamo looks at the inputs once more, and again where others come: what it knew of sizes and numbers was guarded in
    that compilation, and what Inductor wants to be guarded now could not be any more.
    """
    return torch.compile(gm, backend=lambda gm, inputs: _compile_plain(gm, inductor_config, inputs))


def _copy(gm: GraphModule) -> GraphModule:
    """A module with a graph of its own and the same parameters and constants.

    The copy does not know its example inputs: whatever refers to them, even weakly, would keep them from being adopted.
    """
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    graph.set_codegen(gm.graph._codegen)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    for node, copy in nodes.items():
        copy.meta.pop("grapharg", None)
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source
    result = GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    # Without it AOTAutograd takes the graph for an exported one, in which no input is a parameter with a fixed address.
    result._param_name_to_source = getattr(gm, "_param_name_to_source", {})
    return result


def _fake_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """What Dynamo knows of the inputs; None for packed caches."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return [
        None if isinstance(value, PackedSubclass) else node.meta["example_value"]
        for node, value in zip(placeholders, example_inputs, strict=True)
    ]


def _source_names(gm: GraphModule) -> dict[int, str]:
    """What the user calls each input, as Dynamo knows it."""
    names = {}
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        argument = node.meta.get("grapharg")
        source = getattr(argument, "source", None)
        name = getattr(source, "name", None)
        names[index] = (name() if callable(name) else name) or node.name
    return names


def _is_held(source: str) -> bool:
    """Whether an input, named as Dynamo does, is an attribute of an object, and not a weight or buffer of a module."""
    holder, _, attribute = source.rpartition(".")
    return bool(holder) and not attribute.startswith(("_parameters", "_buffers"))
