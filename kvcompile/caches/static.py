"""Static caches of Transformers that are packed from the start, so that no plain cache is ever allocated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
from torch import nn

from kvcompile.caches.blockwise_window import blockwise_window_class, is_blockwise
from kvcompile.caches.layer_kinds import full_layer_classes, growing_layer_class, is_full, is_window
from kvcompile.caches.probe import Findings, filled_by
from kvcompile.compat.transformers import attends_by_flex
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

WHY_NOT_FLEX = (
    "Transformers compiles flex_attention by itself, and this code cannot read packed caches; "
    "call model.set_attn_implementation('sdpa')"
)
"""Why a model that attends by ``flex_attention`` gets no packed cache."""

TENSORS: tuple[tuple[str, Role], ...] = (("keys", "key"), ("values", "value"))
"""The attributes of a layer that hold its caches, and their roles."""

MOST_TOKENS = 10**12
"""Sequences or tokens of a cache; PyTorch cannot count the bytes of many more."""


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
    filled = filled_by(model, config, batch_size, max_len, found)
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


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast casts on this device in this thread; None if autocast is off."""
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


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
