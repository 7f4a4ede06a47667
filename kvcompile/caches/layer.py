"""The slots of one static layer of Transformers, packed or plain: store, extend, clear."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from kvcompile.packed.room import extended
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.writes import put_pair


def next_slots(layer: Any, num_new: int) -> Tensor:
    """The slots that ``update`` gives to ``num_new`` tokens if there is room, int64 [num_new]."""
    slots: Tensor = torch.arange(num_new, device=layer.cumulative_length.device) + layer.cumulative_length
    return slots


def append_pair(layer: Any, keys: Tensor, values: Tensor) -> None:
    """Store tokens in the next slots by one launch; :func:`takes_pairs` holds for the layer."""
    put_pair(layer.keys, layer.values, next_slots(layer, keys.shape[2]), keys, values)
    layer.cumulative_length.add_(keys.shape[2])


def extend(layer: Any, room: int) -> None:
    """Give a layer room for ``room`` tokens, more than before. A layer without tensors gets them later."""
    if layer.is_initialized:
        # Nothing changes if there is no memory for the second tensor.
        layer.keys, layer.values = extended(layer.keys, room), extended(layer.values, room)
        for tensor in (layer.keys, layer.values):
            torch._dynamo.mark_static_address(tensor)
    layer.max_cache_len = room


def clear(layer: Any) -> None:
    """Make all slots of a layer empty, in place."""
    for cache in (layer.keys, layer.values):
        (cache.packed if isinstance(cache, PackedTensor) else cache).zero_()
    layer.cumulative_length.zero_()
