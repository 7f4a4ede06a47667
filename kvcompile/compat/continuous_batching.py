"""Undocumented names of the continuous batching of Transformers, and its private names.

Functions import Transformers, because kvcompile works without it. If one of these names is missing,
:func:`allocator_classes` returns None, and ``generate_batch()`` runs without packing. The names are the same from
Transformers 5.20 to 5.24. Version 5.17 lacks them: its paged attention is compiled, and its pools are packed in graphs.
In version 5.18 the attention implementations of continuous batching have other names, which start with ``paged|``.
"""

from __future__ import annotations

import inspect
from typing import Any

CREATE_PROCESSOR = "_create_batch_processor"
"""The method of a ContinuousBatchingManager that makes the paged cache, in whichever thread needs it first."""

ORIGINAL_ATTENTION = "_original_attn_impl"
"""The attention implementation that a ContinuousBatchingManager restores in the model when it stops."""

KEPT_MANAGER = "_cached_continuous_batching_manager"
"""The attribute of a model that holds its persistent ContinuousBatchingManager."""

_NEEDED = ("_before_cache_tensor_init", "_after_cache_tensor_init", "get_write_indices", "copy_blocks")


def allocator_classes() -> dict[str, Any] | None:
    """The table from which a PagedAttentionCache takes the classes of its allocators; None in releases without one."""
    try:
        from transformers.generation.continuous_batching import PagedAttentionCache, cache, cache_allocators
    except ImportError:
        return None
    classes = getattr(cache, "ATTN_TYPE_TO_ALLOCATOR", None)
    allocator = getattr(cache_allocators, "FullAttentionCacheAllocator", None)
    has_names = classes is not None and all(hasattr(allocator, name) for name in _NEEDED)
    takes_keywords = "kwargs" in inspect.signature(PagedAttentionCache.update).parameters
    return classes if has_names and takes_keywords else None


def attention_of(config: Any) -> str:
    """The name of the attention implementation in a model's configuration."""
    return str(config._attn_implementation)


def set_attention(model: Any, name: str) -> None:
    """Give a model the attention implementation ``name``, without the checks of ``set_attn_implementation``.

    These checks would load a library of kernels for a name with ``flash`` in it.
    """
    model.config._attn_implementation = name


def can_set_attention(model: Any) -> bool:
    """Whether the attention of a model's class calls the implementation that its configuration names."""
    return bool(model._can_set_attn_implementation())


def size_pages(
    allocator: Any, index: int, layer_indices: list[int], page_size: int, page_bytes: int, allow_block_sharing: bool
) -> None:
    """Set the size of an allocator's pages, which hold all layers, to ``page_bytes``. The memory planner uses it.

    A block is then one page, and slot ``block * page_size + i`` is token ``i`` of the block.
    """
    allocator._before_cache_tensor_init(
        index=index,
        layer_indices=[0],
        tokens_per_page=page_size,
        bytes_per_page=page_bytes,
        allow_block_sharing=allow_block_sharing,
    )
    allocator.layer_indices = layer_indices


def register_pages(
    allocator: Any, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, free_pages: Any
) -> None:
    """Give an allocator the flat cache tensor, and the view of blocks by which forks and offloading copy them."""
    allocator.bytes_per_sector = bytes_per_sector
    allocator._copy_view = cache_tensor.view(-1, allocator.bytes_per_block)
    allocator._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, free_pages)
