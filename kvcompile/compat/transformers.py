"""Private names of Transformers. They are attributes of its objects, so this file does not import it."""

from __future__ import annotations

from typing import Any

# The methods of ``GenerationMixin`` that :mod:`kvcompile.generation` replaces, besides ``generate``. Without
# them, ``generate()`` of Transformers makes its own caches and compiles for itself.
PREPARE_CACHE = "_prepare_cache_for_generation"
COMPILES_FOR_ITSELF = "_valid_auto_compile_criteria"


def makes_dynamic_caches(model: Any) -> bool:
    """Whether ``generate()`` makes a ``DynamicCache`` for this model, whose layers are keys and values."""
    return bool(model._supports_default_dynamic_cache())


def mask_length(config: Any) -> int | None:
    """The length of the attention mask that ``generate()`` makes itself; None in releases that do not record it."""
    return getattr(config, "_mask_length", None)
