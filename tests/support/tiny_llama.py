"""A Hugging Face Llama small enough to compile in seconds, and its caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM  # forks of a process that has this module do not import them

MAX_LEN = 200
PRESETS = ["int8_per_token_head", "fp8_e4m3", "int4_per_token_head", "turboquant_4bit_nc"]
assisted_on_static_caches = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"),
    reason="Transformers refuses assisted decoding on static caches",
)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tiny_llama(dtype: torch.dtype = torch.float32, device: str = "cpu", num_layers: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    config = LlamaConfig(**{**sizes, **changes})
    return LlamaForCausalLM(config).eval().to(device=device, dtype=dtype)


def attention_llama(*args: Any, **how: Any) -> Any:
    """A tiny Llama whose layers only attend: norms and MLPs take an eighth of the time of a test that compiles it."""
    model = tiny_llama(*args, **how)
    for layer in model.model.layers:
        layer.mlp, layer.input_layernorm, layer.post_attention_layernorm = (torch.nn.Identity() for _ in range(3))
    model.model.norm = torch.nn.Identity()
    return model


def assistant() -> Any:
    """A model that guesses most tokens of :func:`attention_llama`, but not all."""
    model = attention_llama(num_layers=1)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
    return model


def fresh_cache(model: Any, kind: str) -> Any:
    if kind == "static":
        return transformers.StaticCache(config=model.config, max_cache_len=MAX_LEN)
    return transformers.DynamicCache(config=model.config)


def left_padded(num_tokens: int = 20) -> dict[str, torch.Tensor]:
    """Two prompts for ``generate()``; the first one has 7 tokens of padding. Equal numbers give equal tokens."""
    ids = torch.randint(3, 97, (2, num_tokens), generator=torch.Generator().manual_seed(num_tokens))
    mask = torch.ones_like(ids)
    mask[0, :7] = ids[0, :7] = 0
    return {"inputs": ids, "attention_mask": mask}
