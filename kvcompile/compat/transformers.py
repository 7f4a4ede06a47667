"""Private names of Transformers. They are attributes of its objects, so this file does not import it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

# The methods of ``GenerationMixin`` that :mod:`kvcompile.generation.generate` replaces, besides ``generate``. Without
# them, ``generate()`` makes plain caches and uses its own compilation.
PREPARE_CACHE = "_prepare_cache_for_generation"
COMPILES_FOR_ITSELF = "_valid_auto_compile_criteria"


@functools.cache
def cache_argument(function: Callable[..., Any]) -> str:
    """The name of the cache among the arguments of ``function``: ``past_key_values`` before Transformers 5.24.

    Args:
        function: the ``forward`` of a model's class, or a method of ``GenerationMixin``.
    """
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


def renamed_cache(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """``arguments`` with the cache renamed to ``name``, whichever of the two names it had."""
    other = "past_key_values" if name == "cache" else "cache"
    if other not in arguments or name in arguments:
        return arguments
    return {name if key == other else key: value for key, value in arguments.items()}


def cache_of(output: Any) -> Any:
    """The cache in an output of a model or of ``generate()``; None if it has none."""
    fields = dict(output.items())  # Transformers 5.24 warns when its outputs are asked for the former name
    return fields.get("cache", fields.get("past_key_values"))


def with_cache(model: Any, cache: Any) -> dict[str, Any]:
    """The keyword argument that passes ``cache`` to a call of ``model``."""
    return {cache_argument(type(model).forward): cache}


def attends_by_flex(config: Any) -> bool:
    """Whether a model with ``config`` attends by ``flex_attention``. False without the private attribute."""
    configs = (config, config.get_text_config())
    return any(getattr(each, "_attn_implementation", "") == "flex_attention" for each in configs)


def gives_attention_maps(config: Any) -> bool:
    """Whether a model with ``config`` can return its attention maps. Other implementations log a warning instead."""
    return getattr(config.get_text_config(), "_attn_implementation", "eager") == "eager"


def _generation_mixin(model: Any) -> Any:
    return next(cls for cls in type(model).__mro__ if cls.__name__ == "GenerationMixin")


def cache_argument_of_generate(model: Any) -> str:
    """The name under which ``generate()`` of this model passes the cache on."""
    return cache_argument(_generation_mixin(model).prepare_inputs_for_generation)


def arguments_of_generate(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of ``generate()`` by name, also those that are given by position."""
    names = list(inspect.signature(_generation_mixin(model).generate).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def prepare_inputs(model: Any, ids: Any, cache: Any, **inputs: Any) -> Any:
    """The inputs that ``generate()`` prepares for a call of ``model`` with ``cache``.

    It leaves out what the model does itself, because a model may decode with another one to prepare its inputs.
    """
    inputs[cache_argument_of_generate(model)] = cache
    return _generation_mixin(model).prepare_inputs_for_generation(model, ids, **inputs)


def makes_dynamic_caches(model: Any) -> bool:
    """Whether ``generate()`` makes a ``DynamicCache`` for this model. Its layers have keys and values."""
    return bool(model._supports_default_dynamic_cache())


def promises_static_caches(model: Any) -> bool:
    """Whether Transformers says that a model runs with static caches; also True where Transformers says nothing."""
    return bool(getattr(model, "_can_compile_fullgraph", True))


def mask_length(config: Any) -> int | None:
    """The length of the attention mask that ``generate()`` makes itself; None in releases that do not record it."""
    return getattr(config, "_mask_length", None)
