"""Layers that are compiled one by one do not tell their place in the model. Rules for layers need the model's cache."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.compat.transformers import with_cache

transformers = pytest.importorskip("transformers")
from tiny_llama import attention_llama  # noqa: E402

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")

RULES = [{"match": {"layers": "0"}, "dtype": "int8_per_token_head"}]
POLICY = {"default": {"dtype": "float32"}, "rules": RULES}
IDS = torch.tensor([[5, 6, 7, 8] * 5])


def llama_of_compiled_layers(policy: Any = POLICY) -> Any:
    model, backend = attention_llama(num_layers=3), kvcompile.kvquant(policy=policy, on_unsupported="error")
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return model


def formats_after_steps(model: Any, cache: Any) -> list[str]:
    model(IDS, **with_cache(model, cache))
    model(IDS[:, :1], **with_cache(model, cache))
    return [layer.keys.packed_layout.format_name for layer in cache.layers]


def test_a_rule_for_a_layer_does_not_decide_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = llama_of_compiled_layers()
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with caplog.at_level(logging.WARNING, "kvcompile"):
        assert formats_after_steps(model, cache) == ["float32"] * 3
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("policy: rule")]
    assert "rule 1 (layers '0') cannot be decided: a layer that is compiled alone does not tell its layer" in line


def test_a_packed_cache_brings_the_formats_of_all_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = llama_of_compiled_layers()
    with caplog.at_level(logging.WARNING, "kvcompile"):
        cache = kvcompile.static_cache(model, 1, 64, POLICY)
        assert formats_after_steps(model, cache) == ["int8_per_token_head", "float32", "float32"]
    assert "policy: rule" not in caplog.text


def test_a_strict_policy_refuses_a_rule_that_cannot_be_decided() -> None:
    model = llama_of_compiled_layers({**POLICY, "strict": True})
    cache = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(Exception, match=r"PolicyError: .*cannot be decided.*kvcompile\.static_cache"):
        formats_after_steps(model, cache)


def test_a_new_cache_compiles_no_layer() -> None:
    model = llama_of_compiled_layers()
    counters.clear()
    kvcompile.static_cache(model, 1, 64, POLICY)
    assert counters["stats"]["unique_graphs"] == 0


def test_threads_that_make_caches_leave_the_compiler_on() -> None:
    model = llama_of_compiled_layers()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: kvcompile.static_cache(model, 1, 64, POLICY), range(12)))
    counters.clear()
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    assert counters["stats"]["unique_graphs"] == 1


def test_the_compiler_stays_on_for_a_model_without_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "set_stance", lambda _: pytest.fail("the stance of all threads was changed"))
    kvcompile.static_cache(kvcompile.compile(attention_llama(num_layers=1), policy=POLICY), 1, 64, POLICY)
