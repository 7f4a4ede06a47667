"""One meaning: a compiled model equals the same model run in eager mode on packed caches, step by step."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from decode_steps import growing_step
from devices import cases_by_device
from policies import reading_packed
from torch import Tensor
from torch._dynamo.utils import counters

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

transformers = pytest.importorskip("transformers")
from tiny_llama import PRESETS, fresh_cache, tiny_llama  # noqa: E402

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = ["static", "dynamic"]

ON_CPU = [
    ("fp32", "fp8_e4m3", "static"),
    ("fp32", "turboquant_4bit_nc", "dynamic"),
    ("bf16", "int4_per_token_head", "static"),
]
"""The cases that run on a CPU, node by node: each preset but int8, which the last test has, and each dtype. The passes
treat static and dynamic caches alike. Generated code is compared in the last test, in test_attention_forms.py and in
test_output_code.py."""


def eager_packed_cache(model: Any, kind: str, preset: str, batch: int) -> Any:
    """A cache that is packed from the start, for eager code."""
    cache = fresh_cache(model, kind)
    config, formats = model.config, Policy.load(preset).formats_for("", 0, 1)
    for index in range(config.num_hidden_layers):
        if kind == "dynamic" and len(cache.layers) <= index:
            cache.layers.append(transformers.cache_utils.DynamicLayer())
        layer = cache.layers[index]
        example = torch.zeros(batch, config.num_key_value_heads, 1, config.head_dim, dtype=model.dtype).to(model.device)
        layer.lazy_initialization(example, example)
        for name, role, format_name in (("keys", "key", formats.key), ("values", "value", formats.value)):
            layout = PackedLayout(format_name, role, config.head_dim)
            if kind == "static":
                packed = PackedTensor.from_dense(getattr(layer, name), layout)
            else:
                empty = (batch, config.num_key_value_heads, 0, config.head_dim)
                packed = PackedTensor.zeros(empty, model.dtype, layout, device=model.device, growing=True)
            setattr(layer, name, packed)
    return cache


def token_chunks(model: Any, batch: int = 2, begin: tuple[int, ...] = (115, 7)) -> list[Tensor]:
    """A prefill of 115 tokens, a chunk of 7, and 9 single tokens, across the block boundaries at 64 and 128."""
    generator = torch.Generator().manual_seed(1)
    sizes = [*begin, *[1] * 9]
    ids = torch.randint(0, model.config.vocab_size, (batch, sum(sizes)), generator=generator)
    return list(ids.to(model.device).split(sizes, dim=1))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype_name", "preset", "kind", "device"), cases_by_device(itertools.product(DTYPES, PRESETS, KINDS), ON_CPU)
)
def test_compiled_logits_equal_eager_logits_on_packed_caches(
    dtype_name: str, preset: str, kind: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("without_code_generation")
    dtype = DTYPES[dtype_name]
    model = tiny_llama(dtype, device, num_layers=1)
    compiled = torch.compile(
        model, backend="kvquant", options={"policy": reading_packed(preset), "on_unsupported": "error"}
    )
    cache, expected_cache = fresh_cache(model, kind), eager_packed_cache(model, kind, preset, batch=2)
    # A second length of chunks takes a graph with symbols; on a CPU the growing case has it.
    begin = (122,) if device == "cpu" and kind == "static" else (115, 7)
    with torch.no_grad():
        for ids in token_chunks(model, begin=begin):
            logits = compiled(input_ids=ids, past_key_values=cache).logits
            expected = model(input_ids=ids, past_key_values=expected_cache).logits
            assert relative_error(logits, expected) < TOLERANCE[dtype]
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert counters["kvquant"]["refused"] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("preset", "kind", "device"),
    cases_by_device(
        itertools.product(PRESETS, KINDS), [("int8_per_token_head", "static"), ("turboquant_4bit_nc", "dynamic")]
    ),
)
def test_a_cache_from_an_eager_prefill_is_adopted(
    preset: str, kind: str, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cpu":
        request.getfixturevalue("without_code_generation")
    formats = Policy.load(preset).formats_for("", 0, 1)
    model = tiny_llama(device=device, num_layers=1)
    compiled = torch.compile(
        model, backend="kvquant", options={"policy": reading_packed(preset), "on_unsupported": "error"}
    )
    cache = fresh_cache(model, kind)
    prompt, *chunks = token_chunks(model)
    with torch.no_grad():
        model(input_ids=prompt, past_key_values=cache)
        expected_cache = copy.deepcopy(cache)
        for layer in expected_cache.layers:
            for name, role, format_name in (("keys", "key", formats.key), ("values", "value", formats.value)):
                plain, layout = getattr(layer, name), PackedLayout(format_name, role, model.config.head_dim)
                setattr(layer, name, PackedTensor.from_dense(plain, layout, growing=kind == "dynamic"))
        for ids in chunks:
            logits = compiled(input_ids=ids, past_key_values=cache).logits
            expected = model(input_ids=ids, past_key_values=expected_cache).logits
            assert relative_error(logits, expected) < TOLERANCE[torch.float32]
    assert isinstance(cache.layers[0].keys, PackedTensor)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "generates_code"),
    [("static", False), ("dynamic", False), pytest.param("dynamic", True, marks=pytest.mark.slow)],
)
def test_prefill_and_64_decode_steps_compile_at_most_three_times_and_a_second_cache_not_at_all(
    kind: str, generates_code: bool, request: pytest.FixtureRequest
) -> None:
    if not generates_code:
        request.getfixturevalue("without_code_generation")
    model = tiny_llama(num_layers=1)
    compiled = torch.compile(model, backend="kvquant", options={"policy": reading_packed("int8_per_token_head")})
    chunks = torch.randint(0, 97, (2, 164)).split([100, *[1] * 64], dim=1)
    num_graphs = []
    with torch.no_grad():
        eager_cache = eager_packed_cache(model, kind, "int8_per_token_head", batch=2)
        expected = [model(input_ids=ids, past_key_values=eager_cache).logits for ids in chunks]
        for cache in (fresh_cache(model, kind), fresh_cache(model, kind)):
            for ids, expected_logits in zip(chunks, expected, strict=True):
                logits = compiled(input_ids=ids, past_key_values=cache).logits
                assert relative_error(logits, expected_logits) < TOLERANCE[torch.float32]
            num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] == num_graphs[1] <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "counts"), [(100, [1] * 30), pytest.param(0, [100, *[1] * 30], marks=pytest.mark.slow)]
)
def test_generated_code_of_a_growing_cache_serves_all_lengths_and_a_second_cache(begin: int, counts: list[int]) -> None:
    """The lengths of growing caches are symbols, on which Inductor puts guards. A prompt takes a separate graph."""
    layouts = [PackedLayout("int8_per_token_head", role, 32) for role in ("key", "value")]
    compiled = torch.compile(growing_step, backend="kvquant", options={"policy": reading_packed("int8_per_token_head")})
    num_graphs = []
    for _ in range(2):
        past = torch.randn(2, 1, 2, begin, 32).unbind()
        caches, expected = (
            [PackedTensor.from_dense(x, layout, growing=True) for x, layout in zip(past, layouts, strict=True)]
            for _ in range(2)
        )
        for count in counts:
            new = torch.randn(3, 1, 2, count, 32).unbind()
            out, *caches = compiled(*new, *caches)
            expected_out, *expected = growing_step(*new, *expected)
            assert relative_error(out, expected_out) < TOLERANCE[torch.float32]
        assert all(type(cache) is PackedTensor and cache.shape[2] == 130 for cache in caches)
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] == num_graphs[1] <= 3
