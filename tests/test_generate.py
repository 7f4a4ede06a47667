"""``generate()`` runs on packed caches: static through CompileConfig, and any cache through ``model.compile``."""

from __future__ import annotations

import pytest
import torch

from kvcompile import collect_reports
from kvcompile.packed_tensor import PackedTensor

transformers = pytest.importorskip("transformers")
from tiny_llama import DEVICES, tiny_llama  # noqa: E402


@pytest.mark.parametrize("device", DEVICES)
def test_generate_with_a_static_cache_and_a_compile_config_packs_the_cache(device: str) -> None:
    torch._dynamo.reset()
    model = tiny_llama(device=device, num_layers=1)
    prompt = torch.randint(0, 97, (2, 20), device=device)
    config = transformers.CompileConfig(backend="kvquant", mode=None, options={"policy": "int8_per_token_head"})
    config._compile_all_devices = True  # transformers compiles on accelerators only, unless told otherwise
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    with collect_reports() as report:
        result = model.generate(prompt, cache_implementation="static", compile_config=config, **arguments)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert report.totals.rewritten == report.totals.sites > 0
    plain = model.generate(prompt, cache_implementation="static", disable_compile=True, **arguments)
    assert result.sequences.shape == plain.sequences.shape
    assert (result.sequences == plain.sequences).float().mean() > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_model_compile_packs_the_default_growing_cache_of_generate(device: str) -> None:
    torch._dynamo.reset()
    model = tiny_llama(device=device, num_layers=1)
    prompt = torch.randint(0, 97, (2, 20), device=device)
    arguments = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(prompt, **arguments)
    model.compile(backend="kvquant")
    result = model.generate(prompt, **arguments)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    assert result.sequences.shape == plain.sequences.shape
