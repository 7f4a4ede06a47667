"""Static caches of Transformers that are packed from the start, so that no plain cache is ever allocated."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import nn

from kvcompile.caches.blockwise_window import blockwise_window_class, is_blockwise
from kvcompile.compat.modules import has_compiled_parts, original_module, running_eagerly, uncompiled_call
from kvcompile.compat.tracing import FakeTensorMode, fake_errors_unlogged
from kvcompile.compat.transformers import attends_by_flex, promises_static_caches, with_cache
from kvcompile.errors import KVCompileError, PolicyError, shown
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.packed.room import droppable_tokens
from kvcompile.packed.shard import PackedShard
from kvcompile.packed.tensor import PackedTensor
from kvcompile.parallel.context_parallel import shard_of
from kvcompile.passes.graph.modules import layer_index
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import OnUnsupported, Policy

if TYPE_CHECKING:
    from transformers import Cache, StaticCache

MOST_DIFFERENT = 0.1
"""The largest relative difference of logits, L2, between a static and a dynamic cache.

Ten small models in bfloat16 reach 0.007."""

WHY_NOT_FLEX = (
    "Transformers compiles flex_attention by itself, and this code cannot read packed caches; "
    "call model.set_attn_implementation('sdpa')"
)
"""Why a model that attends by ``flex_attention`` gets no packed cache."""

WHY_NOT_TRAINING = "its dropout is active, as in training; call model.eval()"
"""Why the requests of a model with active dropout get no packed cache."""

TENSORS: tuple[tuple[str, Role], ...] = (("keys", "key"), ("values", "value"))
"""The attributes of a layer that hold its caches, and their roles."""

MOST_TOKENS = 10**12
"""Sequences or tokens of a cache; PyTorch cannot count the bytes of many more."""


@dataclass
class Findings:
    """What :func:`packed_cache` learns about a model.

    Attributes:
        left_plain: maps the index of each layer that its format cannot hold to the reason.
        states: the attributes of modules that became other tensors while the model ran on one token, such as
            ``model.layers.0.temporal_block.conv1d_state``. A recurrent model keeps its states there.
    """

    left_plain: dict[int, str] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


def static_cache(
    model: nn.Module,
    batch_size: int,
    max_len: int,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    context_parallel: Any = None,
) -> StaticCache:
    """A static cache for ``model`` whose layers hold packed keys and values before anything is written to them.

    Pass it to the model, compiled or not, as ``cache`` (``past_key_values`` before Transformers 5.24). A plain
    ``StaticCache`` is also packed, but only by the first compiled call; until then it is in full precision.

    To find the shapes of the layers, the model runs on one token without computing or allocating anything. A model
    whose code needs values, such as some mixtures of experts, computes this token.

    Args:
        model: a decoder of Hugging Face Transformers, on the device and in the dtype that it will run in.
        batch_size: number of sequences.
        max_len: number of tokens that a layer has room for.
        policy: any argument of :meth:`Policy.load`. A compiled model keeps the formats of a packed cache, even if its
            own policy differs.
        context_parallel: the ranks that divide the tokens of every layer, as for :func:`kvcompile.kvquant`.

    Returns:
        A cache of ``batch_size`` sequences. Layers with a sliding window and layers whose rule says ``auto`` are plain
        layers of Transformers, allocated at their first write. ``generate()`` of a model that is prepared by
        :func:`kvcompile.compile` makes caches with packed windows.

    Raises:
        PolicyError: the policy is invalid, or one of its formats cannot hold the keys or values of a layer.
        KVCompileError: the model does not run with a static cache, computes other logits with it, or attends by
            ``flex_attention``; or autocast gives its keys and values different dtypes; or a number is not positive.
    """
    policy, shard = Policy.load(policy), shard_of(context_parallel)
    for name, number in (("batch_size", batch_size), ("max_len", max_len)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise KVCompileError(f"static_cache: {name}: expected a whole number of at least 1, got {shown(number)}")
        if number > MOST_TOKENS:
            raise KVCompileError(f"static_cache: {name}: give at most {MOST_TOKENS}, got {shown(number)}")
    config: Any = getattr(model, "config", None)
    if config is None:
        raise KVCompileError(
            f"static_cache: {type(model).__name__} has no config of Transformers; make its caches with "
            "kvcompile.PackedTensor.zeros, or let compiled steps pack the caches that it makes itself"
        )
    if attends_by_flex(config):
        raise KVCompileError(f"static_cache: {WHY_NOT_FLEX}")
    return packed_cache(model, batch_size, max_len, policy, shard)


def packed_cache(
    model: nn.Module,
    batch_size: int,
    max_len: int,
    policy: Policy,
    shard: ContextShard | None = None,
    *,
    blockwise: bool = False,
    on_unsupported: OnUnsupported = "error",
    findings: Findings | None = None,
) -> StaticCache:
    """The cache of :func:`static_cache`, with the same errors.

    Args:
        model, batch_size, max_len, policy: as there.
        shard: this rank's share of the tokens; None if it holds all tokens.
        blockwise: whether windows move by whole blocks (:mod:`kvcompile.caches.blockwise_window`). They are packed too.
        on_unsupported: whether a layer that its format cannot hold is an error. Otherwise it stays plain.
        findings: gets what is learned about the model.
    """
    from transformers import StaticCache

    config: Any = model.config
    found = Findings() if findings is None else findings
    filled = _filled(model, config, batch_size, max_len, found)
    cache = StaticCache(config=config, max_cache_len=max_len)
    if len(filled.layers) != len(cache.layers):
        raise KVCompileError(
            f"static_cache: {type(model).__name__} adds layers to its cache while it runs; use a dynamic cache"
        )
    windows = windows_of(config, cache) if blockwise else {}
    packed = {index for index, layer in enumerate(cache.layers) if is_full(layer) or index in windows}
    layouts = _layouts_by_layer(model, filled, policy, found)
    if on_unsupported == "error" and (unsupported := packed & found.left_plain.keys()):
        index = min(unsupported)
        raise PolicyError(
            f"static_cache: layer {index}: {found.left_plain[index]}; give this layer another format or `dtype: auto`"
        )
    layouts = {index: pair for index, pair in layouts.items() if index in packed}
    for index in layouts if shard is not None else ():
        _check_split(layouts[index], index)
    _make_blockwise(cache, max_len, windows, layouts)
    _let_unwritten_grow(cache, filled)
    for index, pair in layouts.items():
        _pack(cache.layers[index], filled.layers[index], pair, shard)
    return cache


def windows_of(config: Any, cache: StaticCache) -> dict[int, int]:
    """Maps each layer of a static cache with a window to the tokens of this window in the model's config.

    It is empty if windows differ, or if one of these layers also has states. Layers with windows share a mask, so all
    of them must move their tokens alike.
    """
    from transformers import StaticCache

    unlimited: list[Any] = StaticCache(config=config, max_cache_len=MOST_TOKENS).layers  # they have no memory
    windows = {index: each.max_cache_len for index, each in enumerate(unlimited) if getattr(each, "is_sliding", False)}
    are_alike = len(unlimited) == len(cache.layers) and len(set(windows.values())) == 1
    return windows if are_alike and all(is_window(cache.layers[index]) for index in windows) else {}


def _make_blockwise(
    cache: StaticCache, max_len: int, windows: Mapping[int, int], layouts: Mapping[int, tuple[PackedLayout, ...]]
) -> None:
    """Replace layers with windows of an empty cache by blockwise ones, which all drop their tokens at the same time."""
    drops = droppable_tokens(layout.residual for index in windows for layout in layouts.get(index, ()))
    for index, window in windows.items():
        cache.layers[index] = blockwise_window_class()(max_len, window, drops)


def _let_unwritten_grow(cache: StaticCache, filled: StaticCache) -> None:
    """Layers without a window that a token of text does not write get the room of whatever is written to them.

    They hold something else, such as the image that Llama 3.2 Vision reads.
    """
    layer: Any
    for index, layer in enumerate(filled.layers):
        if is_full(layer) and not layer.is_initialized:
            cache.layers[index] = growing_layer_class()()


def _filled(model: nn.Module, config: Any, batch_size: int, max_len: int, found: Findings) -> StaticCache:
    """A static cache that the model has filled with one token.

    Its tensors have shapes, dtypes and devices, but no memory. A model whose code needs values, such as the routing of
    some mixtures of experts, computes one real token instead, in a cache with room for this token.
    """
    from transformers import StaticCache

    ids = torch.zeros((batch_size, 1), dtype=torch.int64, device=next(model.parameters()).device)
    try:
        cache = _checking_updates(StaticCache(config=config, max_cache_len=max_len), model)
        with _keeping_states(model, found), fake_errors_unlogged(), FakeTensorMode(allow_non_fake_inputs=True):
            _run_eagerly(model, cache, input_ids=ids)
        needs_values = False
    except KVCompileError:
        raise
    except Exception as error:
        try:
            cache, needs_values = _checking_updates(StaticCache(config=config, max_cache_len=1), model), True
            with _keeping_states(model, found):
                _run_eagerly(model, cache, input_ids=ids)
        except (KVCompileError, torch.OutOfMemoryError):
            raise
        except Exception:
            raise _does_not_run(model, error) from error
    if needs_values or not promises_static_caches(model):
        _check_outputs(model, config, max_len)
    return cache


def _checking_updates(cache: StaticCache, model: nn.Module) -> StaticCache:
    """``cache``, whose layers raise KVCompileError before a model writes anything to them that they cannot hold."""
    layer: Any
    for layer in cache.layers:
        if isinstance(layer, full_layer_classes()):
            layer.update = _CheckedUpdate(layer, type(model).__name__)
    return cache


class _CheckedUpdate:
    """The ``update`` of a static layer while a model runs on one token.

    The layer may have room for this token only. On a GPU a write past its end would end all work of the process. And a
    static layer has one dtype for keys and values, which operators on tensors without memory do not check.
    """

    def __init__(self, layer: Any, model: str) -> None:
        self._layer, self._model, self._num_tokens = layer, model, 0

    def __call__(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._num_tokens += keys.shape[2]
        if self._num_tokens > 1:
            raise KVCompileError(
                f"static_cache: {self._model} writes {self._num_tokens} tokens for one token of input, and a static "
                "cache has room for the tokens of the input; use a dynamic cache"
            )
        if keys.dtype != values.dtype:
            raise KVCompileError(
                f"static_cache: {self._model} computes keys in {keys.dtype} and values in {values.dtype}, and a static "
                "layer has one dtype for both; call the model outside of torch.autocast, for example after "
                "model.to(torch.bfloat16)"
            )
        return type(self._layer).update(self._layer, keys, values, *args, **kwargs)


@contextlib.contextmanager
def _keeping_states(model: nn.Module, found: Findings | None = None) -> Iterator[None]:
    """New tensors in the attributes of modules are replaced by what was there before, and noted in ``found``.

    A recurrent model may keep its states there, outside of its cache.
    """
    before = [(name, vars(module), dict(vars(module))) for name, module in model.named_modules()]
    states = []
    try:
        yield
    finally:
        for module, attributes, earlier in before:
            for name in [name for name, value in dict(attributes).items() if isinstance(value, torch.Tensor)]:
                if name not in earlier or earlier[name] is not attributes[name]:
                    states.append(f"{module}.{name}".lstrip("."))
                if name in earlier:
                    attributes[name] = earlier[name]
                else:
                    del attributes[name]
        if found is not None:
            found.states = states


def _does_not_run(model: nn.Module, error: Exception) -> KVCompileError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return KVCompileError(
        f"static_cache: {type(model).__name__} does not run on one token with a static cache ({reason}); pass "
        "its caches packed with kvcompile.PackedTensor.zeros instead"
    )


def _check_outputs(model: nn.Module, config: Any, max_len: int) -> None:
    """Compare the logits after four tokens with a static cache of up to 1024 tokens and with a dynamic cache.

    Raises:
        KVCompileError: they differ, for example because the model attends to all tokens that its cache has room for; or
            the model does not run with a static cache; or active dropout makes its logits random.
    """
    from transformers import DynamicCache, StaticCache

    if has_active_dropout(model):
        raise KVCompileError(
            f"static_cache: logits of {type(model).__name__} are compared with a static and a dynamic cache, and "
            f"{WHY_NOT_TRAINING} before you make the cache"
        )
    room = max(min(max_len, 1024), 4)
    caches = StaticCache(config=config, max_cache_len=room), DynamicCache(config=config)
    try:
        static, dynamic = (_logits(model, cache) for cache in caches)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _does_not_run(model, error) from error
    if not (static - dynamic).norm() <= MOST_DIFFERENT * dynamic.norm():
        raise KVCompileError(
            f"static_cache: {type(model).__name__} computes other logits with a static cache than with a dynamic one; "
            "use a dynamic cache, which compiled steps pack"
        )


def _logits(model: nn.Module, cache: Cache) -> torch.Tensor:
    """The logits after three tokens and after a fourth, of two sequences. The first one begins with padding."""
    device = next(model.parameters()).device
    mask = torch.ones((2, 4), dtype=torch.int64, device=device)
    mask[0, 0] = 0
    inputs = {"input_ids": torch.tensor([0, 1, 2, 0], device=device).expand(2, 4)}
    if "position_ids" in inspect.signature(original_module(model).forward).parameters:
        # Without them some models give the fourth token the positions of all tokens in the mask (Qwen3-VL-MoE).
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    logits = []
    with _keeping_states(model):
        for begin, end in ((0, 3), (3, 4)):
            tokens = {name: x[:, begin:end] for name, x in inputs.items()}
            logits.append(_run_eagerly(model, cache, attention_mask=mask[:, :end], **tokens)[0][:, -1:])
    return torch.cat(logits).float()


def _run_eagerly(model: nn.Module, cache: Cache, **inputs: torch.Tensor) -> Any:
    # Compiled code would compile for this call, or run kernels on tensors without memory.
    model = original_module(model)
    eagerly = running_eagerly() if has_compiled_parts(model) else contextlib.nullcontext()  # it affects all threads
    with torch.no_grad(), eagerly, _without_cached_casts():
        return uncompiled_call(model)(use_cache=True, **with_cache(model, cache), **inputs)


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast casts weights anew, and keeps none: weights without memory would stay in its cache."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on this device in this thread; None if autocast is off."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def has_active_dropout(model: nn.Module) -> bool:
    """Whether a module drops random elements: its name or the name of its probability contains ``dropout``."""
    return any(
        isinstance(value, float) and value > 0 and "dropout" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        if module.training
        for name, value in vars(module).items()
    )


def is_full(layer: Any) -> bool:
    """Whether a static layer has room for all tokens: it has no window. It may have states beside keys and values."""
    return type(layer) in full_layer_classes()


@functools.cache
def full_layer_classes() -> tuple[Any, ...]:
    """The classes of Transformers for :func:`is_full`. The first one has keys and values alone."""
    from transformers import cache_utils

    both = getattr(cache_utils, "LinearAttentionAndStaticFullAttentionLayer", None)
    return cache_utils.StaticLayer, *(() if both is None else (both,))


@functools.cache
def growing_layer_class() -> type:
    """The class of layers whose room is what is written to them."""
    from transformers.cache_utils import DynamicLayer

    return DynamicLayer


def is_window(layer: Any) -> bool:
    """Whether a layer is the static layer of Transformers that has a window, and no states beside it."""
    from transformers.cache_utils import StaticSlidingWindowLayer

    return type(layer) is StaticSlidingWindowLayer


def packed_layers(cache: Cache) -> list[Any]:
    """The layers of a static cache that are packed: without a window, or with a window that moves by whole blocks."""
    return [layer for layer in getattr(cache, "layers", ()) if is_packed(layer)]


def is_packed(layer: Any) -> bool:
    """Whether a layer of :func:`packed_layers` has packed keys and values."""
    return (is_full(layer) or is_blockwise(layer)) and isinstance(layer.keys, PackedTensor)


def attention_modules(model: nn.Module) -> dict[int, str]:
    """Maps each layer index to the name of its attention module: the innermost module with that layer index."""
    names = [name for name, module in model.named_modules() if getattr(module, "layer_idx", None) is not None]
    innermost = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return {index: name for name in innermost if (index := layer_index(name)) is not None}


def why_not_held(layout: PackedLayout, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a layout cannot hold a cache of ``dtype`` on ``device``; None if it can."""
    reason = layout.unsupported(dtype) or layout.unsupported_on(device)
    return None if reason is None else f"{layout.format_name} cannot hold its {layout.role}s: {reason}"


