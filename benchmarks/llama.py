"""Hugging Face Llamas with random weights, and their static caches, for benchmarks of decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from kvcompile.benching.workloads import Shape, check, relative_error
from kvcompile.packed.tensor import PackedTensor

MAX_ERROR = 5e-2
"""The largest allowed relative error of a timed step. Every layer may round to bfloat16."""

Run = Callable[[Any, transformers.StaticCache], torch.Tensor]
"""Runs one step of a model with a cache, and returns its result."""


def config(
    shape: Shape, num_layers: int, vocab_size: int, room: int = 0, sliding_window: int | None = None
) -> transformers.PreTrainedConfig:
    """The configuration of a Llama with the heads of ``shape`` and the proportions of Llama 3 8B.

    It has positions for the context of ``shape``, and for ``room`` further tokens. With ``sliding_window``, a number of
    tokens, it is a Mistral of the same proportions, whose layers all have this window.
    """
    hidden_size = shape.num_heads * shape.head_dim
    window = {} if sliding_window is None else {"sliding_window": sliding_window}
    return (transformers.MistralConfig if window else transformers.LlamaConfig)(
        **window,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 7 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context + room,
        tie_word_embeddings=False,
    )


def small_config(num_layers: int) -> transformers.LlamaConfig:
    """The configuration of a narrow Llama, for benchmarks of compilation and of the host's time."""
    return transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


def random_model(config: transformers.PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """The model with random weights, which are equal in every call."""
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def empty_cache(
    config: transformers.PreTrainedConfig, shape: Shape, dtype: torch.dtype, device: torch.device
) -> transformers.StaticCache:
    """A static cache with room for ``shape.context`` tokens. All tokens except the last count as filled."""
    cache = transformers.StaticCache(config=config, max_cache_len=shape.context)
    cache.early_initialization(shape.batch, shape.num_kv_heads, shape.head_dim, dtype, device)
    rewind(cache)
    return cache


def random_cache(
    config: transformers.PreTrainedConfig, shape: Shape, dtype: torch.dtype, device: torch.device
) -> transformers.StaticCache:
    """:func:`empty_cache` with random values."""
    cache = empty_cache(config, shape, dtype, device)
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def rewind(cache: transformers.StaticCache) -> None:
    """Make the next step write the last token."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(layer.max_cache_len - 1)


def packed_layers(cache: transformers.StaticCache) -> int:
    """The number of layers whose keys and values are both packed."""
    return sum(
        isinstance(layer.keys, PackedTensor) and isinstance(layer.values, PackedTensor) for layer in cache.layers
    )


def check_step(result: torch.Tensor, run: Run, model: Any, shape: Shape, cache: transformers.StaticCache) -> float:
    """Relative error of ``result`` compared with the uncompiled ``model`` on a plain cache of the values in ``cache``.

    Raises:
        ArithmeticError: the error is too large.
    """
    keys = cache.layers[0].keys
    plain = empty_cache(model.config, shape, keys.dtype, keys.device)
    for layer, source in zip(plain.layers, cache.layers, strict=True):
        layer.keys.copy_(source.keys)
        layer.values.copy_(source.values)
    return check(relative_error(result, run(model, plain)), "the decode step", MAX_ERROR)
