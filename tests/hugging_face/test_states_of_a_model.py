"""Autocast, training and inference mode change between requests, and each gets a cache that fits; eager requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvcompile
from kvcompile import KVCompileError, PackedTensor, collect_reports

transformers = pytest.importorskip("transformers")
from sweep_library import architecture_of  # noqa: E402
from tiny_llama import attention_llama, tiny_llama  # noqa: E402

LOSSLESS = "float32"


def gpt2(dropout: float = 0.0) -> Any:
    """Its keys and values have one dtype under autocast."""
    sizes = {"vocab_size": 97, "n_embd": 64, "n_head": 2, "n_layer": 1, "n_positions": 128}
    dropouts = {"attn_pdrop": dropout, "resid_pdrop": dropout, "embd_pdrop": dropout}
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts, **tokens)).eval()


def generated(model: Any, **arguments: Any) -> Any:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(1))
    common = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model.generate(ids, **{**common, **arguments})


def keys_of(model: Any) -> Tensor:
    keys: Tensor = generated(model, return_dict_in_generate=True).past_key_values.layers[0].keys
    return keys


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


def test_requests_with_and_without_autocast_take_turns() -> None:
    """The first one runs before autocast has cast a weight: no weight without memory stays in autocast's cache."""
    plain, model = gpt2(), kvcompile.compile(gpt2(), policy=LOSSLESS)
    for is_on in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            assert torch.equal(generated(model), generated(plain))
            keys = keys_of(model)
        assert (type(keys), keys.dtype) == (PackedTensor, torch.bfloat16 if is_on else torch.float32)


def test_the_cache_of_a_request_does_not_serve_one_with_autocast() -> None:
    plain, model = gpt2(), kvcompile.compile(gpt2(), policy=LOSSLESS)
    for is_on in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on, cache_enabled=False):
            assert torch.equal(generated(model), generated(plain))


def test_a_cache_made_under_autocast_leaves_its_casts_alone() -> None:
    model, ids = gpt2(), torch.zeros((1, 3), dtype=torch.int64)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        kvcompile.static_cache(model, 1, 64, LOSSLESS)
        assert torch.is_autocast_cache_enabled()
        assert type(model(ids).logits) is Tensor


def test_keys_and_values_of_two_dtypes_get_a_plain_cache_until_autocast_ends() -> None:
    """Rotary embeddings are computed in float32, so keys stay in float32."""
    plain, model = tiny_llama(num_layers=1), kvcompile.compile(tiny_llama(num_layers=1), policy=LOSSLESS)
    with torch.autocast("cpu", torch.bfloat16):
        with collect_reports() as report:
            assert torch.equal(generated(model), generated(plain))
        with pytest.raises(KVCompileError, match=r"values in torch.bfloat16.* outside of torch.autocast"):
            kvcompile.static_cache(model, 1, 64, LOSSLESS)
    (note,) = report.notes
    assert "computes keys in torch.float32 and values in torch.bfloat16" in note
    assert isinstance(keys_of(model), PackedTensor)


@pytest.mark.parametrize("make", [gpt2, lambda dropout: tiny_llama(num_layers=1, attention_dropout=dropout)])
def test_a_model_with_active_dropout_gets_a_plain_cache_until_it_evaluates(make: Any) -> None:
    model = kvcompile.compile(make(0.5), policy=LOSSLESS)
    with collect_reports() as report:
        assert type(keys_of(model.train())) is Tensor
    (note,) = report.notes
    assert note.endswith("runs without a packed cache: its dropout is active, as in training; call model.eval()")
    assert isinstance(keys_of(model.eval()), PackedTensor)


def test_a_training_model_without_dropout_is_packed() -> None:
    assert isinstance(keys_of(kvcompile.compile(gpt2(), policy=LOSSLESS).train()), PackedTensor)


