"""``generate()`` reads a prompt with its own tokens in full precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies import reading_packed
from tiny_llama import DEVICES, tiny_llama

import kvcompile
from kvcompile.caches.prompt import updating_layers
from kvcompile.caches.requests import packed_layers

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


@pytest.mark.parametrize(("length", "policy"), [(16, COARSE), (40, reading_packed(COARSE))])
def test_short_prompts_and_packed_policies_read_stored_tokens(length: int, policy: Any) -> None:
    ids = torch.randint(0, 97, (2, length))
    model = kvcompile.compile(tiny_llama(), policy=policy)
    assert relative_error(logits_after_prompt(model, ids), logits_after_prompt(tiny_llama(), ids)) > 1e-3


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
