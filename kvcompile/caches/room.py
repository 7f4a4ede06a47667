"""Room for the tokens of a request in a cache that the caller passes to ``generate()``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvcompile.caches.blockwise_window import blockwise_window_class, is_blockwise
from kvcompile.caches.layer import extend
from kvcompile.caches.layer_kinds import is_full, is_window
from kvcompile.caches.static import MOST_TOKENS, TENSORS, attention_modules, packed_layers, windows_of
from kvcompile.errors import KVCompileError
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, Residual, num_blocks
from kvcompile.packed.room import droppable_tokens
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy


def room_for(num_tokens: int, room: int = 0) -> int:
    """The capacity of a new cache for ``num_tokens``, or of a cache of capacity ``room`` that grows to hold them."""
    return num_blocks(max(num_tokens, room * 3 // 2)) * BLOCK_TOKENS


def make_room(cache: Any, model: nn.Module, policy: Policy, num_tokens: int, *, is_on_top: bool) -> None:
    """Give a static cache room for ``num_tokens`` tokens, in place, and let its windows move by whole blocks.

    A packed cache that is too short grows by at least half, so that a conversation seldom waits for a reallocation.
    Windows that were cut to the length of the cache grow with it, up to the window of the model. A plain cache that has
    layers without windows does not grow. Caches that are not static, or are offloaded, are not changed.

    Args:
        cache: any cache.
        model: the model that will use it.
        policy: the formats of its layers, if compiled steps pack them.
        num_tokens: number of tokens that need room.
        is_on_top: whether ``num_tokens`` excludes the tokens that the cache already holds.

    Raises:
        KVCompileError: the cache is too short, and it has a window that was cut and has already moved.
    """
    move_by_blocks(cache, model, policy)
    if not _is_static(cache):
        return
    config: Any = model.config
    layers: list[Any] = cache.layers
    full, blockwise = list(filter(is_full, layers)), list(filter(is_blockwise, layers))
    if full and not packed_layers(cache):
        return
    room = min((int(layer.max_cache_len) for layer in full or blockwise), default=None)
    needed = num_tokens + (int(cache.get_seq_length()) if is_on_top else 0)
    if room is None or room >= needed:
        return
    longer = room_for(needed, room)
    if any(layers[index].max_cache_len == room < window for index, window in windows_of(config, cache).items()):
        raise KVCompileError(
            f"generate: the given cache has room for {room} tokens, this request may need {needed}, and a window that "
            "was cut to this room cannot be extended any more; make a longer cache with kvcompile.static_cache"
        )
    # A request that ran out of memory may have extended some layers.
    for layer in full:
        if layer.max_cache_len < longer:
            extend(layer, longer)
    for layer in blockwise:
        layer.widen(longer)


def move_by_blocks(cache: Any, model: nn.Module, policy: Policy) -> None:
    """Replace Transformers' layers with windows in a static cache by blockwise ones, in place.

    Nothing changes if a window was cut to a short cache and has already lost tokens, or in any other cache.

    Args:
        cache, model, policy: as for :func:`make_room`.
    """
    if not _is_static(cache) or not any(map(is_window, cache.layers)):
        return
    config: Any = model.config
    layers: list[Any] = cache.layers
    windows = windows_of(config, cache)
    if any(_has_lost_tokens(layers[index], window) for index, window in windows.items()):
        return
    drops = droppable_tokens(_residuals(layers, windows, model, policy))
    lengths = [layer.max_cache_len for layer in layers if is_full(layer)]
    lengths += [
        layers[index].max_cache_len for index, window in windows.items() if layers[index].max_cache_len < window
    ]
    for index, window in windows.items():
        longest = int(max(lengths, default=MOST_TOKENS))
        layers[index] = blockwise_window_class().replacing(layers[index], longest, window, drops)


def _is_static(cache: Any) -> bool:
    from transformers import StaticCache

    return isinstance(cache, StaticCache) and not getattr(cache, "offloading", False)


def _has_lost_tokens(layer: Any, window: int) -> bool:
    """Whether a window that was cut to a short cache has already moved."""
    return bool(layer.max_cache_len < min(window, layer.get_seq_length()))


def _residuals(
    layers: list[Any], windows: dict[int, int], model: nn.Module, policy: Policy
) -> Iterator[Residual | None]:
    """The tokens in full precision of the layers with ``windows``, packed now or by a later compiled step."""
    modules = attention_modules(model)
    for index in windows:
        formats = policy.formats_for(modules.get(index, ""), index, len(layers))
        for name, role in TENSORS:
            tensor = getattr(layers[index], name, None)
            if isinstance(tensor, PackedTensor):
                yield tensor.packed_layout.residual
            elif formats is not None:
                yield formats.residual(role, torch.float32)
