"""The planner reads configs correctly: its caches and parameters match the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import (
    GEMMA_3_4B,
    LLAMA_3_1_8B,
    MISTRAL_7B_V0_1,
    QWEN_2_5_7B,
    QWEN_3_NEXT_80B,
    T5_SMALL,
    WHISPER_TINY,
    error_of,
    model_of,
    plan_of,
    write_config,
)

from kvcompile.planning.config_file import read_config
from kvcompile.planning.model_caches import CONTEXT, read_model_caches
from kvcompile.planning.parameters import ARCHITECTURES, count_parameters
from kvcompile.planning.stored_caches import apply_policy

# The models themselves

MODELS_WITH_CACHES = (
    "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "llama",
    "llama4_text", "mistral", "phi3", "qwen2", "qwen3", "qwen3_next",
)  # fmt: skip


def on_meta(model_type: str, num_layers: int) -> tuple[Any, dict[str, Any]]:
    """A Transformers model on the meta device, and the JSON of its config."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    layers = {"n_layer": num_layers} if model_type == "gpt2" else {"num_hidden_layers": num_layers}
    config = CONFIG_MAPPING[model_type](**layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    return model.eval(), json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("model_type", MODELS_WITH_CACHES)
def test_caches_equal_the_caches_that_the_model_makes(model_type: str) -> None:
    model, config = on_meta(model_type, num_layers=8)
    planned = model_of(config)
    with torch.no_grad():
        made = model(input_ids=torch.zeros(1, 24, dtype=torch.long, device="meta"), use_cache=True).past_key_values
    layers = {index: layer for index, layer in enumerate(made.layers) if getattr(layer, "keys", None) is not None}
    assert [cache.layer for cache in planned.caches] == list(layers)
    for cache in planned.caches:
        layer = layers[cache.layer]
        model.get_submodule(cache.module)
        assert ("Sliding" in type(layer).__name__) == (cache.kind in ("sliding", "chunked"))
        channels = sum(tensor.shape[1] * tensor.shape[3] for tensor in (layer.keys, layer.values))
        assert channels == cache.num_kv_heads * (cache.key_dim + cache.value_dim)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
def test_parameters_are_counted_exactly(model_type: str, tmp_path: Path) -> None:
    model, config = on_meta(model_type, num_layers=4)
    config["num_experts_per_tok"] = config.get("num_experts_per_tok") or 1
    fields = read_config(write_config(tmp_path, config))
    counted = count_parameters(fields, read_model_caches(fields))
    assert counted.count() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["bart", "t5", "whisper"])
