"""Eager reading of a prompt into the packed layers of a static cache of Transformers.

The first prompt attends only to its own tokens. An empty layer therefore gives attention the new keys and values
themselves, and announces a mask for them alone, as a layer of a growing cache does. Later prompts read packed tokens
and attend to their own tokens through views of the cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from kvcompile.caches.blockwise_window import is_blockwise
from kvcompile.caches.layer import append_pair, next_slots
from kvcompile.caches.layer_kinds import full_layer_classes, is_full
from kvcompile.caches.static import is_packed
from kvcompile.kernels.spec.new_tokens import NewTokens, reads_packed
from kvcompile.packed.tokens import ExactTokens
from kvcompile.packed.writes import takes_pairs


def expect_first_prompt(cache: Any) -> None:
    """Let the layers of an empty static cache announce masks for the first prompt alone.

    :func:`updating_layers` then gives attention the new keys and values, in full precision. Few tokens are read packed
    (:func:`reads_packed`), so that their mask covers the whole layer. All layers without a window share a mask, and so
    do all layers with one, so nothing changes for them if one of them is plain.
    """
    for kind in (is_full, is_blockwise):
        layers = list(filter(kind, cache.layers))
        if all(map(is_packed, layers)):
            for layer in layers:
                layer.get_mask_sizes = partial(_mask_sizes, layer)


def expects_first_prompt(layers: Iterable[Any], num_tokens: int) -> bool:
    """Whether attention of ``num_tokens`` queries will get the new keys and values of ``layers`` themselves."""
    return not reads_packed(num_tokens) and any("get_mask_sizes" in vars(layer) for layer in layers)


def expect_other_tokens(layers: Iterable[Any]) -> None:
    """Undo :func:`expect_first_prompt` for ``layers``, which are no longer empty."""
    for layer in layers:
        vars(layer).pop("get_mask_sizes", None)


def takes_pairs_of_prompt(layer: Any, batch_size: int, num_tokens: int) -> bool:
    """Whether one launch can write the keys and values of an expected first prompt, in place of the layer's ``update``.

    The layer expects it: see :func:`expects_first_prompt`.
    """
    return (
        (is_blockwise(layer) or type(layer).update is full_layer_classes()[0].update)
        and takes_pairs(layer.keys, layer.values)
        and batch_size == layer.keys.shape[0]
        and num_tokens <= layer.keys.shape[2]
    )


def is_made_for_layers(mask: Any) -> bool:
    """Whether a mask of ``generate()`` has the sizes that layers announced.

    A dict has masks that are made already; those of states have two dimensions. A model that gets a mask of two
    dimensions alone makes its masks itself, and may give its keys any length, such as the room of the cache in Bloom.
    """
    return mask is None or isinstance(mask, dict) or (isinstance(mask, Tensor) and mask.dim() == 4)


def _mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """The number of keys that ``query_length`` queries of a first prompt read, and the position of the first key."""
    return type(layer).get_mask_sizes(layer, query_length) if reads_packed(query_length) else (query_length, 0)


@contextmanager
def updating_layers(
    layers: Sequence[Any], *, exact: bool, look: Callable[[Any, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside the ``with`` block, the layers report their new keys, and can attend to many new tokens in full precision.

    Args:
        layers: static layers with packed keys and values.
        exact: whether ``update`` of a layer lets attention read many new tokens in full precision. It returns these
            tokens alone if the layer expects a first prompt, and otherwise views of the cache. After the block, the
            views read the stored tokens, and do not keep the new tokens alive.
        look: called with the layer and its new keys [batch, num_kv_heads, n, head_dim] before they are stored.
    """
    shared: list[weakref.ref[ExactTokens]] = []
    changed = layers if exact or look is not None else ()
    for layer in changed:
        layer.update = partial(_update, layer, exact, look, shared)
    try:
        yield
    finally:
        for layer in changed:
            del layer.update
        expect_other_tokens(layers)
        for reference in shared:
            if (tokens := reference()) is not None:
                tokens.new = None


def _update(
    layer: Any,
    exact: bool,
    look: Callable[[Any, Tensor], None] | None,
    shared: list[weakref.ref[ExactTokens]],
    keys: Tensor,
    values: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    if look is not None:
        look(layer, keys)
    update = partial(type(layer).update, layer, keys, values, *args, **kwargs)
    if not exact or reads_packed(keys.shape[2]):
        packed: tuple[Tensor, ...] = update()
        return packed
    if expects_first_prompt([layer], keys.shape[2]):
        if takes_pairs_of_prompt(layer, keys.shape[0], keys.shape[2]):
            append_pair(layer, keys, values)
            if is_blockwise(layer):
                layer.cumulative_length_int += keys.shape[2]
        else:
            update()
        return keys.to(layer.keys.dtype), values.to(layer.values.dtype)
    if is_blockwise(layer) and not layer.make_room(keys.shape[2]):
        plain: tuple[Tensor, ...] = update()
        return plain
    slots = next_slots(layer, keys.shape[2])  # the update changes the length
    returned = tuple(
        cache.with_new_tokens(NewTokens(x.to(cache.dtype), slots))
        for cache, x in zip(update(), (keys, values), strict=True)
    )
    shared += [weakref.ref(view.exact) for view in returned if view.exact is not None]
    return returned
