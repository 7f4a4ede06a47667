"""Packed pages in the continuous batching of Transformers: ``generate_batch()`` of 5.20 to 5.24.

Transformers keeps the caches of all requests in one flat byte tensor and divides it in two steps. Allocators, one for
each type of attention, ask for sectors. They cut these sectors into the blocks of requests. The memory planner of
Transformers computes how many blocks fit, and takes the bytes per block from an allocator.

- **Bytes.** :class:`~kvcompile.kernels.layout.pages.PagesLayout` has the layout of an allocator's block: one page,
  which packs all its layers. The allocators made here give its bytes as ``bytes_per_block``. Block tables, prefix
  sharing, forks and offloading only count or copy blocks, so their code is unchanged.
- **Mutation.** ``kvcompile::paged_attention`` stores the new tokens of a layer and attends. It mutates only the flat
  tensor. The ``update`` of Transformers' ``PagedAttentionCache`` is kept out of graphs: its replacement only notes the
  layer, so forward passes are compiled without graph breaks and recorded as CUDA graphs.
- **Attention.** A separately named attention implementation calls the operator. ``flash`` in its name tells
  Transformers that attention needs no mask and repeats no heads, so that no memory is reserved for either.

Transformers makes caches deep inside its managers, so this file replaces the classes in its table of allocators. The
new classes make packed allocators in a block ``with making_pages(...)`` of the same thread, and original allocators
elsewhere.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvcompile.caches.static import attention_modules, why_not_held
from kvcompile.compat.continuous_batching import allocator_classes, register_pages, size_pages
from kvcompile.errors import KVCompileError, PolicyError
from kvcompile.kernels import paged  # noqa: F401 - defines the operator
from kvcompile.kernels.layout.dtypes import dtype_name
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.layout.pages import PagesLayout
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import Policy

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import PagedAttentionCache

ATTENTION = "kvcompile_flash_pages"
"""The name of the attention implementation for packed pages. Calls with any other cache run as ``sdpa``."""

LayerFormats = Mapping[int, tuple[PackedLayout, PackedLayout]]
"""The layouts of keys and values, by layer index."""

_made_in_thread = threading.local()


def layer_formats(model: nn.Module, policy: Policy) -> LayerFormats:
    """The formats of all layers of ``model``. Layers whose rule says ``auto`` keep the dtype of the model.

    Returns:
        The layouts by layer index; empty if the policy packs no layer.

    Raises:
        PolicyError: a format cannot hold the keys or values of a layer, or keeps tokens in full precision.
    """
    whole: Any = model
    config, dtype = whole.config.get_text_config(), whole.dtype
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    modules, count = attention_modules(model), config.num_hidden_layers
    plain = FormatPair(*2 * (dtype_name(dtype),))
    pairs = {index: policy.formats_for(modules.get(index, ""), index, count) for index in range(count)}
    if not any(pairs.values()):
        return {}
    return {index: _layouts(pair or plain, head_dim, dtype, index, whole.device) for index, pair in pairs.items()}


def _layouts(
    pair: FormatPair, head_dim: int, dtype: torch.dtype, layer: int, device: torch.device
) -> tuple[PackedLayout, PackedLayout]:
    layouts = pair.layout("key", head_dim, dtype), pair.layout("value", head_dim, dtype)
    for layout in layouts:
        if layout.residual is not None:
            raise PolicyError(
                f"generate_batch: layer {layer}: pages cannot keep tokens in full precision, as {layout.description} "
                "does; choose a format without residual_length and sink_tokens, such as int4_per_token_head"
            )
        if (reason := why_not_held(layout, dtype, device)) is not None:
            raise PolicyError(f"generate_batch: layer {layer}: {reason}")
    return layouts


@contextmanager
def making_pages(formats: LayerFormats) -> Iterator[None]:
    """Inside the ``with`` block, this thread makes caches whose allocators pack their layers in ``formats``."""
    _install()
    _made_in_thread.formats = formats
    try:
        yield
    finally:
        del _made_in_thread.formats


def pack_updates(cache: PagedAttentionCache) -> None:
    """Give ``cache`` the ``update`` for packed pages. The cache was made inside ``with making_pages(...)``."""
    cache.__class__ = _pages_class()
    cache.unread = None  # type: ignore[attr-defined]  # an attribute that appears later would recompile graphs


def has_packed_pages(cache: Any) -> bool:
    """Whether ``cache`` is a paged cache of :func:`pack_updates`."""
    return isinstance(cache, _Pages)


@functools.cache
def _install() -> None:
    """Register the attention implementation, and replace each allocator class by a class that chooses between two."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attention_on_pages)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    classes = allocator_classes()
    assert classes is not None
    for name, plain in classes.items():
        classes[name] = _choosing_class(plain)


