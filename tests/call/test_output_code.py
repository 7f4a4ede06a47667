"""Inductor's code for a decode step gives the right logits, stores in place, and makes no tensor of cache size."""

from __future__ import annotations

import copy
import gc
import re
from typing import Any

import pytest
import torch
from devices import cases_by_device
from releases import is_before
from shared_fixtures import WITHOUT_VECTORS
from torch._inductor.utils import run_and_get_code
from torch.multiprocessing.reductions import StorageWeakRef

import kvcompile
from kvcompile.packed.memory import cache_nbytes

transformers = pytest.importorskip("transformers")
from tiny_llama import DEVICES, PRESETS, attention_llama, fresh_cache  # noqa: E402

MAX_LEN = 4096


def decode_step_code(preset: str, device: str, num_layers: int = 1) -> tuple[str, Any, Any]:
    """The output code of a decode step on a packed static cache, with checked logits; the model; and the cache."""
    torch._dynamo.reset()
    model = attention_llama(torch.bfloat16, device, num_layers=num_layers)
    cache = kvcompile.static_cache(model, 2, MAX_LEN, preset)
    ids = torch.randint(0, 97, (2, 31), device=device)
    options = {"policy": preset, "fx_graph_cache": False, **WITHOUT_VECTORS}
    compiled = torch.compile(model, backend="kvquant", options=options)
    with torch.no_grad():
        model(input_ids=ids[:, :30], past_key_values=cache)
        expected_cache = copy.deepcopy(cache)
        output, codes = run_and_get_code(compiled, input_ids=ids[:, 30:], past_key_values=cache)
        expected = model(input_ids=ids[:, 30:], past_key_values=expected_cache).logits
    assert (output.logits - expected).norm() < 2e-2 * expected.norm()
    return codes[-1], model, cache


# On CPUs kernels/test_reference_attention.py checks the code of the other formats.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("preset", "device"),
    cases_by_device(
        on_gpu=[(preset,) for preset in PRESETS],
        on_cpu=[("int8_per_token_head",)],
        generated_on_cpu=[
            ("int4_per_token_head",),
            *([("turboquant_4bit_nc",)] if not is_before("2.13") else []),  # older Inductors buffer the centroids
        ],
    ),
)
def test_a_decode_step_stores_in_place_and_buffers_no_dequantized_cache(preset: str, device: str) -> None:
    code, model, cache = decode_step_code(preset, device)
    body = code[code.index("def call") :]
    assert not re.search(r"clone\(|\.copy_\(", body)
    config = model.config
    cache_numel = 2 * config.num_key_value_heads * MAX_LEN * config.head_dim
    allocations = re.findall(r"empty_strided_\w+\(\(([^)]*)\)[^)]*\)[^)]*?torch\.(\w+)\)", body)
    assert allocations
    for shape, dtype in allocations:
        numel = 1
        for size in filter(None, shape.replace(" ", "").split(",")):
            numel *= int(size)
        assert numel < cache_numel // 4, f"a buffer of shape {shape} and dtype {dtype}"
    storage = StorageWeakRef(cache.layers[0].keys.packed.untyped_storage())
    del cache
    gc.collect()
    assert storage.expired(), "the code or its caller keeps the cache alive"


@pytest.mark.gpu
def test_the_visible_range_of_a_mask_is_computed_once_for_all_layers() -> None:
    code, _, _ = decode_step_code("int8_per_token_head", "cuda", num_layers=3)
    assert len(re.findall(r"kvcompile\.visible_range\.default\(", code)) == 1
    assert len(re.findall(r"kvcompile\.attention\.default\(", code)) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("preset", [PRESETS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in PRESETS[1:])])
def test_packed_bytes_equal_the_arithmetic_of_the_formats(
    preset: str, device: str, request: pytest.FixtureRequest
) -> None:
    torch._dynamo.reset()
    if device == "cpu":
        request.getfixturevalue("without_code_generation")
    model = attention_llama(torch.bfloat16, device, num_layers=1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=MAX_LEN)
    ids = torch.randint(0, 97, (2, 30), device=device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        plain = [StorageWeakRef(layer.keys.untyped_storage()) for layer in cache.layers]
        before = cache_nbytes(cache)
        compiled = torch.compile(model, backend="kvquant", options={"policy": preset})
        compiled(input_ids=ids[:, :1], past_key_values=cache)
    gc.collect()
    assert all(storage.expired() for storage in plain), "a plain cache is still alive"
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    expected = 0
    for tensor in tensors:
        layout = tensor.packed_layout
        symbols = {"num_tokens": MAX_LEN, "batch": 2, "num_kv_heads": model.config.num_key_value_heads}
        expected += int(layout.nbytes().subs({s: symbols[s.name] for s in layout.nbytes().free_symbols}))
    assert sum(map(cache_nbytes, tensors)) == expected
    assert cache_nbytes(cache) <= 1.02 * expected
    assert cache_nbytes(cache) < 0.55 * before


@pytest.mark.usefixtures("without_code_generation")
def test_a_growing_cache_has_at_most_half_its_length_to_spare() -> None:
    torch._dynamo.reset()
    model = attention_llama(num_layers=1)
    cache = fresh_cache(model, "dynamic")
    compiled = torch.compile(model, backend="kvquant")
    with torch.no_grad():
        model(input_ids=torch.randint(0, 97, (1, 1100)), past_key_values=cache)
        for _ in range(3):
            compiled(input_ids=torch.randint(0, 97, (1, 1)), past_key_values=cache)
    keys = cache.layers[0].keys
    assert keys.shape[2] == 1103
    used = keys.packed_layout.bytes_per_token * keys.shape[2] * model.config.num_key_value_heads
    assert cache_nbytes(keys) <= 1.5 * used


@pytest.mark.usefixtures("without_code_generation")
def test_the_cache_is_freed_with_its_owner() -> None:
    torch._dynamo.reset()
    model = attention_llama(num_layers=1)
    compiled = torch.compile(model, backend="kvquant")
    cache = fresh_cache(model, "static")
    with torch.no_grad():
        for _ in range(2):
            compiled(input_ids=torch.randint(0, 97, (1, 1)), past_key_values=cache)
    storage = StorageWeakRef(cache.layers[0].keys.packed.untyped_storage())
    del cache
    gc.collect()
    assert storage.expired()
