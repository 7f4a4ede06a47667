"""Small models of Transformers whose layers have sliding windows of 16 tokens."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def windowed() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    layers = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma2Config(**sizes, **heads, **layers, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(config).eval()


def all_windowed() -> Any:
    """All layers have a window of 16 tokens, as in Mistral and Phi-3."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = transformers.MistralConfig(**sizes, **heads, sliding_window=16, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config).eval()
