"""Packed caches without data: ``empty_like`` on the meta device is packed, as ``to("meta")`` is.

``aot_compile`` of PyTorch stores the guards on a packed cache as a cache without data. A process that loads the
function makes the guards from this cache again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcompile.packed.op_table import handles
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.tensor import PackedTensor

aten = torch.ops.aten


def _empty_like(
    cache: Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **kwargs: Any
) -> Any:
    on_meta = device is not None and torch.device(device).type == "meta"
    return aten._to_copy.default(cache, dtype=dtype, device=device) if on_meta else NotImplemented


for _kind in (PackedTensor, PackedPool, PackedStack, PackedRanges):
    handles(_kind, aten.empty_like.default)(_empty_like)
