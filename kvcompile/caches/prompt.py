"""Eager reading of a prompt into the packed layers of a static cache of Transformers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.spec.new_tokens import NewTokens, reads_packed
from kvcompile.packed.tokens import ExactTokens


@contextmanager
def updating_layers(
    layers: Sequence[Any], *, exact: bool, look: Callable[[Any, Tensor], None] | None = None
) -> Iterator[None]:
    """Inside the ``with`` block, the layers report their new keys, and can attend to many new tokens in full precision.

    Args:
        layers: static layers with packed keys and values.
        exact: whether ``update`` of a layer returns views that read many new tokens in full precision. After the block,
            the views read the stored tokens, and do not keep the new tokens alive.
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
    slots = torch.arange(keys.shape[2], device=keys.device) + layer.cumulative_length  # the update changes this length
    returned = tuple(
        cache.with_new_tokens(NewTokens(x.to(cache.dtype), slots))
        for cache, x in zip(update(), (keys, values), strict=True)
    )
    shared += [weakref.ref(view.exact) for view in returned if view.exact is not None]
    return returned
