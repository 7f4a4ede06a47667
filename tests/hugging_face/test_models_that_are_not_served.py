"""``generate()`` of a model that gets no packed cache runs as without kvcompile, and the report says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import KVCompileError, collect_reports

transformers = pytest.importorskip("transformers")
from sweep_library import architecture_of  # noqa: E402

LOSSLESS = "float32"


def small(model_type: str, attention: str = "sdpa") -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} lacks it")
    return architecture_of(model_type).build(model_type, attention)


def generated(model: Any) -> Tensor:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(1))
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.mark.parametrize(
    ("model_type", "attention", "reason"),
    [
        ("falcon_h1", "sdpa", "layers of the kind LinearAttentionAndStaticFullAttentionLayer are not packed before"),
        ("xlnet", "eager", "Transformers makes no cache with layers of keys and values for it"),
        ("deepseek_v4", "eager", "static_cache: DeepseekV4ForCausalLM does not run on one token with a static cache"),
    ],
)
def test_the_report_says_why_nothing_is_packed(model_type: str, attention: str, reason: str) -> None:
    model = small(model_type, attention)
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        for _ in range(2):
            assert torch.equal(generated(model), expected)
    line = f"generate() of this {type(model).__name__} runs without a packed cache: {reason}"
    assert [note.startswith(line) for note in report.notes] == [True, False]  # the other one is of any empty report


def test_layers_that_are_not_packed_from_the_start_are_packed_by_compiled_steps() -> None:
    model = small("falcon_h1")
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    ids = expected[:, :6]
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, past_key_values=cache)
    assert torch.equal(tokens, expected)
    assert all(isinstance(layer.keys, kvcompile.PackedTensor) for layer in cache.layers)


def test_no_reason_is_given_if_the_policy_packs_nothing() -> None:
    model = kvcompile.compile(small("falcon_h1"), policy={"default": {"dtype": "auto"}})
    with collect_reports() as report:
        generated(model)
    assert not any("without a packed cache" in note for note in report.notes)


def test_a_model_without_static_caches_is_named() -> None:
    """Transformers has no static layers for DeepSeek-V4, and fails to make a cache."""
    with pytest.raises(KVCompileError, match="static_cache: DeepseekV4ForCausalLM does not run on one token with a"):
        kvcompile.static_cache(small("deepseek_v4", "eager"), 1, 64, LOSSLESS)


def test_states_outside_of_the_cache_stay_as_they_were() -> None:
    """RecurrentGemma keeps the states of its recurrent layers in attributes of modules."""
    model = small("recurrent_gemma")
    kvcompile.static_cache(model, 2, 64, LOSSLESS)
    states = [module.recurrent_states for module in model.modules() if hasattr(module, "recurrent_states")]
    assert states == [None, None]
    expected = generated(model)
    assert torch.equal(generated(kvcompile.compile(model, policy=LOSSLESS)), expected)
