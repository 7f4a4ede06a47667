"""What a graph changed of the values that it was given in the place of a packed cache is stored, and nothing else.

Quantized once more at every call, the values of tokens that nobody wrote would drift away from what was written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedStack, unstacked
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.writes import encoded, put


def store_changes(cache: Tensor, values: Tensor) -> None:
    """Writes to ``cache`` those vectors of ``values`` that are not its own, and leaves the bytes of the others alone.

    Its own are dequantized for this anew, and not kept from before the graph ran: the same bytes give the same bits,
    and of all caches of a graph only one at a time is there twice.

    Args:
        cache: any packed cache, unchanged since its values were handed out, or a plain part of a stack.
        values: these values, which were changed since; of the shape of ``cache``.
    """
    if isinstance(cache, PackedStack):
        for part, own in zip(cache.parts, unstacked(values, cache.stacked_dims), strict=True):
            store_changes(part, own)
    elif isinstance(cache, PackedPool):
        store_changes(cache.slots, (values.transpose(1, 2) if cache.heads_first else values).flatten(0, 1))
    elif isinstance(cache, PackedTensor):
        _store_changed_vectors(cache, values)
    else:
        cache.copy_(values)


def _store_changed_vectors(cache: PackedTensor, values: Tensor) -> None:
    old, new = (cache.to_stored_axes(x) for x in (cache.dequantize(), values))
    sequence, head, token = (_bits(new) != _bits(old)).any(-1).nonzero(as_tuple=True)
    if token.numel():
        vectors = encoded(cache, new[sequence, head, token])
        put(cache, cache.packed_for_write(), (sequence, head, cache.start + token), vectors)


def _bits(x: Tensor) -> Tensor:
    """``x`` as integers: a NaN is equal to itself."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
