"""The kinds of layers in static caches of Transformers."""

from __future__ import annotations

import functools
from typing import Any


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
