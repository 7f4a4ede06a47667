"""Facts about the caches of model types that their configs omit, from the model classes of Transformers 5.17.

Unlisted model types use the default :class:`Family`, and the plan has a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """The properties that all models of a type share.

    Attributes:
        module: qualified name of a layer's attention in the class that generates text.
        cross_module: qualified name of a layer's attention over the encoder's tokens.
        multi_head: whether a config without a number of KV heads has a KV head for every attention head.
        full_every: the period of layers with full attention, for a config with a ``sliding_window`` but no list of
            sliding layers. 0 means that all layers have sliding windows; None means that the config must list them.
        defaults: fields that published configs omit and that cannot be derived from others.
    """

    module: str = "model.layers.{layer}.self_attn"
    cross_module: str = ""
    multi_head: bool = False
    full_every: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_T5 = Family("decoder.block.{layer}.layer.0.SelfAttention", "decoder.block.{layer}.layer.1.EncDecAttention", True)
_BART = Family("model.decoder.layers.{layer}.self_attn", "model.decoder.layers.{layer}.encoder_attn", True)
_GPT2 = Family("transformer.h.{layer}.attn", multi_head=True)

FAMILIES: dict[str, Family] = {
    "bart": _BART,
    "bloom": Family("transformer.h.{layer}.self_attention", multi_head=True),
    "codegen": _GPT2,
    "cohere": Family(multi_head=True),
    "cohere2": Family(full_every=4),
    "deepseek_v2": Family(),
    "deepseek_v3": Family(),
    "exaone4": Family(full_every=4),
    "gemma": Family(defaults={"head_dim": 256}),
    "gemma2": Family(full_every=2, defaults={"head_dim": 256}),
    "gemma3_text": Family(full_every=6, defaults={"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}),
    "gemma4_text": Family(),
    "glm4": Family(),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neo": Family("transformer.h.{layer}.attn.attention", multi_head=True),
    "gpt_neox": Family("gpt_neox.layers.{layer}.attention", multi_head=True, defaults={"attention_bias": True}),
    "gpt_oss": Family(full_every=2, defaults={"head_dim": 64, "attention_bias": True}),
    "gptj": _GPT2,
    "granite": Family(multi_head=True),
    "jamba": Family(),
    "lfm2": Family(),
    "llama": Family(multi_head=True),
    "llama4_text": Family(),
    "m2m_100": _BART,
    "marian": _BART,
    "mbart": _BART,
    "ministral": Family(full_every=0),
    "ministral3": Family(full_every=0),
    "mistral": Family(full_every=0),
    "mixtral": Family(full_every=0),
    "mpt": Family("transformer.blocks.{layer}.attn", multi_head=True),
    "mt5": _T5,
    "olmo": Family(multi_head=True),
    "olmo2": Family(multi_head=True),
    "olmo3": Family(multi_head=True, full_every=4),
    "opt": Family("model.decoder.layers.{layer}.self_attn", multi_head=True),
    "pegasus": _BART,
    "phi": Family(multi_head=True),
    "phi3": Family(multi_head=True, full_every=0),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(defaults={"head_dim": 128}),
    "qwen3_5_text": Family(),
    "qwen3_moe": Family(),
    "qwen3_next": Family(defaults={"head_dim": 256}),
    "smollm3": Family(),
    "stablelm": Family(multi_head=True),
    "starcoder2": Family(full_every=0, defaults={"use_bias": True}),
    "t5": _T5,
    "umt5": _T5,
    "whisper": _BART,
}
