"""``generate()`` runs on packed caches: static caches with CompileConfig, and any cache with ``model.compile``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile import collect_reports
from kvcompile.packed.tensor import PackedTensor

transformers = pytest.importorskip("transformers")
from tiny_llama import DEVICES, assistant, assisted_on_static_caches, attention_llama, left_padded  # noqa: E402


@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize("device", [*DEVICES, pytest.param("cpu", id="generated code", marks=pytest.mark.slow)])
def test_generate_with_a_static_cache_and_a_compile_config_packs_the_cache(device: str) -> None:
    torch._dynamo.reset()
    model = attention_llama(device=device, num_layers=1)
    prompt = torch.randint(0, 97, (2, 20), device=device)
    config = transformers.CompileConfig(backend="kvquant", mode=None, options={"policy": "int8_per_token_head"})
    config._compile_all_devices = True  # by default Transformers compiles on accelerators only
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    with collect_reports() as report:
        result = model.generate(prompt, cache_implementation="static", compile_config=config, **arguments)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert report.totals.rewritten == report.totals.sites > 0
    plain = model.generate(prompt, cache_implementation="static", disable_compile=True, **arguments)
    assert result.sequences.shape == plain.sequences.shape
    assert (result.sequences == plain.sequences).float().mean() > 0.9


@pytest.mark.usefixtures("node_by_node_on_cpu")
@pytest.mark.parametrize("device", DEVICES)
def test_model_compile_packs_the_default_growing_cache_of_generate(device: str) -> None:
    torch._dynamo.reset()
    model = attention_llama(device=device, num_layers=1)
    prompt = torch.randint(0, 97, (2, 20), device=device)
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(prompt, **arguments)
    model.compile(backend="kvquant")
    result = model.generate(prompt, **arguments)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert result.sequences.shape == plain.sequences.shape


LOSSLESS = {"default": {"dtype": "float32"}}
"""Packed caches store float32 exactly, so tokens must equal the tokens without the backend."""

REPETITIVE = torch.tensor([[5, 6, 7, 8] * 5])


VARIANTS: dict[str, dict[str, Any]] = {
    "beams, which reorder the cache, of left-padded sequences": {**left_padded(), "num_beams": 3},
    "prompt lookup, which crops the cache": {"inputs": REPETITIVE, "prompt_lookup_num_tokens": 3},
    "a static cache, prefilled in chunks": {
        **left_padded(16),
        "prefill_chunk_size": 8,
        "cache_implementation": "static",
    },
}


def generated(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(5)
    common = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    return model.generate(**{**common, "disable_compile": True, **arguments})


def compiled_llama() -> Any:
    model = attention_llama(num_layers=1)
    model.compile(backend="kvquant", options={"policy": LOSSLESS, "on_unsupported": "error"})
    return model


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    "arguments",
    [
        # An assistant that guesses wrong, below, crops the cache as prompt lookup does.
        pytest.param(arguments, id=name, marks=pytest.mark.slow if "prompt lookup" in name else ())
        for name, arguments in VARIANTS.items()
    ],
)
def test_every_way_to_decode_works_on_packed_caches(arguments: dict[str, Any]) -> None:
    expected = generated(attention_llama(num_layers=1), **arguments)
    with collect_reports() as report:
        result = generated(compiled_llama(), **arguments)
    assert torch.equal(result.sequences, expected.sequences)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert report.notes == []


@pytest.mark.usefixtures("without_code_generation")
def test_wrong_guesses_of_an_assistant_are_cropped(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE, max_new_tokens=4)
    cropped: list[type] = []
    crop = transformers.DynamicCache.crop

    def watched(cache: Any, tokens_to_remove: int) -> None:
        cropped.extend([type(cache.layers[0].keys)] * (tokens_to_remove != 0))
        crop(cache, tokens_to_remove)

    monkeypatch.setattr(transformers.DynamicCache, "crop", watched)
    result = generated(compiled_llama(), inputs=REPETITIVE, assistant_model=assistant(), max_new_tokens=4)
    assert torch.equal(result.sequences, expected.sequences)
    assert PackedTensor in cropped


@assisted_on_static_caches
@pytest.mark.usefixtures("without_code_generation")
def test_transformers_compiles_the_steps_that_check_an_assistant_and_a_static_cache_is_packed() -> None:
    arguments: dict[str, Any] = {"inputs": REPETITIVE, "cache_implementation": "static", "max_new_tokens": 40}
    expected = generated(attention_llama(num_layers=1), **arguments)
    config = transformers.CompileConfig(backend=kvcompile.kvquant(policy=LOSSLESS), mode=None)
    config._compile_all_devices = True
    model = attention_llama(num_layers=1)
    how = {"assistant_model": assistant(), "compile_config": config, "disable_compile": False}
    result = generated(model, **how, **arguments)
    assert torch.equal(result.sequences, expected.sequences)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert kvcompile.last_report().totals.plain_calls == 0


@pytest.mark.usefixtures("without_code_generation")
def test_a_returned_cache_continues_the_conversation_and_copies_of_it_continue_otherwise() -> None:
    def conversation(model: Any) -> list[torch.Tensor]:
        first = generated(model, inputs=left_padded()["inputs"], do_sample=True, top_k=5)
        sequences = [first.sequences]
        for question in (torch.tensor([[11, 12]]), torch.tensor([[13, 14]])):
            ids = torch.cat([first.sequences, question.expand(2, -1)], 1)
            answer = generated(model, inputs=ids, past_key_values=copy.deepcopy(first.past_key_values))
            sequences.append(answer.sequences)
            assert type(answer.past_key_values.layers[0].keys) is type(first.past_key_values.layers[0].keys)
        return sequences

    expected = conversation(attention_llama(num_layers=1))
    for sequence, plain in zip(conversation(compiled_llama()), expected, strict=True):
        assert torch.equal(sequence, plain)


@pytest.mark.parametrize(
    "mode", [{"num_beams": 2, "cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}], ids=" ".join
)
def test_a_report_notes_that_generate_did_not_call_the_compiled_function(mode: dict[str, Any]) -> None:
    model = attention_llama(num_layers=1)
    config = transformers.CompileConfig(backend="kvquant", mode=None)
    config._compile_all_devices = True
    with collect_reports() as report:
        model.generate(REPETITIVE, max_new_tokens=2, compile_config=config, **mode)
    (note,) = report.notes
    assert "model.compile(backend='kvquant')" in note
    assert note in str(report)
