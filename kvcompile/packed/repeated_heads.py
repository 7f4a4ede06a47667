"""Copies of packed caches with repeated heads, whose plain values are computed only if an operator needs them.

Code without grouped-query attention (``repeat_kv`` of Transformers) repeats the KV heads first:
``x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)``. The reshape is a copy. Attention on packed data reads
each KV head for its whole group, so it needs only the bytes of the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.tensors import new_wrapper
from kvcompile.kernels.layout.axes import STORED_AXES
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.op_table import handles
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor

aten = torch.ops.aten


class RepeatedHeads(PackedSubclass):
    """A copy of a cache [b, h, t, d] with n consecutive copies of each head: [b, h, n, t, d] or [b, h * n, t, d].

    The copy begins as a copy of the packed bytes. The first operator other than attention replaces the bytes by plain
    values, which all later operators read and write.

    Attributes:
        cache: the packed copy, which nothing else refers to; None once there are plain values.
    """

    cache: PackedTensor | None

    @staticmethod
    def __new__(cls, data: Tensor, size: Sequence[int]) -> RepeatedHeads:
        """A copy of shape ``size`` from ``data``: a packed cache, or plain values of that shape."""
        return new_wrapper(cls, size, dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor, size: Sequence[int]) -> None:
        is_packed = isinstance(data, PackedTensor)
        self.cache = data if is_packed else None  # type: ignore[assignment]
        self._plain = None if is_packed else data

    @property
    def plain(self) -> Tensor:
        """The plain values, contiguous. Writes to them are writes to this copy."""
        if self._plain is None:
            assert self.cache is not None
            repeats = self.numel() // max(self.cache.numel(), 1)
            sizes = (*self.cache.shape[:2], repeats, *self.cache.shape[2:])
            self._plain = self.cache.dequantize().unsqueeze(2).expand(sizes).contiguous().view(self.shape)
            self.cache = None
        return self._plain

    @property
    def data_is_traced(self) -> bool:
        return type(self._plain) is not Tensor if self.cache is None else self.cache.data_is_traced

    def dequantize(self) -> Tensor:
        return self.plain

    def data_ptr(self) -> int:
        """The address of the plain values, for kernels that take addresses."""
        return self.plain.data_ptr()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> RepeatedHeads:
        return RepeatedHeads(inner["plain"], size)

    def _stable_hash_for_caching(self) -> str:
        """The key of this input in AOTAutograd's cache of traced graphs. AOTAutograd calls this method."""
        return str((type(self).__name__, tuple(self.shape), self.dtype, self.device))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RepeatedHeads(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def unrepeated(x: Tensor) -> PackedTensor | None:
    """The packed cache [b, h, t, d] behind ``x`` [b, h * n, t, d], whose heads repeat the cache's heads; else None."""
    if isinstance(x, RepeatedHeads):
        return x.cache if x.dim() == 4 else None
    if isinstance(x, LiveView) and x.dim() == 4:  # the repeated heads of a single head may be a view
        shows = _shows_repeated_heads(x, (x.shape[0], 1, *x.shape[1:]), (x.stride(0), 0, *x.stride()[1:]))
        return x.source if shows else None  # type: ignore[return-value]
    return x if isinstance(x, PackedTensor) and x.axes == STORED_AXES else None


def _shows_repeated_heads(view: LiveView, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether ``view``, with this shape and these strides, is a packed cache [b, h, t, d] expanded to [b, h, n, t, d].

    Strides and offset prove it. The strides of dimensions of size 1 have no meaning.
    """
    cache = view.source
    if not isinstance(cache, PackedTensor) or cache.axes != STORED_AXES or len(shape) != 5 or stride[2] != 0:
        return False
    if view.offset != 0 or view.dtype != cache.dtype or (*shape[:2], *shape[3:]) != tuple(cache.shape):
        return False
    steps = zip(cache.shape, (*stride[:2], *stride[3:]), cache.stride(), strict=True)
    return all(extent == 1 or step == expected for extent, step, expected in steps)


@handles(LiveView, aten.clone.default)
def _clone(view: LiveView, *, memory_format: torch.memory_format | None = None) -> Any:
    """``reshape`` clones a view that shows repeated heads before it joins their dimensions."""
    if view.data_is_traced or memory_format != torch.contiguous_format:
        return NotImplemented
    if not _shows_repeated_heads(view, view.shape, view.stride()):
        return NotImplemented
    source, cache = view.source, view.source.clone()
    assert isinstance(source, PackedTensor)
    assert isinstance(cache, PackedTensor)
    cache.exact = source.exact  # nothing is ever written to the copy
    return RepeatedHeads(cache, view.shape)


@handles(RepeatedHeads, aten._unsafe_view.default)
def _unsafe_view(x: RepeatedHeads, size: Sequence[int]) -> Any:
    """The end of ``reshape``; ``x`` is not used afterwards."""
    if x.cache is None or x.dim() != 5:
        return NotImplemented
    batch, heads, repeats, tokens, head_dim = x.shape
    if tuple(size) != (batch, heads * repeats, tokens, head_dim):
        return NotImplemented
    return RepeatedHeads(x.cache, size)
