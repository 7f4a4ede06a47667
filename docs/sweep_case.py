"""One case of the sweep: an architecture with an attention implementation and a kind of cache, under ``kvquant``.

The case feeds a prompt, single tokens and a chunk of tokens, enough to fill a sliding window. The passes rewrite the
graphs, which then run node by node: generating code would take most of the time and test nothing about the passes.

The reference is the uncompiled model with plain caches. Its new keys and values pass through the specification of the
format, in each step for exactly the layers that the compiled run has packed at this step. In the reference, attention
that was not packed reads new keys and values before they are quantized. Some models compute different logits under
``torch.compile`` with any backend; these are compared with the same model under the backend ``eager``.
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
from sweep_library import NotBuiltError, architecture_of
from sweep_models import VOCAB_SIZE
from torch import Tensor

import kvcompile
import kvcompile.compilation.graph_compiler
import kvcompile.compilation.plain
from kvcompile.passes.graph.aten import replace_views_by_reshapes
from kvcompile.passes.site import Site
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report

BATCH = 2
SOURCE_TOKENS = 9
MAX_LEN = 48
STEPS = (11, 1, 1, 4, 1, 1)
"""Tokens of each call. They are 19 in total; the windows of the small models have 16 tokens."""
MAX_ERROR = 2e-3
"""Largest relative L2 error of the logits. A single int8 code that is rounded differently causes about a tenth of it;
an additional or missing token in a mask causes ten times as much.
"""
NO_ATTENTION = "Transformers has no {} attention for it"
NOT_BUILT = "no small model: "
"""The beginning of the reason why a model type has no case."""
LOSSLESS = "float32"
ROUNDED_ELSEWHERE = (
    f"compared under the lossless policy {LOSSLESS}: under a lossy policy this model also reads new keys or values "
    "before they are quantized"
)
UNDER_DYNAMO = "compared under torch.compile with the backend eager, which alone changes the logits of this model"

CacheKind = Literal["static", "dynamic"]
Implementation = Literal["sdpa", "eager", "flex_attention"]


@dataclass
class CaseResult:
    """The result of one case.

    Attributes:
        architecture, attention, cache: the case.
        cached: number of layers that wrote to a cache; cross-attention counts as a layer.
        full: number of cached layers without a sliding window.
        packed: number of layers whose cache was packed at the end.
        packed_full: number of packed layers without a sliding window.
        rewritten: number of modules whose attention was rewritten in every graph.
        refusals: reason -> modules whose attention was not packed although their layer has a cache.
        notes: the notes of the report.
        error: relative L2 error of the logits.
        failure: why the case has no result; None if it has one.
        skipped: why the case does not exist; None if it exists.
        transformers: the release of Transformers that the case ran on.
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
    transformers: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@contextlib.contextmanager
def flex_attention_is_not_compiled() -> Iterator[None]:
    """Let uncompiled models run ``flex_attention`` eagerly, although Transformers compiles it separately."""
    from torch.nn.attention import flex_attention
    from transformers.integrations.flex_attention import WrappedFlexAttention

    with (
        mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
        mock.patch.object(WrappedFlexAttention, "__call__", return_value=flex_attention.flex_attention),
    ):
        yield


@contextlib.contextmanager
def without_code_generation() -> Iterator[None]:
    """Run the rewritten graphs node by node, without Inductor's code generation."""

    def interpret(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        replace_views_by_reshapes(gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    with (
        mock.patch.object(kvcompile.compilation.graph_compiler, "compile_fx_inner", interpret),
        mock.patch.object(kvcompile.compilation.plain, "compile_plain", lambda gm, config, inputs: gm.forward),
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
    """Run one case, with a call for each number of tokens in ``steps``. The result records failures."""
    result = CaseResult(architecture, attention, kind)
    try:
        model = architecture_of(architecture).build(architecture, attention)
    except NotBuiltError as error:
        result.skipped = f"{NOT_BUILT}{error}"
        return result
    except ValueError as error:
        if "does not support" not in str(error):
            raise
        result.skipped = NO_ATTENTION.format(attention)
        return result
    case = _Case(model, kind, Policy.load(policy), list(steps))
    with flex_attention_is_not_compiled():
        try:
            case.run(result)
        except Exception as error:
            if case.fails(model):
                result.skipped = f"it does not run with a {kind} cache, compiled or not"
            elif case.fails(torch.compile(model, backend="eager")):
                result.skipped = f"it does not run with a {kind} cache under torch.compile, whatever the backend"
            else:
                result.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if result.error > MAX_ERROR and policy != LOSSLESS:
        lossless = run_case(architecture, attention, kind, LOSSLESS, steps)
        if lossless.failure is None and lossless.error <= MAX_ERROR:
            result.error = lossless.error
            result.notes.append(ROUNDED_ELSEWHERE)
    return result


class _Case:
    """A model, its inputs, and the state of its caches after each call."""

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
        if not result.refusals:  # after a graph break in a layer, Dynamo has no names for sites
            result.rewritten = result.packed
        result.notes = list(report.notes)

    @torch.no_grad()
    def _compiled(self) -> tuple[Tensor, Any, Report]:
        """Run as ``generate()`` does: a static cache is filled in eager code, and the decode steps are compiled."""
        compiled = torch.compile(self.model, backend="kvquant", options={"policy": self.policy, "verify": True})
        cache = self._new_cache()
        logits = []
        sites_of_length: dict[int, Sequence[Site]] = defaultdict(tuple)  # the sites of the graph for so many tokens
        with without_code_generation(), kvcompile.collect_reports() as report:
            encoded = self._encode()
            for step, ids in enumerate(self.ids.split(self.steps, dim=1)):
                eager = step == 0 and self.kind == "static"
                known = len(report.sites)
                logits.append(self._call(self.model if eager else compiled, ids, cache, encoded))
                sites_of_length[ids.shape[1]] = report.sites[known:] or sites_of_length[ids.shape[1]]
                self.left_alone.append(left_alone(sites_of_length[ids.shape[1]]))
                self.packed_after.append({key for key, layer in _layers(cache).items() if _is_packed(layer)})
        return torch.cat(logits, 1), cache, report

    @torch.no_grad()
    def fails(self, model: Any) -> bool:
        """Whether the model fails in this case without kvquant as well."""
        self.packed_after = self.left_alone = [set() for _ in self.steps]
        try:
            self._reference(model)
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
    """The layers of a cache that hold keys, by (0 for self-attention or 1 for cross-attention, index)."""
    return {
        (place, index): layer
        for place, part in enumerate(_parts(cache))
        for index, layer in enumerate(part.layers)
        if isinstance(getattr(layer, "keys", None), Tensor)
    }


def _is_packed(layer: Any) -> bool:
    return isinstance(layer.keys, kvcompile.PackedTensor) and isinstance(layer.values, kvcompile.PackedTensor)


def left_alone(sites: Sequence[Site]) -> set[tuple[int, int]]:
    """The layers without rewritten attention; a layer may have further attention without a cache."""
    rewritten = {site.layer for site in sites if site.rewritten}
    return {(0, site.layer) for site in sites if site.layer is not None and site.layer not in rewritten}


def _by_module(report: Report) -> tuple[int, dict[str, list[str]]]:
    """The number of modules that were rewritten in every graph, and the other modules by reason.

    Attention of an encoder has no cache and is skipped.
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
    """Let updates of these layers of a plain cache store quantized values, as a packed cache does.

    Tokens that the layers already hold are quantized as well. The updates of layers in ``left_alone`` return the new
    keys and values before they are quantized.
    """
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