def test_logits_with_dropout_are_not_compared() -> None:
    """Transformers does not promise that GPT-Neo runs with a static cache, so its logits are compared."""
    model = architecture_of("gpt_neo").build("gpt_neo", "eager").train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    with pytest.raises(KVCompileError, match=r"static_cache: logits of GPTNeo.* its dropout is active.*model.eval\(\)"):
        kvcompile.static_cache(model, 1, 64, LOSSLESS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", ["falcon_h1", "lfm2_moe", "mistral"])
def test_what_a_request_makes_in_inference_mode_is_not_used_outside_of_it(model_type: str) -> None:
    """States and windows are allocated by the first prompt."""
    window = {"sliding_window": 16} if model_type == "mistral" else {}
    model = architecture_of(model_type).build(model_type, "sdpa")
    model = type(model)(type(model.config)(**{**model.config.to_dict(), **window})).eval()
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    for is_on in (True, False, True):
        with torch.inference_mode(is_on):
            assert torch.equal(generated(model), expected)


# Requests that run eager steps only


@pytest.mark.parametrize("arguments", [{"disable_compile": True}, {"max_new_tokens": 1}, {"steps": "assisted"}])
def test_requests_that_run_eager_steps_on_packed_caches_are_counted(arguments: dict[str, Any]) -> None:
    """Steps that check several tokens of an assistant run eagerly, and the request may end with them."""
    model = attention_llama(num_layers=1)
    if arguments.pop("steps", None):
        ids = generated(model, max_new_tokens=5)[:1]
        helper = attention_llama(num_layers=1)
        helper.generation_config.assistant_confidence_threshold = 0.0
        arguments = {"inputs": ids, "attention_mask": torch.ones_like(ids), "assistant_model": helper}
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        if "inputs" in arguments:
            result = model.generate(**arguments, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        else:
            result = generated(model, **arguments, return_dict_in_generate=True)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert (report.notes, report.eager_requests, report.graphs) == ([], 1, [])


def test_an_eager_request_on_the_callers_packed_cache_is_counted() -> None:
    model = attention_llama(num_layers=1)
    cache = kvcompile.static_cache(model, 2, 64, LOSSLESS)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        generated(model, past_key_values=cache, max_new_tokens=1)
    assert (report.notes, report.eager_requests) == ([], 1)


def test_a_request_without_compiled_steps_reads_packed_windows() -> None:
    model = architecture_of("mistral").build("mistral", "sdpa")
    config = {**model.config.to_dict(), "sliding_window": 16}
    model = type(model)(type(model.config)(**config)).eval()
    expected = generated(model)
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        result = generated(model, disable_compile=True, return_dict_in_generate=True)
    assert torch.equal(result.sequences, expected)
    assert all(isinstance(layer.keys, PackedTensor) for layer in result.past_key_values.layers)
    assert report.notes == []


# Layers that hold states beside keys and values


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model_type", ["falcon_h1", "zamba2"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_layers_with_states_beside_keys_and_values_are_packed(model_type: str, arguments: dict[str, Any]) -> None:
    """The second request uses the memory again, and begins with empty states."""
    plain, model = (architecture_of(model_type).build(model_type, "sdpa") for _ in range(2))
    kvcompile.compile(model, policy=LOSSLESS)
    with collect_reports() as report:
        for num_tokens in (4, 3):
            expected = generated(plain, max_new_tokens=num_tokens, **arguments)
            assert torch.equal(generated(model, max_new_tokens=num_tokens, **arguments), expected)
    assert report.totals.packed_layers == report.totals.layers >= 1
    assert report.notes == []


@pytest.mark.sampled(3)
@pytest.mark.parametrize("model_type", ["falcon_h1", "zamba2", "lfm2_moe"])
def test_states_get_a_padded_prompt_beside_packed_keys(model_type: str) -> None:
    """Their mask has two dimensions, and the mask of the attention has the size of the prompt."""
    plain, model = (architecture_of(model_type).build(model_type, "sdpa") for _ in range(2))
    kvcompile.compile(model, policy=LOSSLESS)
    ids = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    options = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


def test_a_conversation_gives_layers_with_states_more_room() -> None:
    plain, model = (architecture_of("falcon_h1").build("falcon_h1", "sdpa") for _ in range(2))
    kvcompile.compile(model, policy=LOSSLESS)
    ids = torch.randint(3, 97, (1, 6), generator=torch.Generator().manual_seed(1))
    cache: dict[str, Any] = {}
    for room in (64, 128):
        mask = torch.ones_like(ids)
        options = {"max_new_tokens": 50, "min_new_tokens": 50, "do_sample": False, "attention_mask": mask}
        result = model.generate(ids, **options, **cache, return_dict_in_generate=True)
        assert torch.equal(result.sequences, plain.generate(ids, **options))
        cache, ids = {"past_key_values": result.past_key_values}, torch.cat([result.sequences, ids[:, :2]], 1)
        layers = result.past_key_values.layers
        assert [(type(layer.keys), layer.keys.shape[2]) for layer in layers] == [(PackedTensor, room)] * len(layers)
