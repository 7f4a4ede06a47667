"""``generate()`` reads a prompt with its own tokens in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies import reading_packed

import kvcompile
from kvcompile.caches import layer as layer_module
from kvcompile.caches import prompt
from kvcompile.caches.prompt import updating_layers
from kvcompile.caches.static import packed_layers
from kvcompile.packed import writes
from kvcompile.packed.tracing import is_traced

transformers = pytest.importorskip("transformers")
from tiny_llama import DEVICES, left_padded, tiny_llama  # noqa: E402

COARSE = "turboquant_2bit"
"""A format whose rounding changes every result."""

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


def logits_after_prompt(model: Any, ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    out = model.generate(
        ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, **arguments
    )
    return out.logits[0]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("arguments", [{}, {"num_beams": 2}, {"prefill_chunk_size": 40}], ids=str)
@pytest.mark.parametrize("length", [17, 40, 65])
@pytest.mark.parametrize("device", DEVICES)
def test_the_first_prediction_equals_the_prediction_of_the_plain_model(
    device: str, length: int, arguments: dict[str, Any]
) -> None:
    ids = torch.randint(0, 97, (2, length), device=device)
    expected = logits_after_prompt(tiny_llama(device=device), ids, **arguments)
    model = kvcompile.compile(tiny_llama(device=device), policy=COARSE)
    error = relative_error(logits_after_prompt(model, ids, **arguments), expected)
    is_one_call = length <= arguments.get("prefill_chunk_size", length)
    assert (error < TOLERANCE[device]) == is_one_call


@pytest.mark.parametrize("policy", ["int4_per_token_head", "int4", "turboquant_4bit_r128"])
@pytest.mark.parametrize(
    ("device", "launches"), [("cpu", False), ("cpu", True), pytest.param("cuda", True, marks=pytest.mark.gpu)]
)
def test_one_launch_stores_the_first_prompt_of_a_layer(
    device: str, launches: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those of two writes. On a CPU without kernels, both caches are written by ``update``."""
    ids, caches, stores = torch.randint(0, 97, (2, 200), device=device), [], []
    monkeypatch.setattr(layer_module, "put_pair", lambda *args: stores.append(writes.put_pair(*args)))
    monkeypatch.setattr(writes, "runs_kernels", lambda data: launches and not is_traced(data))
    for in_one_launch in (True, False):
        torch.manual_seed(0)
        model = kvcompile.compile(tiny_llama(num_layers=2, device=device), policy=policy)
        if not in_one_launch:
            monkeypatch.setattr(prompt, "takes_pairs", lambda keys, values: False)
        out = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
        caches.append(out.past_key_values)
    assert len(stores) == (2 if launches else 0)
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        assert layer.cumulative_length == other.cumulative_length == 200
        assert torch.equal(layer.keys.packed, other.keys.packed)
        assert torch.equal(layer.values.packed, other.values.packed)


@pytest.mark.parametrize(("length", "policy"), [(16, COARSE), (40, reading_packed(COARSE))])
def test_short_prompts_and_packed_policies_read_stored_tokens(length: int, policy: Any) -> None:
    ids = torch.randint(0, 97, (2, length))
    model = kvcompile.compile(tiny_llama(), policy=policy)
    assert relative_error(logits_after_prompt(model, ids), logits_after_prompt(tiny_llama(), ids)) > 1e-3


@pytest.mark.parametrize("padded", [False, True])
def test_the_first_prompt_reads_no_packed_token_and_no_empty_place(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks and keys are as long as the prompt, as with a cache that grows."""
    model, shapes = kvcompile.compile(tiny_llama(), policy=COARSE), []
    arguments = left_padded(40) if padded else {"inputs": torch.randint(3, 97, (2, 40))}
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **how: Any) -> torch.Tensor:
        mask = how["attn_mask"]
        if type(query) is torch.Tensor:  # fake tensors show whether the model runs with a static cache
            shapes.append((type(key), key.shape[2], None if mask is None else mask.shape[2:]))
        return attend(query, key, value, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model.generate(**arguments, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert shapes == [(torch.Tensor, 40, (40, 40) if padded else None)] * len(shapes)
    assert shapes


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("layer", ["0", "1"])
def test_a_plain_layer_shares_the_mask_of_packed_layers(layer: str) -> None:
    arguments = left_padded(40) | {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = tiny_llama(num_layers=2).generate(**arguments)
    policy = {"default": {"dtype": "float32"}, "rules": [{"match": {"layers": layer}, "dtype": "auto"}]}
    model = kvcompile.compile(tiny_llama(num_layers=2), policy=policy)
    assert torch.equal(model.generate(**arguments), expected)


@pytest.mark.usefixtures("without_code_generation")
def test_a_model_that_gives_its_mask_the_length_of_the_cache_keeps_it() -> None:
    """Bloom computes its position bias from a mask of two dimensions, as long as the cache."""
    config = transformers.BloomConfig(vocab_size=97, hidden_size=64, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(config).eval()
    arguments = left_padded(40) | {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**arguments)
    kvcompile.compile(model, policy={"default": {"dtype": "float32"}})
    assert torch.equal(model.generate(**arguments), expected)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("length", [1, 16, 17])
def test_layers_announce_their_own_masks_after_the_first_prompt(length: int) -> None:
    model = kvcompile.compile(tiny_llama(), policy=COARSE)
    ids = torch.randint(3, 97, (2, length))
    result = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    assert packed_layers(result.past_key_values)
    assert all("get_mask_sizes" not in vars(layer) for layer in result.past_key_values.layers)


@pytest.mark.usefixtures("without_code_generation")
def test_a_prompt_that_fails_leaves_nothing_behind() -> None:
    model = kvcompile.compile(tiny_llama(), policy={"default": {"dtype": "float32"}})
    ids = torch.randint(3, 97, (2, 20))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    hook = model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    hook.remove()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), expected)


@torch.no_grad()
def test_views_of_a_prompt_read_packed_tokens_after_it() -> None:
    (layer, _) = packed_layers(kvcompile.static_cache(tiny_llama(), 1, 64, policy=COARSE))
    x = torch.randn(1, 2, 20, 64)
    with updating_layers([layer], exact=True):
        keys, _ = layer.update(x, x)
        assert torch.equal(keys.dequantize()[:, :, :20], x)
    assert torch.equal(keys.dequantize(), layer.keys.dequantize())
    assert not torch.equal(keys.dequantize()[:, :, :20], x)
    assert "update" not in vars(layer)
