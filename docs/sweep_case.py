"""One case of the sweep: an architecture with an attention implementation and a kind of cache, under ``kvquant``.

The case feeds a prompt, single tokens and a chunk of tokens, enough to fill a sliding window. Graphs are rewritten by
the passes and then run node by node, because generating code would take most of the time and show nothing about them.

What it must equal is the uncompiled model with caches of the same meaning: quantized on write, dequantized on read. The
reference is the model with plain caches whose new keys and values pass through the spec of the format; in each step for
exactly those layers that the compiled run keeps packed by then. Attention that was left alone sees new keys and values
before they are quantized. Some models compute something else under ``torch.compile``, whatever the backend; they are
compared with themselves under the backend ``eager``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from sweep_models import ARCHITECTURES, VOCAB_SIZE
from torch import Tensor

import kvcompile
import kvcompile.backend
from kvcompile.passes.site import Site
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report

BATCH = 2
SOURCE_TOKENS = 9
MAX_LEN = 48
STEPS = (11, 1, 1, 4, 1, 1)
"""Tokens of each call: 19 in all, and the windows of the small models are 16 long."""
MAX_ERROR = 2e-3
"""Relative L2 error of the logits. One code of int8 that is rounded the other way makes about a tenth of it; one token
too many or too few in a mask makes ten times as much."""
UNDER_DYNAMO = "compared under torch.compile with the backend eager, which alone changes the logits of this model"

CacheKind = Literal["static", "dynamic"]
Implementation = Literal["sdpa", "eager", "flex_attention"]


@dataclass
class CaseResult:
    """What became of one case.

    Attributes:
        architecture, attention, cache: which case it is.
        cached: layers of the model that wrote to a cache, cross-attention counted besides.
        full: those of them without a sliding window.
        packed: layers whose cache was packed at the end.
        packed_full: those of them without a sliding window.
        rewritten: modules all of whose attention was rewritten, in every graph.
        refusals: reason -> modules, of attention that was left alone although its layer has a cache.
        notes: what the report notes about calls.
        error: relative L2 error of the logits.
        failure: why there is no result; None if there is one.
        skipped: why the case does not exist; None if it does.
    """

    architecture: str
    attention: str
    cache: str
    cached: int = 0
    full: int = 0
    packed: int = 0
    packed_full: int = 0
    rewritten: int = 0
    refusals: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: float = 0.0
    failure: str | None = None
    skipped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@contextlib.contextmanager
def flex_attention_is_not_compiled() -> Iterator[None]:
    """Let uncompiled models compute ``flex_attention`` in eager code, where Transformers compiles it by itself."""
    from torch.nn.attention import flex_attention
    from transformers.integrations.flex_attention import WrappedFlexAttention

    with (
        mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(WrappedFlexAttention, "__call__", return_value=flex_attention.flex_attention),
    ):
        yield


@contextlib.contextmanager
def without_code_generation() -> Iterator[None]:
    """Run graphs node by node: what the passes make of a graph is seen, not the code that Inductor generates."""

    def interpret(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # Inductor makes a view a copy where strides ask for it
        gm.recompile()
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    with (
        mock.patch.object(kvcompile.backend, "compile_fx_inner", interpret),
        mock.patch.object(kvcompile.backend, "_compile_plain", lambda gm, config, inputs: gm.forward),
    ):
        yield
    torch._dynamo.reset()


def run_case(
    architecture: str,
    attention: Implementation,
    kind: CacheKind,
    policy: str = "int8_per_token_head",
    steps: Sequence[int] = STEPS,
) -> CaseResult:
    """Run one case, in calls of so many tokens. Whatever goes wrong in it is part of the result."""
    result = CaseResult(architecture, attention, kind)
    try:
        model = ARCHITECTURES[architecture].build(architecture, attention)
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        result.skipped = f"Transformers has no {attention} attention for it"
        return result
    case = _Case(model, kind, Policy.load(policy), list(steps))
    with flex_attention_is_not_compiled():
        try:
            case.run(result)
        except Exception as error:
            if case.fails_uncompiled():
                result.skipped = f"it does not run with a {kind} cache, compiled or not"
            else:
                result.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return result


class _Case:
    """A model, its inputs, and what is known of its caches call by call."""

    def __init__(self, model: Any, kind: CacheKind, policy: Policy, steps: list[int]) -> None:
        self.model, self.kind, self.policy, self.steps = model, kind, policy, steps
        self.is_encoder_decoder = model.config.is_encoder_decoder
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCAB_SIZE, (BATCH, sum(steps)), generator=generator)
        self.source = torch.randint(3, VOCAB_SIZE, (BATCH, SOURCE_TOKENS), generator=generator)
        self.packed_after: list[set[tuple[int, int]]] = []
        self.left_alone: list[set[tuple[int, int]]] = []

    def run(self, result: CaseResult) -> None:
        logits, cache, report = self._compiled()
        result.error = _distance(logits, self._reference(self.model))
        if result.error > MAX_ERROR:
            error = _distance(logits, self._reference(torch.compile(self.model, backend="eager")))
            if error <= MAX_ERROR:
                result.error = error
                report.remarks.append(UNDER_DYNAMO)
        layers = _layers(cache)
        packed = self.packed_after[-1]
        full = {key for key, layer in layers.items() if not layer.is_sliding}
        result.cached, result.full = len(layers), len(full)
        result.packed, result.packed_full = len(packed), len(packed & full)
        result.rewritten, result.refusals = _by_module(report)
        if not result.refusals:  # behind a graph break in a layer Dynamo knows no names: its sites look like one
            result.rewritten = result.packed
        result.notes = list(report.notes)

    @torch.no_grad()
    def _compiled(self) -> tuple[Tensor, Any, Report]:
        """As ``generate()`` runs it: a static cache is filled in eager code and compiled from the first decode on."""
        compiled = torch.compile(self.model, backend="kvquant", options={"policy": self.policy})
        cache = self._new_cache()
        logits = []
        sites_of_length: dict[int, Sequence[Site]] = defaultdict(tuple)  # of the graph that takes so many tokens
        with without_code_generation(), kvcompile.collect_reports() as report:
            encoded = self._encode()
            for step, ids in enumerate(self.ids.split(self.steps, dim=1)):
                eager = step == 0 and self.kind == "static"
                known = len(report.sites)
                logits.append(self._call(self.model if eager else compiled, ids, cache, encoded))
                sites_of_length[ids.shape[1]] = report.sites[known:] or sites_of_length[ids.shape[1]]
                refused = (site.layer for site in sites_of_length[ids.shape[1]] if not site.rewritten)
                self.left_alone.append({(0, layer) for layer in refused if layer is not None})
                self.packed_after.append({key for key, layer in _layers(cache).items() if _is_packed(layer)})
        return torch.cat(logits, 1), cache, report

    @torch.no_grad()
    def fails_uncompiled(self) -> bool:
        """Whether the model itself cannot do what the case asks of it."""
        self.packed_after = self.left_alone = [set() for _ in self.steps]
        try:
            self._reference(self.model)
        except Exception:
            return True
        return False

    @torch.no_grad()
    def _reference(self, model: Any) -> Tensor:
        torch._dynamo.reset()
        cache = self._new_cache()
        encoded = self._encode()
        logits = []
        for step, ids in enumerate(self.ids.split(self.steps, dim=1)):
            with _quantizing(cache, self.packed_after[step], self.left_alone[step], self.policy):
                logits.append(self._call(model, ids, cache, encoded))
        return torch.cat(logits, 1)

    def _call(self, model: Any, ids: Tensor, cache: Any, encoded: Any) -> Tensor:
        if not self.is_encoder_decoder:
            return model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        inputs = {"encoder_outputs": encoded, "decoder_input_ids": ids}
        return model(**inputs, past_key_values=cache, use_cache=True).logits

    def _encode(self) -> Any:
        return self.model.get_encoder()(input_ids=self.source) if self.is_encoder_decoder else None

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, EncoderDecoderCache, StaticCache

        config = self.model.config.get_text_config(decoder=True)

        def make(max_len: int) -> Any:
            if self.kind == "static":
                return StaticCache(config=config, max_cache_len=max_len)
            return DynamicCache(config=config)

        if not self.is_encoder_decoder:
            return make(MAX_LEN)
        return EncoderDecoderCache(make(MAX_LEN), make(SOURCE_TOKENS))


def _distance(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


def _parts(cache: Any) -> list[Any]:
    both = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    return [part for part in both if part is not None] or [cache]


def _layers(cache: Any) -> dict[tuple[int, int], Any]:
    """(0 or, of cross-attention, 1; index) -> the layers of a cache that hold keys."""
    return {
        (place, index): layer
        for place, part in enumerate(_parts(cache))
        for index, layer in enumerate(part.layers)
        if isinstance(getattr(layer, "keys", None), Tensor)
    }


def _is_packed(layer: Any) -> bool:
    return isinstance(layer.keys, kvcompile.PackedTensor) and isinstance(layer.values, kvcompile.PackedTensor)


def _by_module(report: Report) -> tuple[int, dict[str, list[str]]]:
    """How many modules were rewritten in every graph, and the others by reason.

    Attention that no graph finds a cache for has none: that of an encoder.
    """
    rewritten: dict[str, bool] = defaultdict(bool)
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for site in report.sites:
        if site.reason is None:
            rewritten[site.module] = True
        else:
            reasons[site.module][f"{site.reason_code}: {site.reason}"] = None
    refusals: dict[str, list[str]] = defaultdict(list)
    for module, found in reasons.items():
        if rewritten[module] or "encoder." not in module or not all(reason.startswith("no_cache") for reason in found):
            for reason in found:
                refusals[reason].append(module)
    return sum(rewritten[module] and module not in reasons for module in list(rewritten)), dict(refusals)


@contextlib.contextmanager
def _quantizing(
    cache: Any, layers: set[tuple[int, int]], left_alone: set[tuple[int, int]], policy: Policy
) -> Iterator[None]:
    """Updates of these layers of a plain cache store what a packed one would hold, and have always held; those that are
    left alone return what they were given."""
    formats = policy.formats_for("", 0, 1)
    assert formats is not None, "the sweep packs every layer"

    def round_trip(x: Tensor, role: Any) -> Tensor:
        spec = formats.layout(role, x.shape[-1], x.dtype).format
        return spec.decode(spec.encode(x)).to(x.dtype)

    def round_trip_all(layer: Any) -> None:
        for tensor, role in ((layer.keys, "key"), (layer.values, "value")):
            tensor.copy_(round_trip(tensor, role))

    with contextlib.ExitStack() as patches:
        for place, part in enumerate(_parts(cache)):
            for index, layer in enumerate(part.layers):
                if (place, index) not in layers:
                    continue
                if isinstance(layer.keys, Tensor) and layer.keys.numel():
                    round_trip_all(layer)

                def quantize_first(
                    key: Tensor, value: Tensor, *args: Any, original: Any = layer.update, **kwargs: Any
                ) -> Any:
                    return original(round_trip(key, "key"), round_trip(value, "value"), *args, **kwargs)

                def quantize_last(
                    key: Tensor, value: Tensor, layer: Any = layer, original: Any = layer.update, **kwargs: Any
                ) -> Any:
                    seen = [x.clone() for x in original(key, value, **kwargs)]
                    round_trip_all(layer)
                    return seen

                update = quantize_last if (place, index) in left_alone else quantize_first
                patches.enter_context(mock.patch.object(layer, "update", update))
        yield
