"""Small random models of the architectures that the sweep covers, built from their configuration classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB_SIZE = 97

DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,  # the caches of Transformers read it too
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
}
_WINDOW = {"sliding_window": 16}
_WINDOW_AND_FULL = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED = {
    **_WINDOW,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,  # the last two layers attend to the keys and values of the first two
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}


@dataclass(frozen=True)
class Architecture:
    """One model type of Transformers.

    Attributes:
        sizes: fields of its configuration.
        is_encoder_decoder: whether the model has an encoder.
    """

    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_encoder_decoder: bool = False

    def build(self, model_type: str, attn_implementation: str) -> Any:
        """A model in float32 with random weights that are large enough to make attention selective.

        Raises:
            ValueError: the model does not support this attention implementation.
        """
        torch.manual_seed(0)
        model = self.make(model_type, attn_implementation)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() >= 2:
                    torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        return model

    def make(self, model_type: str, attn_implementation: str | None) -> Any:
        """The model as Transformers initialises it."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        config = AutoConfig.for_model(model_type, **self.sizes)
        auto_model = AutoModelForSeq2SeqLM if self.is_encoder_decoder else AutoModelForCausalLM
        return auto_model.from_config(config, attn_implementation=attn_implementation).eval()


def _decoder(*parts: Mapping[str, Any], **sizes: Any) -> Architecture:
    return Architecture({**DECODER, **{k: v for part in parts for k, v in part.items()}, **sizes})


def _encoder_decoder(base: Mapping[str, Any] = _ENCODER_DECODER, **sizes: Any) -> Architecture:
    return Architecture({**base, **sizes}, is_encoder_decoder=True)


ARCHITECTURES: dict[str, Architecture] = {
    "apertus": _decoder(),
    "arcee": _decoder(),
    "bart": _encoder_decoder(),
    "biogpt": _decoder(),
    "bitnet": _decoder(),
    "blenderbot": _encoder_decoder(),
    "bloom": _decoder(n_head=4, n_layer=2),
    "codegen": _decoder(n_embd=64, n_head=4, n_layer=2, n_inner=96, n_positions=256, n_ctx=256, rotary_dim=8),
    "cohere": _decoder(),
    "cohere2": _decoder(_WINDOW_AND_FULL),
    "deepseek_v2": _decoder(EXPERTS, _LATENT),
    "deepseek_v3": _decoder(EXPERTS, _LATENT),
    "diffllama": _decoder(),
    "ernie4_5": _decoder(),
    "exaone4": _decoder(_WINDOW_AND_FULL),
    "falcon": Architecture({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2,
                            "num_attention_heads": 4, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "gemma": _decoder(),
    "gemma2": _decoder(_WINDOW_AND_FULL),
    "gemma3_text": _decoder(_WINDOW_AND_FULL),
    "gemma3n_text": _decoder(_SHARED, intermediate_size=[96] * 4, activation_sparsity_pattern=None, laurel_rank=8,
                             altup_num_inputs=2),
    "gemma4_text": _decoder(_SHARED),
    "glm": _decoder(),
    "glm4": _decoder(),
    "glm4_moe": _decoder(EXPERTS),
    "gpt2": _decoder(n_embd=64, n_head=4, n_layer=2, n_inner=96, n_positions=256),
    "gpt_bigcode": _decoder(n_embd=64, n_head=4, n_layer=2, n_inner=96, n_positions=256),
    "gpt_neo": _decoder(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16),
    "gpt_neox": _decoder(),
    "gpt_oss": _decoder(EXPERTS, _WINDOW_AND_FULL),
    "gptj": _decoder(n_embd=64, n_head=4, n_layer=2, n_inner=96, n_positions=256, rotary_dim=8),
    "granite": _decoder(),
    "granitemoe": _decoder(EXPERTS),
    "helium": _decoder(),
    "jetmoe": _decoder(EXPERTS, kv_channels=16),
    "llama": _decoder(),
    "llama4_text": _decoder(EXPERTS, attention_chunk_size=16, layer_types=["chunked_attention", "full_attention"],
                            intermediate_size_mlp=96),
    "m2m_100": _encoder_decoder(),
    "marian": _encoder_decoder(),
    "mbart": _encoder_decoder(),
    "mistral": _decoder(sliding_window=None),
    "mixtral": _decoder(EXPERTS),
    "mpt": _decoder(d_model=64, n_heads=4, n_layers=2, max_seq_len=256),
    "mt5": _encoder_decoder(_T5),
    "nemotron": _decoder(),
    "olmo": _decoder(),
    "olmo2": _decoder(),
    "olmo3": _decoder(_WINDOW_AND_FULL),
    "olmoe": _decoder(EXPERTS),
    "opt": _decoder(ffn_dim=96, word_embed_proj_dim=64),
    "pegasus": _encoder_decoder(),
    "persimmon": _decoder(),
    "phi": _decoder(),
    "phi3": _decoder(sliding_window=None),
    "plbart": _encoder_decoder(),
    "qwen2": _decoder(),
    "qwen2_moe": _decoder(EXPERTS),
    "qwen3": _decoder(),
    "qwen3_moe": _decoder(EXPERTS),
    "qwen3_next": _decoder(EXPERTS, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                           linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
    "seed_oss": _decoder(),
    "smollm3": _decoder(),
    "stablelm": _decoder(),
    "starcoder2": _decoder(),
    "t5": _encoder_decoder(_T5),
    "t5gemma": _encoder_decoder({}, vocab_size=VOCAB_SIZE, encoder=DECODER | _WINDOW_AND_FULL,
                                decoder=DECODER | _WINDOW_AND_FULL),
    "umt5": _encoder_decoder(_T5),
    "xglm": _decoder(d_model=64, ffn_dim=96, num_layers=2, attention_heads=4),
}  # fmt: skip
"""Maps each model type to its small model."""