def _why_not_held(filled: Any, layouts: tuple[PackedLayout, ...]) -> str | None:
    """Why the layouts of keys or values cannot hold those of a layer like ``filled``; None if they can."""
    reasons = (why_not_held(layout, filled.keys.dtype, filled.keys.device) for layout in layouts)
    return next((reason for reason in reasons if reason is not None), None)


def _layouts_by_layer(
    model: nn.Module, filled: StaticCache, policy: Policy, found: Findings
) -> dict[int, tuple[PackedLayout, ...]]:
    """The layouts of the keys and values of the layers that ``policy`` packs, but for those that it leaves plain."""
    modules, layouts = attention_modules(model), {}
    layer: Any
    for index, layer in enumerate(filled.layers):
        formats = policy.formats_for(modules.get(index, ""), index, len(filled.layers))
        if formats is None or not isinstance(layer, full_layer_classes()) or not layer.is_initialized:
            continue
        pair = _layouts(layer, formats)
        if (reason := _why_not_held(layer, pair)) is None:
            layouts[index] = pair
        else:
            found.left_plain[index] = reason
    return layouts


def _layouts(filled: Any, formats: FormatPair) -> tuple[PackedLayout, ...]:
    """The layouts of the keys and values of a layer like ``filled``."""
    roles_and_caches = zip(TENSORS, _both(filled), strict=True)
    return tuple(formats.layout(role, plain.shape[3], filled.keys.dtype) for (_, role), plain in roles_and_caches)


