"""A policy and a config that tests write to files and change."""

from __future__ import annotations

POLICY = """
version: 1
rules:
  - {match: {layers: "0-1, -2:"}, dtype: fp8_e4m3}
  - {match: {module: "re:.*cross_attn"}, dtype: auto}
  - match: {layers: "2:-2"}
    key: {dtype: int4, granularity: per_channel, group_size: 64}
    value: {dtype: int4_per_token_head}
default: {dtype: int8_per_token_head}
residual_length: 64
sink_tokens: 4
on_unsupported: warn
strict: false
"""
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 97, "max_position_embeddings": 128,
}  # fmt: skip
