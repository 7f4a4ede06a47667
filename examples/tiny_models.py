"""The models of the examples: real architectures with few channels and random weights, so nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB_SIZE = 256


def tiny_llama(num_layers: int = 1, **changes: Any) -> transformers.LlamaForCausalLM:
    """A Llama with grouped-query attention, 2 KV heads of 64 channels."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tiny_bart() -> transformers.BartForConditionalGeneration:
    """An encoder and a decoder of one layer each, 2 heads of 64 channels."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCAB_SIZE,
        d_model=128,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        max_position_embeddings=128,
        bos_token_id=0,
        pad_token_id=1,
        decoder_start_token_id=2,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    return transformers.BartForConditionalGeneration(config).eval()