def _check_split(layouts: tuple[PackedLayout, ...], index: int) -> None:
    """Raise PolicyError unless ranks can split a layer of these layouts."""
    for layout in layouts:
        if layout.why_not_split is not None:
            raise PolicyError(
                f"static_cache: layer {index}: ranks cannot split this cache: {layout.why_not_split}; choose a format "
                "that is not calibrated, without residual_length and sink_tokens, such as int4_per_token_head"
            )


def _pack(layer: Any, filled: Any, layouts: tuple[PackedLayout, ...], shard: ContextShard | None) -> None:
    """Initialise a layer like ``filled``, which may have room for one token only, with packed keys and values."""
    dtype, device, max_len = filled.keys.dtype, filled.keys.device, layer.max_cache_len
    examples = (torch.empty((0, *x.shape[1:2], 1, *x.shape[3:]), dtype=dtype, device=device) for x in _both(filled))
    layer.lazy_initialization(*examples)  # with zero sequences, which need no memory
    layer.batch_size = filled.batch_size
    if is_full(layer):  # a blockwise window has other counts
        layer.__dict__.update({name: value for name, value in vars(filled).items() if isinstance(value, int)})
        layer.max_cache_len = max_len
    for (name, _), layout, plain in zip(TENSORS, layouts, _both(filled), strict=True):
        packed: torch.Tensor
        shape = (*plain.shape[:2], max_len, plain.shape[3])
        if shard is None:
            packed = PackedTensor.zeros(shape, dtype, layout, device=device)
        else:
            packed = PackedShard.zeros(shape, dtype, layout, shard, device=device)
        torch._dynamo.mark_static_address(packed)
        setattr(layer, name, packed)


def _both(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.keys, layer.values
