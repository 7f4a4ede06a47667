"""Live views: views of packed caches without a packed form, such as ``unsqueeze``, ``flatten`` or a slice of channels.

A live view holds the cache and the view operators, but no values. A read dequantizes the cache and applies the
operators, so it always returns the current values. A write dequantizes, computes and stores
(:mod:`kvcompile.packed.in_place`). All of this also works after the cache has become a plain tensor in place
(``unpack`` in :mod:`kvcompile.call.adoption`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.tensors import new_wrapper, without_modes
from kvcompile.compat.tracing import detect_fake_mode
from kvcompile.packed.op_table import general_rule, handles, is_view_op
from kvcompile.packed.pool import PackedPool
from kvcompile.packed.stack import PackedRanges, PackedStack
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.tracing import ends_functional_graph, is_functionalized
from kvcompile.packed.view_geometry import ViewStep, frozen, geometry_of, is_permuted

aten = torch.ops.aten


class LiveView(PackedSubclass):
    """A view, without a packed form, of a packed cache or of a packed view.

    Attributes:
        source: the packed tensor that this view shows. A call may unpack it; it is a plain tensor then.
        steps: the view operators that lead from the source to this view.
        offset: storage offset of the view relative to the source, in elements of a plain cache; None if unknown.
    """

    source: Tensor

    @staticmethod
    def __new__(cls, source: Tensor, steps: tuple[ViewStep, ...], like: Tensor, offset: int | None = None) -> LiveView:
        """The view has the shape, strides and dtype of ``like``."""
        return new_wrapper(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=source.device)

    def __init__(self, source: Tensor, steps: tuple[ViewStep, ...], like: Tensor, offset: int | None = None) -> None:
        self.source = source
        self.steps = steps
        self.offset = offset

    @property
    def data_is_traced(self) -> bool:
        return _is_traced(self.source)

    def dequantize(self) -> Tensor:
        return self.of(copy_of_values(self.source))

    def of(self, values: Tensor) -> Tensor:
        """Applies the view operators to ``values``, a plain tensor with the shape of the source."""
        for step in self.steps:
            values = step.of(values)
        return values

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if any(step.is_symbolic for step in self.steps) and _is_functionalized(self.source):
            # AOTAutograd would keep the symbols of this trace and use them for every later call.
            raise NotImplementedError(
                "a compiled graph returns a view of a packed cache whose size is only known at run time; return the "
                "cache and view it outside, or return a clone() of the view"
            )
        return ["source"], (self.steps, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> LiveView:
        steps, dtype = context
        with without_modes():
            like = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return LiveView(inner["source"], steps, like)

    def _stable_hash_for_caching(self) -> str:
        """The key of this input in AOTAutograd's cache of traced graphs. AOTAutograd calls this method."""
        source: Any = self.source
        key = source._stable_hash_for_caching() if _is_packed(source) else geometry_of(source)
        return str((tuple(self.shape), self.stride(), self.dtype, self.steps, key))

    def __repr__(self) -> str:  # type: ignore[override]
        source = f"view of a {type(self.source).__name__} {tuple(self.source.shape)}"
        if self.data_is_traced:
            return f"LiveView(shape={tuple(self.shape)}, {source})"
        return f"LiveView({self.dequantize()!r}, {source})"

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def copy_of_values(source: Tensor) -> Tensor:
    """The values of the source of a live view, as a plain tensor in memory of its own."""
    return source.dequantize() if isinstance(source, PackedSubclass) else source.clone()


def _is_packed(source: Tensor) -> bool:
    return isinstance(source, PackedSubclass)


def _is_traced(source: Tensor) -> bool:
    return isinstance(source, PackedSubclass) and source.data_is_traced


def _is_functionalized(cache: Tensor) -> bool:
    if isinstance(cache, PackedTensor):
        return is_functionalized(cache.packed)
    parts = cache.parts if isinstance(cache, PackedStack) else [cache.slots] if isinstance(cache, PackedPool) else []
    return any(isinstance(part, PackedSubclass) and _is_functionalized(part) for part in parts)