def test_caches_of_encoder_decoder_models_equal_the_caches_that_they_make(model_type: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, WhisperForConditionalGeneration

    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"), torch.no_grad():
        if model_type == "whisper":
            model = WhisperForConditionalGeneration(config)
            inputs = {"input_features": torch.zeros(1, config.num_mel_bins, 3000)}
        else:
            model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager")
            inputs = {"input_ids": torch.zeros(1, 40, dtype=torch.long)}
        made = model.eval()(
            decoder_input_ids=torch.zeros(1, 24, dtype=torch.long), use_cache=True, **inputs
        ).past_key_values
    planned = model_of(json.loads(config.to_json_string(use_diff=False)), 40 if model_type != "whisper" else None)
    for kind, layers in (("full", made.self_attention_cache.layers), ("cross", made.cross_attention_cache.layers)):
        caches = [cache for cache in planned.caches if cache.kind == kind]
        assert len(caches) == len(layers)
        for cache, layer in zip(caches, layers, strict=True):
            model.get_submodule(cache.module)
            tokens = cache.tokens.subs(CONTEXT, 24)
            assert tuple(layer.keys.shape) == (1, cache.num_kv_heads, tokens, cache.key_dim)


# Configs


def test_a_config_may_be_given_by_its_directory(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA_3_1_8B)
    assert read_config(tmp_path) == read_config(path)


def test_the_language_part_of_a_multimodal_config_is_read() -> None:
    model = model_of(GEMMA_3_4B)
    assert [cache.kind for cache in model.caches] == (["sliding"] * 5 + ["full"]) * 5 + ["sliding"] * 4
    assert {(cache.num_kv_heads, cache.key_dim) for cache in model.caches} == {(4, 256)}
    assert model.caches[0].module == "model.language_model.layers.0.self_attn"
    assert model.dtype == "bfloat16"


def test_layers_without_keys_and_values_have_no_cache_and_are_noted() -> None:
    model = model_of(QWEN_3_NEXT_80B)
    assert [cache.layer for cache in model.caches] == list(range(3, 48, 4))
    assert any("36 of 48 layers keep a state" in note for note in model.notes)


def test_a_sliding_window_that_is_not_used_limits_nothing() -> None:
    assert {cache.kind for cache in model_of(QWEN_2_5_7B).caches} == {"full"}
    used = model_of(QWEN_2_5_7B, use_sliding_window=True, max_window_layers=20)
    assert [cache.kind for cache in used.caches] == ["full"] * 20 + ["sliding"] * 8


def test_layer_types_win_over_older_fields() -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    model = model_of(MISTRAL_7B_V0_1, layer_types=kinds)
    assert [cache.limit for cache in model.caches] == [None, 4096] * 16


def test_a_cache_that_layers_share_counts_once() -> None:
    assert len(model_of(LLAMA_3_1_8B, num_kv_shared_layers=12).caches) == 20


def test_a_layer_may_have_its_own_fields() -> None:
    model = model_of(LLAMA_3_1_8B, head_dim=128, per_layer_config={"05": {"head_dim": 256}})
    assert [cache.key_dim for cache in model.caches[4:7]] == [128, 256, 128]


def test_an_unknown_model_type_is_read_by_its_fields_and_noted() -> None:
    model = model_of(LLAMA_3_1_8B, model_type="novel")
    assert len(model.caches) == 32
    assert any("'novel' is unknown to the planner" in note for note in model.notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": None}, "no field num_hidden_layers (or n_layer, n_layers, num_layers)"),
        ({"hidden_size": None}, "no field hidden_size (or n_embd, d_model)"),
        ({"num_attention_heads": None}, "no field num_attention_heads"),
        ({"num_key_value_heads": None, "model_type": "novel"}, "no field num_key_value_heads (or num_kv_heads)"),
        ({"num_key_value_heads": "8"}, "num_key_value_heads: expected an integer from 1, got '8'"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected an integer from 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an integer from 1, got True"),
        ({"num_attention_heads": 7}, "head_dim: is missing, and 7 heads do not divide 4096 channels"),
        ({"sliding_window": 4096}, "no field layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 32 names"),
        ({"layer_types": ["sparse_attention"] * 32}, "does not know what a layer 'sparse_attention' keeps"),
        ({"layer_types": ["sliding_attention"] * 32}, "no field sliding_window"),
        ({"layer_types": ["linear_attention"] * 32}, "no layer of this model keeps keys and values"),
        ({"kv_lora_rank": 512}, "no field qk_rope_head_dim"),
        ({"model_type": "novel", "mamba_d_state": 16}, "mamba_d_state: says that some layers do not keep plain"),
        ({"model_type": "novel", "index_topk": 2048}, "index_topk: says that some layers do not keep plain"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not a dtype of caches"),
        ({"is_encoder_decoder": True}, "an encoder-decoder model; give the encoder's tokens with --source-tokens"),
    ],
)
def test_a_config_that_does_not_say_what_is_needed_is_an_error_that_names_the_field(
    changes: dict[str, Any], reason: str
) -> None:
    config = {name: value for name, value in {**LLAMA_3_1_8B, **changes}.items() if value is not None}
    error = error_of(plan_of, config, "auto")
    assert reason in error
    assert "config.json" in error or "dtype" in error


@pytest.mark.parametrize(("text", "reason"), [("{", "line 1 is not valid JSON"), ("[]", "expected a JSON object")])
def test_a_file_that_is_no_config_is_an_error_that_names_it(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    error = error_of(read_config, path)
    assert str(path) in error
    assert reason in error
    path.unlink()
    assert "no such file" in error_of(read_config, tmp_path)


def test_the_encoder_decides_the_cache_that_does_not_grow() -> None:
    whisper = apply_policy("fp32", model_of(WHISPER_TINY))
    assert whisper.nbytes("stored") == 4 * 6 * (64 + 64) * 4 * (CONTEXT + 1500)
    t5 = apply_policy("bf16", model_of(T5_SMALL, source_tokens=300))
    assert t5.nbytes("stored") == 6 * 8 * (64 + 64) * 2 * (CONTEXT + 300)
    assert t5.bytes_per_token("stored") == 6 * 8 * (64 + 64) * 2
    assert "give at most 1500, the max_source_positions" in error_of(model_of, WHISPER_TINY, source_tokens=1501)
    assert "for encoder-decoder models" in error_of(model_of, LLAMA_3_1_8B, source_tokens=1)
