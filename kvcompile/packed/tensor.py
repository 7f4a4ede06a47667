"""A packed KV cache as a tensor subclass with the shape and dtype of the plain cache.

A ``PackedTensor`` holds one uint8 tensor (see :mod:`kvcompile.kernels.layout.packed_layout`). Eager and traced code
follow one rule: **quantize on write, dequantize on read**. Writes of whole token vectors quantize them. Slices of
tokens, sequences or heads and transposes are views of the same bytes. Copies of whole token vectors (clone, reordering
of beams, concatenation) copy bytes. Attention reads bytes (:mod:`kvcompile.packed.attention`). All other operators read
dequantized values. :mod:`kvcompile.packed` imports the modules that define the operators.

An unsupported write raises an error. Code that uses the address of the tensor (``data_ptr()`` is 0) does not reach the
cache, and no tensor subclass can detect this. Gradients pass straight through the quantization outside ``no_grad``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.dimension_marks import drop_marks, is_marked, mark_weakly_dynamic, pass_marks_on, read_by_guards
from kvcompile.compat.tensors import is_autograd_view, new_wrapper
from kvcompile.kernels.formats import bases
from kvcompile.kernels.layout.axes import WHOLE_AXES, from_stored_order, in_stored_order, sizes_by_axis
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, num_blocks
from kvcompile.kernels.spec.new_tokens import NewTokens, reads_packed, with_new_tokens
from kvcompile.packed.cache_meta import CacheMeta
from kvcompile.packed.code_digest import code_digest
from kvcompile.packed.growing_buffer import GrowingBuffer, Lineage, capacity_blocks, lineage_at
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.packed.tokens import ExactTokens, pack, read_packed
from kvcompile.packed.tracing import is_functionalized, is_traced, refuse_aliased_inputs
from kvcompile.packed.view_geometry import laid_out_as, stride_of_clone

CHANNELS = "dm"
"""Axes that hold channels."""

PACKED_DIM = {"b": 1, "h": 2}
"""Maps an axis to its dimension of ``packed``. Tokens lie in blocks (dimension 0) and within blocks (dimension 3)."""


@dataclass(frozen=True)
class Place:
    """Position of a packed view in its cache.

    Attributes:
        root: the cache behind the view; None if the tensor is the cache itself.
        offset: storage offset of the view, in elements of an equal plain cache.
        ends_cache: whether the last token of the view is the last token of the cache; False if unknown.
        is_known: whether the running code (eager or traced) made the cache. The cache behind a view that is a graph
            input is unknown.
    """

    root: PackedTensor | None = None
    offset: int = 0
    ends_cache: bool = True
    is_known: bool = True


_UNKNOWN_PLACE = Place(ends_cache=False, is_known=False)


class PackedTensor(PackedSubclass):
    """A packed KV cache, or a view of one.

    Attributes:
        cache_meta: meaning of the bytes; ``packed_layout``, ``axes``, ``start`` and ``growing`` are its fields.
        packed: uint8 [num_blocks, batch, num_kv_heads, block_bytes]; a view of the cache has a view of this tensor.
        exact: tokens that are read in full precision, see :meth:`with_new_tokens`; None if there are none.
    """

    cache_meta: CacheMeta
    exact: ExactTokens | None = None
    _lineage: Lineage | None

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        cache_meta: CacheMeta,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        lineage: Lineage | None = None,
        place: Place = _UNKNOWN_PLACE,
    ) -> PackedTensor:
        """A tensor of logical ``size`` and ``stride`` (contiguous by default) over ``packed``.

        ``lineage`` is the growing cache behind this tensor, if ``packed`` lies in a growing buffer. ``place`` is the
        position of this tensor in its cache.
        """
        # No storage offset: fake tensors of a subclass cannot have one.
        return new_wrapper(cls, size, strides=stride, dtype=cache_meta.dtype, device=packed.device)

    def __init__(
        self,
        packed: Tensor,
        cache_meta: CacheMeta,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        lineage: Lineage | None = None,
        place: Place = _UNKNOWN_PLACE,
    ) -> None:
        self.cache_meta = cache_meta
        self.place = place
        self._packed = packed
        self._lineage = lineage
        self._packed_from = lineage.buffer if lineage is not None else None
        if self.growing and "t" in self.axes:
            mark_weakly_dynamic(self, self.token_dim)

    @property
    def packed_layout(self) -> PackedLayout:
        """Layout of ``packed``. The name ``layout`` is taken: ``Tensor.layout`` is ``torch.strided``."""
        return self.cache_meta.layout

    @property
    def axes(self) -> str:
        return self.cache_meta.axes

    @property
    def new_tokens(self) -> NewTokens | None:
        """The tokens that are read in full precision; None if there are none."""
        return None if self.exact is None else self.exact.new

    @property
    def start(self) -> int:
        return self.cache_meta.start

    @property
    def growing(self) -> bool:
        return self.cache_meta.growing

    @classmethod
    def from_dense(
        cls,
        x: Tensor,
        layout: PackedLayout,
        axes: str = "bhtd",
        *,
        growing: bool = False,
        num_written: Tensor | None = None,
    ) -> PackedTensor:
        """Quantizes a plain cache.

        Args:
            x: a cache of any float dtype, with its dimensions in the order ``axes``.
            layout: format and role; its ``head_dim`` must equal the size of ``x`` along ``d``.
            axes: ``bhtd`` for [batch, heads, tokens, head_dim], or another order that ends in ``d`` or in ``dt``.
                A cache of one head may lack ``h``, and a cache of one sequence may lack ``b``: a pool of slots
                [num_slots, heads, head_dim] has ``thd``.
            growing: whether the cache grows by concatenation.
            num_written: int64 [] or [batch], for a layout with a residual: the number of tokens written from the
                beginning. The recent blocks end with the last of them. If it is 0 or None (unknown), the recent blocks
                end with the last nonzero token.

        Raises:
            ValueError: ``axes`` is not a valid order, or a cache of this shape, dtype and device cannot have this
                layout.
        """
        result = cls.zeros(x.shape, x.dtype, layout, axes, x.device, growing=growing)
        x = result.to_stored_axes(x.detach())
        pack(result.packed, layout, x, num_written)
        return result

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        layout: PackedLayout,
        axes: str = "bhtd",
        device: torch.device | str | None = None,
        *,
        growing: bool = False,
    ) -> PackedTensor:
        """A cache of zeros.

        Args:
            shape: the shape of the plain cache, in the order ``axes``.
            dtype: the logical dtype, a floating-point type.
            layout: format and role.
            axes: as in :meth:`from_dense`.
            device: the device of the data; None for the default device.
            growing: whether the cache grows by concatenation.

        Raises:
            ValueError: as in :meth:`from_dense`.
        """
        if axes not in WHOLE_AXES:
            raise ValueError(
                f"axes are {axes!r}; valid axes are {', '.join(WHOLE_AXES)} for batch (b), heads (h), tokens (t) and "
                "channels (d), or heads and channels together (m); a cache of one head may lack h; a cache of one "
                "sequence, or a pool of slots, may lack b"
            )
        sizes = sizes_by_axis(shape, axes, layout.head_dim)
        if sizes is None:
            raise ValueError(
                f"shape {tuple(shape)} does not fit a {len(axes)}-dimensional cache of head_dim {layout.head_dim}"
            )
        on = torch.get_default_device() if device is None else torch.device(device)
        if (reason := layout.unsupported(dtype) or layout.unsupported_on(on)) is not None:
            raise ValueError(f"format {layout.spec} cannot hold this cache: {reason}")
        batch, heads, tokens = (sizes.get(axis, 1) for axis in "bht")
        blocks = layout.header_blocks + (capacity_blocks(tokens) if growing else num_blocks(tokens))
        data = torch.zeros((blocks, batch, heads, layout.block_bytes), dtype=torch.uint8, device=device)
        return cls.over(data, layout, dtype, axes, tuple(shape), growing=growing)

    @classmethod
    def over(
        cls,
        data: Tensor,
        layout: PackedLayout,
        dtype: torch.dtype,
        axes: str,
        shape: Sequence[int],
        *,
        growing: bool = False,
    ) -> PackedTensor:
        """A cache of logical ``shape`` that uses ``data`` as its bytes, without a copy or a check.

        Args:
            data: uint8 [num_blocks, batch, num_kv_heads, block_bytes]. With ``growing``, it becomes the buffer of the
                cache, including spare room, and nothing else may use its storage.
            layout: format and role of ``data``.
            dtype: the logical dtype.
            axes: as in :meth:`from_dense`.
            shape: the shape of the plain cache, in the order ``axes``.
            growing: whether the cache grows by concatenation.
        """
        return cls.owning(data, CacheMeta(layout, dtype, axes, 0, growing), shape)

    @classmethod
    def owning(cls, data: Tensor, cache_meta: CacheMeta, size: Sequence[int]) -> PackedTensor:
        """As :meth:`over`, for any ``cache_meta``."""
        can_be_buffer = not is_traced(data) and data.is_contiguous() and data.storage_offset() == 0
        if not cache_meta.growing or not can_be_buffer or "t" not in cache_meta.axes:
            return cls(data, cache_meta, size, place=Place())
        end = cache_meta.start + size[cache_meta.axes.index("t")]
        layout = cache_meta.layout
        lineage = Lineage(GrowingBuffer(data, end, layout.header_blocks), end)
        return cls(data[: layout.growing_blocks(end)], cache_meta, size, lineage=lineage, place=Place())

    def with_stride(self, stride: Sequence[int]) -> PackedTensor:
        """This new cache, which nothing else uses yet, with the strides of the plain cache that it replaces."""
        return PackedTensor(self._packed, self.cache_meta, self.shape, stride, self._lineage, self.place)

    def view_as_part(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        packed: Tensor | None = None,
        *,
        skipped: int = 0,
        ends_cache: bool = True,
        **changes: Any,
    ) -> PackedTensor:
        """A view of this cache with other ``packed`` blocks, ``axes`` or ``start`` on the same storage.

        The view begins ``skipped`` plain elements later. ``ends_cache``: whether both end with the same token.
        """
        cache_meta = replace(self.cache_meta, **changes) if changes else self.cache_meta
        packed = self.packed if packed is None else packed
        place = Place(
            root=self if self.place.root is None else self.place.root,
            offset=self.place.offset + skipped,
            ends_cache=not is_traced(packed) and self.place.ends_cache and ends_cache,
            is_known=self.place.is_known,
        )
        view = PackedTensor(packed, cache_meta, size, stride, self._lineage, place)
        if self.exact is not None and cache_meta == self.cache_meta and _begins_alike(packed, self.packed):
            view.exact = self.exact
        return view

    def of_size(self, size: Sequence[Any]) -> PackedTensor:
        """This cache with ``size`` as its sizes if ``size`` contains symbols; otherwise this cache unchanged.

        Dynamo gives the parts of a pool or stack their own symbols, but a graph must use the symbols of the whole.
        """
        if not any(isinstance(extent, torch.SymInt) for extent in size):
            return self
        return PackedTensor(self.packed, self.cache_meta, size, None if self.is_contiguous() else self.stride())

    @property
    def packed(self) -> Tensor:
        if self._lineage is not None and self._packed_from is not self._lineage.buffer:
            # The lineage moved to another storage: view the same blocks there, with the same strides.
            self._packed_from = self._lineage.buffer
            storage, old = self._packed_from.storage, self._packed
            blocks = min(old.shape[0], storage.shape[0] - old.storage_offset() // storage.stride(0))
            self._packed = storage.as_strided((blocks, *old.shape[1:]), old.stride(), old.storage_offset())
        return self._packed

    @property
    def fixed_data(self) -> Tensor | None:
        """``packed`` if it never changes during the life of this cache; None for a cache that may move."""
        return self._packed if self._lineage is None else None

    @property
    @read_by_guards
    def inner_packed(self) -> Tensor:
        """The inner tensor for PyTorch: ``packed`` with the dynamic marks that follow from this tensor's marks.

        ``mark_dynamic`` also marks the same dimensions of an inner tensor that has the same number of dimensions. These
        marks are wrong and are dropped, because tokens lie in different dimensions of a cache and of its blocks.

        Guards read this property of every cache at every call.
        """
        packed = self.packed
        drop_marks(packed)
        if is_marked(self):
            pass_marks_on(self, packed, _packed_dims(self.axes))
        return packed

    def packed_for_write(self) -> Tensor:
        """``packed`` for a write, which only this cache and its views will see.

        The write increments the version of the cache behind this view, as for a plain tensor.
        """
        root = self.place.root
        if root is not None and not self.data_is_traced and not is_autograd_view(self) and not root.is_inference():
            torch.autograd.graph.increment_version(root)
        if self._lineage is not None:
            self._lineage.make_exclusive()
        elif self.growing and is_traced(self._packed) and not self.place.is_known:
            raise NotImplementedError(
                "a compiled graph writes in place to a growing packed cache, whose storage another cache may share; "
                "append with torch.cat, or use a cache of fixed size"
            )
        elif is_functionalized(self._packed):
            refuse_aliased_inputs(PackedTensor)
        return self.packed

    @property
    def is_whole(self) -> bool:
        """Whether ``packed`` has the layout of a whole cache: all axes, from the first token of a block on, contiguous.

        Kernels that know only the layout may use ``packed`` only if this is true.
        """
        return self.axes in WHOLE_AXES and self.start == 0 and self.packed.is_contiguous()

    @property
    def can_be_copied_whole(self) -> bool:
        """Whether an independent copy may replace this view (:meth:`whole`).

        A growing cache may be copied at every append anyway, so a copy may replace it. A view of a cache of fixed size
        must not be copied, because its writes have to reach the cache.
        """
        return self.growing and self.axes in WHOLE_AXES and self.packed_layout.residual is None

    def whole(self) -> PackedTensor:
        """This cache if it :attr:`is_whole`, otherwise a copy; needs :attr:`can_be_copied_whole`."""
        if self.is_whole:
            return self
        copied = self.index_select(self.token_dim, torch.arange(self.num_tokens, device=self.device))
        assert isinstance(copied, PackedTensor), "whole tokens are copied byte by byte"
        return copied

    @property
    def token_dim(self) -> int:
        """The logical dimension of tokens."""
        return self.axes.index("t")

    @property
    def num_tokens(self) -> int:
        """Number of tokens; 1 if a single token was selected."""
        return self.shape[self.token_dim] if "t" in self.axes else 1

    @property
    def format_name(self) -> str:
        return self.packed_layout.format_name

    @property
    def data_is_traced(self) -> bool:
        return is_traced(self._packed)

    def dequantize(self) -> Tensor:
        """The values, a plain tensor of the same shape and dtype with the strides of a clone of the plain view.

        They are the strides of this tensor without gaps between elements.
        """
        x = read_packed(self.packed, self.packed_layout, self.start + self.num_tokens, self.dtype)
        if self.new_tokens is not None:
            x = with_new_tokens(x, self.new_tokens, self.new_tokens.x.shape[2])
        x = x[:, :, self.start :]
        if self.data_is_traced:
            return laid_out_as(self, self.from_stored_axes(x.contiguous()))
        x, stride = self.from_stored_axes(x), stride_of_clone(self)
        is_clone = x.stride() == tuple(stride) and x.storage_offset() == 0  # `as_strided` counts from the storage
        return x if is_clone else x.new_empty_strided(self.shape, stride).copy_(x)

    def with_new_tokens(self, new: NewTokens) -> PackedTensor:
        """A view of this cache for reads right after ``new`` was written to it.

        Attention and :meth:`dequantize` read the new tokens in full precision. Views of the view do too, if they begin
        at the same token, keep the order of the dimensions, and have all sequences and heads. Set ``exact.new`` of the
        view to None before something else is written to the cache. The result is the cache itself if there are few new
        tokens, or if its layout does not support them.
        """
        if reads_packed(new.x.shape[2]) or not self.packed_layout.takes_new_tokens:
            return self
        view = self.view_as_part(self.shape, self.stride())
        view.exact = ExactTokens(new)
        return view

    def to_stored_axes(self, x: Tensor) -> Tensor:
        """Values with this tensor's axes -> [batch, heads, tokens, head_dim]."""
        return in_stored_order(x, self.axes, self.packed_layout.head_dim)

    def from_stored_axes(self, x: Tensor) -> Tensor:
        """Inverse of :meth:`to_stored_axes`."""
        return from_stored_order(x, self.axes)

    def extended(self, num_new: int) -> PackedTensor:
        """This cache with room for ``num_new`` more tokens at its end, whose values the caller must store.

        The result shares this cache's storage if there is room and no other cache has been appended to it; otherwise
        this cache's blocks are copied to a larger storage. This cache keeps its length and its values.
        """
        size = list(self.shape)
        size[self.token_dim] += num_new
        end = self.start + size[self.token_dim]
        cache_meta = self.cache_meta if self.growing else replace(self.cache_meta, growing=True)
        if is_traced(self._packed):  # a graph must not share storages that PyTorch does not know of
            spare = self._packed.new_zeros((num_blocks(num_new), *self._packed.shape[1:]))
            data = torch.cat([self._packed, spare])[: self.packed_layout.growing_blocks(end)]
            return PackedTensor(data, cache_meta, size, place=Place())
        own = self._claimed(num_new)
        buffer, first_block = own or (GrowingBuffer.copy_of(self.packed, end, self.packed_layout.header_blocks), 0)
        packed = buffer.storage[first_block : first_block + self.packed_layout.growing_blocks(end)]
        return PackedTensor(
            packed, cache_meta, size, lineage=Lineage(buffer, first_block * BLOCK_TOKENS + end), place=Place()
        )

    def _claimed(self, num_new: int) -> tuple[GrowingBuffer, int] | None:
        """Reserves ``num_new`` tokens after this cache in its growing buffer; None if the cache must be copied.
        Returns the buffer and the index of this cache's first block in it."""
        if self._lineage is None or self.packed.shape[1:] != self._lineage.buffer.storage.shape[1:]:
            return None
        buffer = self._lineage.buffer
        first_block = self.packed.storage_offset() // buffer.storage.stride(0)
        end = first_block * BLOCK_TOKENS + self.start + self.num_tokens
        return (buffer, first_block) if buffer.claim(end, num_new) else None

    def __tensor_flatten__(self) -> tuple[list[str], CacheMeta]:
        if not isinstance(self.start, int) and is_functionalized(self._packed):
            # AOTAutograd would keep the symbol of this trace and use it for every later call.
            raise NotImplementedError(
                "a compiled graph returns a view of a packed cache that starts at a token which is only known at run "
                "time; return the whole cache and slice it outside, or return the dequantized slice"
            )
        return ["inner_packed"], self.cache_meta

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: CacheMeta, size: Any, stride: Any) -> PackedTensor:
        data = inner["inner_packed"]
        # A compiled function may return a view of its input, which shares writes with the cache that it belongs to.
        lineage = lineage_at(data) if context.growing and not is_traced(data) else None
        return PackedTensor(data, context, size, stride, lineage)

    def _stable_hash_for_caching(self) -> str:
        """The key of this input in AOTAutograd's cache of traced graphs. AOTAutograd calls this method."""
        geometry = [(t.shape, t.stride(), t.dtype, t.device) for t in (self, self.packed)]
        return str((geometry, self.__tensor_flatten__()[1], code_digest()))

    def repeat_interleave(self, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Tensor:  # type: ignore[override]
        """Repeats as for any tensor; stays packed for an int ``repeats`` of sequences, heads or tokens.

        PyTorch decomposes this method to expand and reshape before dispatch, so the dispatch could not recognise it.
        """
        if dim is not None and isinstance(repeats, int) and self.axes[dim] not in CHANNELS:
            index = torch.arange(self.shape[dim] * repeats, device=self.device) // max(repeats, 1)
            return self.index_select(dim, index)
        return self.dequantize().repeat_interleave(repeats, dim, output_size=output_size)

    def __repr__(self) -> str:  # type: ignore[override]
        facts = (
            f"format='{self.packed_layout.spec}', role='{self.packed_layout.role}', shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}'"
        )
        if is_traced(self._packed):  # there are no values, and sizes may be symbolic
            return f"PackedTensor({facts})"
        return f"PackedTensor({self.dequantize()}, {facts}, packed_bytes={self.packed.nbytes})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        meta = self.cache_meta
        data = self.packed.clone(memory_format=torch.contiguous_format)
        layout = (meta.layout.spec, meta.layout.role, meta.layout.head_dim)
        fields = (meta.dtype, meta.axes, meta.start, meta.growing)
        basis = "" if data.is_meta else meta.layout.format.basis  # a cache without data needs no basis
        stride = None if self.is_contiguous() else stride_of_clone(self)
        root = bases.root(basis) if basis else {}
        return rebuild_packed_tensor, (data, layout, fields, tuple(self.shape), root, stride)


def rebuild_packed_tensor(
    data: Tensor,
    layout: tuple[Any, ...],
    meta: tuple[Any, ...],
    shape: tuple[int, ...],
    basis: dict[str, Tensor] | None = None,
    stride: tuple[int, ...] | None = None,
) -> PackedTensor:
    """Rebuilds a saved cache from the names of its layout and the fields of CacheMeta; ``torch.load`` calls this.

    ``basis`` has the tensors of a calibrated format's basis. Without ``stride``, the cache is contiguous.
    """
    if basis:
        bases.register(bases.Basis(**basis))
    cache = PackedTensor.owning(data, CacheMeta(PackedLayout.parse(*layout), *meta), shape)
    return cache if stride is None else cache.with_stride(stride)


torch.serialization.add_safe_globals([rebuild_packed_tensor])


@functools.cache
def _packed_dims(axes: str) -> dict[int, int]:
    """Maps each dimension of a cache to the dimension of ``packed`` that determines its size."""
    return {axes.index(axis): dim for axis, dim in {"t": 0, **PACKED_DIM}.items() if axis in axes}


def _begins_alike(view: Tensor, packed: Tensor) -> bool:
    """Whether packed ``view`` has the sequences, the heads and the first block of ``packed``."""
    return view.shape[1:3] == packed.shape[1:3] and view.storage_offset() == packed.storage_offset()
