"""Configs of public models, reduced to the fields that decide their caches and weights, and plans for them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import long_context_memory
import pytest

from kvcompile.errors import PolicyError
from kvcompile.planning.config_file import read_config
from kvcompile.planning.errors import PlanError
from kvcompile.planning.make_plan import make_plan
from kvcompile.planning.model_caches import ModelCaches, read_model_caches
from kvcompile.planning.plan import Plan, Request

GIB = 2**30

LLAMA_3_1_8B: dict[str, Any] = {**long_context_memory.LLAMA_3_1_8B, "tie_word_embeddings": False}

LLAMA_3_1_405B: dict[str, Any] = {
    **LLAMA_3_1_8B,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}

QWEN_2_5_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}

QWEN_2_5_72B: dict[str, Any] = {
    **QWEN_2_5_7B,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
}

MISTRAL_7B_V0_1: dict[str, Any] = {
    "model_type": "mistral",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

GEMMA_2_9B: dict[str, Any] = {
    "model_type": "gemma2",
    "torch_dtype": "float32",
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 256000,
}

GEMMA_3_4B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
}

GPT_2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}

QWEN_3_NEXT_80B: dict[str, Any] = {
    "model_type": "qwen3_next",
    "torch_dtype": "bfloat16",
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_key_head_dim": 128,
    "num_attention_heads": 16,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
}

WHISPER_TINY: dict[str, Any] = {
    "model_type": "whisper",
    "torch_dtype": "float32",
    "d_model": 384,
    "decoder_attention_heads": 6,
    "decoder_layers": 4,
    "encoder_layers": 4,
    "is_encoder_decoder": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_hidden_layers": 4,
}

T5_SMALL: dict[str, Any] = {
    "model_type": "t5",
    "d_kv": 64,
    "d_model": 512,
    "is_encoder_decoder": True,
    "num_heads": 8,
    "num_layers": 6,
}


def write_config(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write ``config`` with ``changes`` to ``folder/config.json``; a field that is changed to None is omitted."""
    values = {name: value for name, value in {**config, **changes}.items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return path


def model_of(config: dict[str, Any], source_tokens: int | None = None, **changes: Any) -> ModelCaches:
    """The caches of a config with ``changes``."""
    with tempfile.TemporaryDirectory() as folder:
        return read_model_caches(read_config(write_config(Path(folder), config, **changes)), source_tokens)


def plan_of(config: dict[str, Any], *policies: str, **request: Any) -> Plan:
    """A plan for a config, by default with a KV budget of 74 GiB and contexts of 2048 to 131072 tokens."""
    if "memory" not in request:
        request.setdefault("kv_budget", 74 * GIB)
    request.setdefault("contexts", (2048, 8192, 32768, 131072))
    with tempfile.TemporaryDirectory() as folder:
        return make_plan(Request(write_config(Path(folder), config), policies, **request))


def error_of(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    """The message of the planner's error."""
    with pytest.raises((PlanError, PolicyError)) as caught:
        function(*arguments, **keywords)
    return str(caught.value)
