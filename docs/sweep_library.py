"""The model types of the installed Transformers, with small configurations made by one rule.

The list is the library's own: every type with a class for causal language models or for encoder-decoder text models.
:data:`sweep_models.ARCHITECTURES` has the types whose sizes are chosen by hand. All other types get the sizes in
:data:`STANDARD` whose names are fields of their configuration class.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import sweep_models
import torch
from sweep_models import ARCHITECTURES, VOCAB_SIZE, Architecture

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MAX_PARAMETERS = 2 * 10**7
"""The maximum number of parameters. A model with more has a part that ignores the sizes."""

STANDARD: dict[str, Any] = {
    **sweep_models.DECODER,
    **sweep_models.EXPERTS,
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "n_embd": 64,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "d_kv": 16,
    "d_ff": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "n_positions": 256,
    "max_seq_len": 256,
    "rotary_dim": 8,
    "sliding_window": 16,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "decoder_start_token_id": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
    "state_size": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}
"""Sizes by the names that configurations of Transformers give them."""


class NotBuiltError(Exception):
    """A type has no small model; the message says why."""


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_HYBRID = ["linear_attention", "linear_attention", "hybrid"]
_INDEXER = {"index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}

CHOICES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **_INDEXER,
        "head_dim": 32,
        "mlp_layer_types": ["dense", "sparse"],
        "per_layer_config": {},
        "shared_experts_intermediate_size": 32,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "heads_per_ngram": 2,
        "hc_lowrank": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 16,
        "indexer_kv_heads": 1,
        "indexer_n_heads": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 16,
        "split_ngram_parts": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layer_types": [*_HYBRID, "linear_attention", "hybrid"],
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "num_hidden_layers": 5,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "adapter_rank": 8,
        "chunk_size": 8,
        "hybrid_layer_ids": [2],
        "layer_types": _HYBRID,
        "mamba_d_state": 16,
        "n_mamba_heads": 8,
        "num_hidden_layers": 3,
        "use_mamba_kernels": False,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields by model type that the rule cannot know."""


@functools.cache
def model_types() -> dict[str, bool]:
    """All types of the library, and whether each has an encoder."""
    from transformers.models.auto import modeling_auto

    causal = dict.fromkeys(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, False)
    return dict.fromkeys(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, True) | causal | {
        name: architecture.is_encoder_decoder for name, architecture in ARCHITECTURES.items()
    }  # fmt: skip


def architecture_of(model_type: str) -> Architecture:
    """The small model of a type.

    Raises:
        NotBuiltError: the rule makes no small model of it.
    """
    known = ARCHITECTURES.get(model_type)
    if known is not None:
        return known
    try:
        architecture = Architecture(_sizes(model_type), model_types()[model_type])
        with torch.device("meta"):
            parameters = sum(weight.numel() for weight in architecture.make(model_type, None).parameters())
    except Exception as error:
        raise NotBuiltError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    if parameters > MAX_PARAMETERS:
        raise NotBuiltError("its sizes are fields of other names, or of parts for images and sound")
    return architecture


def _sizes(model_type: str) -> dict[str, Any]:
    from transformers import AutoConfig

    return _sizes_of(AutoConfig.for_model(model_type)) | CHOICES.get(model_type, {})


def _sizes_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Small sizes for the fields of ``config``, and for the fields of its parts, such as ``text_config``."""
    computed = {name for name, kind in vars(type(config)).items() if isinstance(kind, property) and kind.fset is None}
    computed |= {name for name, field in config.attribute_map.items() if field in computed}
    names = {*vars(config), *config.attribute_map} - computed
    sizes = {name: size for name, size in STANDARD.items() if name in names}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if not getattr(config, "sliding_window", None):
        sizes.pop("sliding_window", None)
    kinds = () if "layer_types" in computed else getattr(config, "layer_types", None) or ()
    if kinds := list(dict.fromkeys(kinds)):
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes |= {name: len(sizes["layer_types"]) for name in ("num_hidden_layers", "num_layers") if name in sizes}
    return sizes | _sizes_of_parts(config)


def _sizes_of_parts(config: PreTrainedConfig) -> dict[str, Any]:
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {
        name: {**_sizes_of(part), **({"model_type": part.model_type} if part.model_type else {})}
        for name, part in parts.items()
        if hasattr(part, "sub_configs")
    }