def _choosing_class(plain: type) -> type:
    """A class that makes instances of ``plain``, or packed allocators inside ``with making_pages(...)``."""
    packed = _packed_class(plain)

    class Chosen(plain):  # type: ignore[misc]
        def __new__(cls, **arguments: Any) -> Any:
            formats = getattr(_made_in_thread, "formats", None)
            return plain(**arguments) if formats is None else packed(formats=formats, **arguments)

    Chosen.__name__ = Chosen.__qualname__ = plain.__name__
    return Chosen


def _packed_class(plain: type) -> type:
    class PackedAllocator(plain):  # type: ignore[misc]
        """The allocator ``plain`` with packed pages: a block of a request is one page, which holds all layers."""

        rows_per_token = 1

        def __init__(self, *, formats: LayerFormats, **arguments: Any) -> None:
            super().__init__(**arguments)
            page_size, layers = arguments["page_size"], arguments["layer_indices"]
            self.pages = PagesLayout.of([formats[layer] for layer in layers], self.num_key_value_heads)
            self.layer_of_index = dict(zip(layers, self.pages.layers, strict=True))
            self.page_size = page_size
            self.window = getattr(self, "sliding_window", 0)
            page_bytes = self.pages.page_bytes(page_size)
            size_pages(self, arguments["index"], layers, page_size, page_bytes, arguments["allow_block_sharing"])

        def register_cache_tensor(
            self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
        ) -> None:
            register_pages(self, bytes_per_sector, non_trash_bytes, cache_tensor, pool)

    return PackedAllocator


class _Pages:
    """The methods that :func:`_pages_class` adds to a PagedAttentionCache.

    Attributes:
        unread: the layer whose ``update`` was called and whose attention has not run yet; None between layers.
    """

    unread: int | None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Pass the layer to attention in ``kwargs``. Returns the new keys and values, which attention will store."""
        cache: Any = self
        allocator = cache.layer_to_allocator[layer_idx]
        if self.unread is not None:
            raise KVCompileError(
                f"generate_batch: the attention of layer {self.unread} did not read its pages, because the model does "
                "not forward the keyword arguments of attention; run kvcompile.uncompile(model) first"
            )
        for states in (key_states, value_states):
            if (states.shape[1], states.shape[3]) != (allocator.num_key_value_heads, allocator.head_dim):
                raise KVCompileError(
                    f"generate_batch: layer {layer_idx} writes {list(states.shape)}, but its pages are for "
                    f"{allocator.num_key_value_heads} KV heads of {allocator.head_dim} channels; run "
                    "kvcompile.uncompile(model) first"
                )
        self.unread = layer_idx
        kwargs["kvcompile_pages"], kwargs["kvcompile_layer"] = self, layer_idx
        return key_states, value_states


@functools.cache
def _pages_class() -> type:
    from transformers.generation.continuous_batching import PagedAttentionCache

    class PackedPages(_Pages, PagedAttentionCache):
        """A paged cache of Transformers with packed pages."""

    return PackedPages


def attention_on_pages(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention implementation :data:`ATTENTION`: it stores new tokens in packed pages and attends to them.

    Args:
        module: the attention module.
        query: [1, num_heads, num_queries, head_dim].
        key, value: the new tokens, [1, num_kv_heads, num_queries, head_dim].
        attention_mask: passed on if the cache has no packed pages; a continuous batch has no mask.
        scaling: factor of the scores, ``1 / sqrt(head_dim)`` by default.
        kwargs: the keywords of continuous batching.

    Returns:
        The output, [1, num_queries, num_heads, head_dim], and None in place of attention weights.
    """
    pages, layer = kwargs.pop("kvcompile_pages", None), kwargs.pop("kvcompile_layer", None)
    if has_packed_pages(kwargs.get("cache")):  # before Transformers 5.24, models call no update
        pages, layer = kwargs["cache"], getattr(module, "layer_idx", None)
    if pages is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if kwargs.get("position_bias") is not None or kwargs.get("output_attentions"):
        raise KVCompileError(
            f"generate_batch: layer {layer} needs a position bias or attention weights, which attention on packed "
            "pages does not have; run kvcompile.uncompile(model) first"
        )
    pages.unread = None  # also if attention runs out of memory
    allocator = pages.layer_to_allocator[layer]
    place, table = allocator.layer_of_index[layer], kwargs.get("block_table")
    sinks = kwargs.get("s_aux")
    out = torch.ops.kvcompile.paged_attention(
        query,
        key,
        value,
        pages.cache_tensor,
        kwargs["write_index"][allocator.index] if table is None else None,
        kwargs["read_index"][allocator.index] if table is None else None,
        table[allocator.index] if table is not None else None,
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"][allocator.layer_type],
        sinks,
        place.block_bytes,
        place.first_byte,
        allocator.page_size,
        allocator.window,
        query.shape[3] ** -0.5 if scaling is None else scaling,
        kwargs.get("softcap") or 0.0,
        place.key.spec,
        place.value.spec,
    )
    return out.transpose(1, 2).contiguous(), None


def fits_page_size(page_size: int) -> bool:
    """Whether pages of ``page_size`` tokens consist of whole packed blocks."""
    return page_size > 0 and page_size % BLOCK_TOKENS == 0