@general_rule
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a live view for any view of a packed tensor without a packed form. PyTorch itself rejects invalid views."""
    if not is_view_op(func) or not isinstance(args[0], PackedSubclass):
        return NotImplemented
    viewed, *others = args
    result = _on_geometry(viewed, lambda like: func(like, *others, **kwargs))
    step = (func, frozen(others), tuple((name, frozen(value)) for name, value in kwargs.items()))
    if isinstance(result, Tensor):
        return _viewed(viewed, ViewStep(*step), result)
    return [_viewed(viewed, ViewStep(*step, place), one) for place, one in enumerate(result)]


def _on_geometry(viewed: Tensor, view: Callable[[Tensor], Any]) -> Any:
    """Applies ``view`` to a tensor with the shape and strides of ``viewed``.

    AOTAutograd must record where symbolic sizes come from. Under AOTAutograd, ``view`` is therefore applied to
    dequantized values that are not read. Elsewhere, ``view`` runs under no mode except a fake mode, which handles
    symbolic sizes.
    """
    source = viewed.source if isinstance(viewed, LiveView) else viewed
    if _is_functionalized(source):
        return view(viewed.dequantize())
    has_symbols = any(isinstance(extent, torch.SymInt) for extent in (*viewed.shape, *viewed.stride()))
    fake_mode = detect_fake_mode() if has_symbols else None
    with without_modes(), fake_mode or nullcontext():
        return view(geometry_of(viewed))


def _viewed(viewed: PackedSubclass, step: ViewStep, like: Tensor) -> LiveView:
    source, steps, begin = (
        (viewed.source, viewed.steps, viewed.offset) if isinstance(viewed, LiveView) else (viewed, (), 0)
    )
    if begin is None or viewed.data_is_traced or like.dtype != source.dtype:
        return LiveView(source, (*steps, step), like)
    return LiveView(source, (*steps, step), like, begin + int(like.storage_offset()))


@handles(PackedTensor, aten.as_strided.default)
@handles(PackedPool, aten.as_strided.default)
@handles(PackedStack, aten.as_strided.default)
@handles(PackedRanges, aten.as_strided.default)
@handles(LiveView, aten.as_strided.default)
def _as_strided(
    viewed: PackedSubclass, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> LiveView:
    """A view with these strides of an equal plain cache. The offset counts from the cache's first element."""
    root, begin = _root_and_offset(viewed)
    if root is None or begin is None or (storage_offset is not None and begin != 0):
        raise _unknown_begin(viewed)
    begin = begin if storage_offset is None else storage_offset
    if not _is_traced(root) and 0 not in size:
        last = begin + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if last >= root.numel():
            raise RuntimeError(
                f"as_strided({list(size)}, {list(stride)}, {begin}) reaches beyond a cache of {root.numel()} elements"
            )
    step = ViewStep(aten.as_strided.default, (frozen(size), frozen(stride), begin))
    return LiveView(root, (step,), _on_geometry(root, step.of), None if _is_traced(root) else begin)


def _unknown_begin(viewed: PackedSubclass) -> NotImplementedError:
    """The error of as_strided of a tensor whose first element is not known."""
    if viewed.data_is_traced:
        return NotImplementedError(
            f"as_strided of a packed KV cache {tuple(viewed.shape)} in compiled code: a graph does not know where this "
            "tensor begins in its cache; call as_strided on a clone() of it, or outside the compiled function"
        )
    return NotImplementedError(
        "as_strided of this view of a packed KV cache: packed views report no storage offset, so the first element is "
        "not known; call as_strided on the cache itself, or on a clone() of the view (a compiled function that returns "
        "such a view calls it, too: return the clone)"
    )


def _root_and_offset(viewed: Tensor) -> tuple[Tensor | None, int | None]:
    """The cache behind ``viewed``, and the offset of the view's first element in it; None for an unknown item."""
    if isinstance(viewed, LiveView):
        root, begin = _root_and_offset(viewed.source)
        return root, None if begin is None or viewed.offset is None else begin + viewed.offset
    if isinstance(viewed, PackedTensor):
        root = viewed if viewed.place.root is None else viewed.place.root
        is_known = viewed.place.is_known or not viewed.data_is_traced
        return (root, viewed.place.offset) if is_known and is_permuted(root) else (None, None)
    if isinstance(viewed, PackedPool) and (whole := viewed.slots.place.root) is not None:
        return (viewed, 0) if viewed.slots.shape == whole.shape and viewed.is_contiguous() else (None, None)
    return (viewed, 0) if viewed.is_contiguous() else (None, None)


@handles(LiveView, aten.detach_.default)
def _detach_(view: LiveView) -> LiveView:
    return view


@handles(LiveView, aten.record_stream.default)
def _record_stream(view: LiveView, stream: Any) -> None:
    view.source.record_stream(stream)


@handles(LiveView, aten.copy_.default)
def _copy_(view: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Handles AOTAutograd's copy of new contents into a mutated graph input. Other copies follow the general rule."""
    if not isinstance(view, LiveView) or not isinstance(source, LiveView) or not isinstance(view.source, PackedTensor):
        return NotImplemented
    if not ends_functional_graph(view.source.packed):
        return NotImplemented
    view.source.copy_(source.source)
    return view
