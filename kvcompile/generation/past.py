"""What a request to ``generate()`` reads of the tokens that the cache of the caller holds."""

from __future__ import annotations

from typing import Any

from kvcompile.caches.static import packed_layers
from kvcompile.compat.transformers import mask_length as mask_length_of


def repeats_the_past(config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether the prompt repeats the tokens in the cache.

    This is so for token ids whose attention mask has the same length, and always for embeddings.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        return True
    mask = model_kwargs.get("attention_mask")
    mask_length = mask.shape[1] if mask is not None else mask_length_of(config)
    return config.max_new_tokens is not None and mask_length == config.max_length - config.max_new_tokens


def reads_past_again(cache: Any, config: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether assisted decoding, which reads the whole prompt, reads all tokens of a packed static cache again.

    Transformers would store them behind the tokens that the cache holds. False for embeddings, which may be those of
    new tokens alone.
    """
    has_embeddings = model_kwargs.get("inputs_embeds") is not None
    if has_embeddings or not packed_layers(cache) or not repeats_the_past(config, model_kwargs):
        return False
    return bool(cache.get_seq_length() < config.max_length - config.max_new_tokens)
