"""``generate_batch()`` of a compiled Transformers model: the pages of its continuous batching are packed.

All entry points of continuous batching (``generate_batch``, ``continuous_batching_context_manager``,
``init_continuous_batching``) get their manager from ``init_continuous_batching``. :func:`packed_manager` makes this
manager for a :class:`~kvcompile.generation.generate.Generation`, so that ``kvcompile.compile(model, policy=...)``
prepares all entry points, and ``kvcompile.uncompile(model)`` restores them. :mod:`kvcompile.caches.pages` has the cache
itself.

The manager chooses its settings as for flash attention: forward passes run eagerly on CPUs and as CUDA graphs on GPUs,
and are compiled if its configuration says so. The manager allows the fast path for decode steps, which reads block
tables, only with kernels of flash attention. The operator for packed pages also reads block tables, on every device, so
kvcompile restores the fast path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from kvcompile.caches.pages import (
    ATTENTION,
    LayerFormats,
    fits_page_size,
    has_packed_pages,
    layer_formats,
    making_pages,
    pack_updates,
)
from kvcompile.compat.continuous_batching import (
    CREATE_PROCESSOR,
    KEPT_MANAGER,
    ORIGINAL_ATTENTION,
    allocator_classes,
    attention_of,
    can_set_attention,
    set_attention,
)
from kvcompile.errors import OptionsError, PolicyError
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.options import BackendOptions
from kvcompile.report import report

_MARK = "kvcompile_pages"
"""The attribute of a manager whose cache has packed pages."""

_MOST_PAGES = 32
"""Pages in the block table of a request of unknown length; Transformers has the same default."""


def packed_manager(
    model: Any,
    options: BackendOptions,
    original: Callable[..., Any],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> Any:
    """A manager of continuous batching whose pages are packed.

    If the pages cannot be packed, the result is the manager of Transformers, and the report says why.

    Args:
        model: a Transformers model.
        options: the options with which the model was compiled.
        original: the model's own ``init_continuous_batching``.
        generation_config: as in ``init_continuous_batching``.
        continuous_batching_config: as in ``init_continuous_batching``. It is not changed.
        workload_hints: as in ``init_continuous_batching``.

    Raises:
        PolicyError: a format cannot be used for pages, and ``on_unsupported`` is ``error``.
        OptionsError: pages have a size that is not a whole number of packed blocks.
    """
    formats = _formats(model, options)
    config = _config(continuous_batching_config, generation_config) if formats else None
    if not formats or not _is_packable(model):
        return original(generation_config, continuous_batching_config, workload_hints)
    before = attention_of(model.config)
    set_attention(model, ATTENTION)
    try:
        plain: Any = copy.copy(config)
        plain.max_blocks_per_request = plain.decode_compile_config = None  # Transformers would warn that it drops them
        manager = original(generation_config, plain, workload_hints)
    except BaseException:
        set_attention(model, before)
        raise
    if getattr(manager, ORIGINAL_ATTENTION) is None and before != ATTENTION:
        setattr(manager, ORIGINAL_ATTENTION, before)
    if not hasattr(manager, _MARK):
        _pack(manager, formats)
        _restore_fast_path(manager, config, workload_hints)
    return manager


def drop_kept_manager(model: nn.Module) -> None:
    """Destroy the persistent manager of a model if its pages are packed."""
    whole: Any = model
    if hasattr(getattr(model, KEPT_MANAGER, None), _MARK):
        whole.destroy_cached_continuous_batching_manager()


def _formats(model: nn.Module, options: BackendOptions) -> LayerFormats:
    """The formats of the pages; empty if the pages are not packed."""
    if allocator_classes() is None:
        return {}
    try:
        return layer_formats(model, options.policy)
    except PolicyError as error:
        if options.on_unsupported == "error":
            raise
        report.note(f"pages stay plain: {error}")
        return {}


def _is_packable(model: Any) -> bool:
    """Whether attention on packed pages can serve the model; if not, the report says why."""
    kept = getattr(model, KEPT_MANAGER, None)
    if kept is not None and not hasattr(kept, _MARK):
        report.note(
            "generate_batch: the persistent manager of this model was made before kvcompile.compile, and its pages "
            "stay plain; call model.destroy_cached_continuous_batching_manager() first"
        )
        return False
    if not can_set_attention(model):
        report.note(
            f"generate_batch: pages stay plain, because the attention of {type(model).__name__} does not use the "
            "attention interface of Transformers"
        )
        return False
    return True


def _config(given: Any, generation_config: Any) -> Any:
    """The configuration of the batching: the given one, or the default."""
    from transformers.generation import ContinuousBatchingConfig

    if given is None:
        given = getattr(generation_config, "continuous_batching_config", None)
    config = ContinuousBatchingConfig() if given is None else given
    if not fits_page_size(config.page_size):
        raise OptionsError(
            f"generate_batch: packed pages hold a multiple of {BLOCK_TOKENS} tokens, but page_size is "
            f"{config.page_size}; set page_size={max(1, round(config.page_size / BLOCK_TOKENS)) * BLOCK_TOKENS}"
        )
    return config


def _pack(manager: Any, formats: LayerFormats) -> None:
    """Make the manager create its cache with packed pages."""
    create = getattr(manager, CREATE_PROCESSOR)

    def create_packed() -> Any:
        with making_pages(formats):
            processor = create()
        if has_packed_pages(processor.cache):
            processor.cache.unread = None  # an earlier request of this processor may have failed in between
        else:
            pack_updates(processor.cache)
        return processor

    setattr(manager, CREATE_PROCESSOR, create_packed)
    setattr(manager, _MARK, True)


def _restore_fast_path(manager: Any, config: Any, hints: Any) -> None:
    """Let decode steps use block tables, unless the user or a sliding window forbids it."""
    resolved, text = manager.continuous_batching_config, manager.model.config.get_text_config()
    types = getattr(text, "layer_types", None)
    has_windows = "sliding_attention" in types if types else getattr(text, "sliding_window", None) is not None
    if has_windows or config.max_blocks_per_request == 0:
        return
    resolved.max_blocks_per_request = config.max_blocks_per_request or _pages_of(hints, config.page_size)
    resolved.decode_compile_config = config.decode_compile_config


def _pages_of(hints: Any, page_size: int) -> int:
    """The number of pages of the longest request in the workload hints."""
    longest = hints.max_prompt_length + hints.max_generated_length if hints is not None else 0
    return -(-longest // page_size) if longest > 0 else _MOST_PAGES
