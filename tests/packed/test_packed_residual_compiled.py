"""Compiled models on caches with a residual give the same results as eager code, and store in place.

On a CPU most tests run the rewritten graphs node by node: one with the plain PyTorch of stores and attention, others
with operators. The last test runs code that Inductor generates. On a GPU all tests run code that Inductor generates.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import test_packed_tensor_compiled
import torch
from decode_steps import step
from hand_written_decoder import Decoder, masked_update, slice_assignment
from policies import reading_packed
from shared_fixtures import WITHOUT_VECTORS
from test_packed_tensor_compiled import PROGRAMS, compare
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

pytest.importorskip("transformers")
from tiny_llama import DEVICES, attention_llama, fresh_cache

SINKS = {
    "default": {"key": {"dtype": "int8", "granularity": "per_channel"}, "value": {"dtype": "turboquant_4bit"}},
    "residual_length": 65,
    "sink_tokens": 4,
}
CHUNKS = [120, 6, *[1] * 5]  # crosses the block boundaries at 64 and 128
TWO_LENGTHS = [126, *[1] * 5]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cpu":
        request.getfixturevalue("without_code_generation")
    return request.param


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def packed(plain: Tensor, role: str, policy: Any, *, growing: bool = False) -> PackedTensor:
    formats = Policy.load(policy).formats_for("", 0, 1)
    return PackedTensor.from_dense(plain, formats.layout(role, plain.shape[-1], plain.dtype), growing=growing)


def pack_layers(cache: Any, policy: Any, *, growing: bool) -> Any:
    """A copy of a Hugging Face cache with packed tensors."""
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        layer.keys = packed(layer.keys, "key", policy, growing=growing)
        layer.values = packed(layer.values, "value", policy, growing=growing)
    return cache


def eager_cache(model: Any, kind: str, policy: Any, batch: int) -> Any:
    """An empty packed Hugging Face cache."""
    cache = fresh_cache(model, kind)
    config = model.config
    example = torch.zeros(batch, config.num_key_value_heads, 1, config.head_dim, dtype=model.dtype, device=model.device)
    for index in range(config.num_hidden_layers):
        layer = cache.layers[index]
        layer.lazy_initialization(example, example)
        if kind == "dynamic":
            layer.keys = layer.values = example[:, :, :0]
    return pack_layers(cache, policy, growing=kind == "dynamic")


def compiled(model: Any, policy: Any) -> Any:
    options = {"policy": reading_packed(policy), "on_unsupported": "error", "fx_graph_cache": False, **WITHOUT_VECTORS}
    return torch.compile(model, backend="kvquant", options=options)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param("static", SINKS, id="static", marks=pytest.mark.slow),
        pytest.param("dynamic", "int4", id="dynamic"),
    ],
)
def test_compiled_logits_equal_eager_logits_on_packed_caches_without_recompiling(
    kind: str, policy: Any, device: str
) -> None:
    model = attention_llama(device=device, num_layers=1)
    run, cache, expected_cache = compiled(model, policy), fresh_cache(model, kind), eager_cache(model, kind, policy, 2)
    graphs, chunks = [], CHUNKS if device == "cuda" else TWO_LENGTHS
    for ids in torch.randint(0, 97, (2, sum(chunks)), device=device).split(chunks, dim=1):
        logits = run(input_ids=ids, past_key_values=cache).logits
        assert_near(logits, model(input_ids=ids, past_key_values=expected_cache).logits)
        graphs.append(counters["stats"]["unique_graphs"])
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert graphs[3] == graphs[-1] <= 4


@pytest.mark.usefixtures("operators_traced")
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param("static", "int4", id="static"),
        pytest.param("dynamic", SINKS, id="dynamic", marks=pytest.mark.slow),
    ],
)
def test_a_cache_that_eager_code_filled_is_adopted_with_exact_recent_tokens(
    kind: str, policy: Any, device: str
) -> None:
    model = attention_llama(device=device, num_layers=1)
    run, cache = compiled(model, policy), fresh_cache(model, kind)
    ids = torch.randint(0, 97, (2, 105), device=device)
    model(input_ids=ids[:, :100], past_key_values=cache)
    filled = cache.layers[0].keys[:, :, 64:100].clone()
    expected_cache = pack_layers(cache, policy, growing=kind == "dynamic")
    for token in ids[:, 100:].split(1, dim=1):
        logits = run(input_ids=token, past_key_values=cache).logits
        assert_near(logits, model(input_ids=token, past_key_values=expected_cache).logits)
    assert torch.equal(cache.layers[0].keys[:, :, 64:100].clone().dequantize(), filled)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("write", "policy", "chunks"), [(slice_assignment, "int4", CHUNKS), (masked_update, SINKS, TWO_LENGTHS)]
)
def test_a_hand_written_cache_gives_the_same_results_compiled(
    write: Any, policy: Any, chunks: list[int], device: str
) -> None:
    model = Decoder(write, batch=2).eval().to(device)
    expected_model = copy.deepcopy(model)
    expected_model.keys = packed(model.keys, "key", policy)
    expected_model.values = packed(model.values, "value", policy)
    run, start = compiled(model, policy), 0
    for ids in torch.randint(0, 97, (2, sum(chunks)), device=device).split(chunks, dim=1):
        assert_near(run(ids, start), expected_model(ids, start))
        start += ids.shape[1]
    assert isinstance(model.keys, PackedTensor)
    torch.testing.assert_close(model.keys.dequantize(), expected_model.keys.dequantize(), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("without_code_generation")
def test_the_report_names_the_tokens_in_full_precision_and_their_bytes() -> None:
    model = attention_llama(torch.bfloat16, num_layers=1)
    run, cache = compiled(model, "int4"), fresh_cache(model, "static")
    run(input_ids=torch.randint(0, 97, (2, 3)), past_key_values=cache)
    (site,) = last_report().sites
    key, value = site.caches
    assert (key.format, value.format) == ("int4_per_channel (1 to 64 recent)", "int4_per_token_head")
    assert (key.bytes_per_token_after, value.bytes_per_token_after) == (36, 36)
    layout = cache.layers[0].keys.packed_layout
    assert key.residual_bytes == layout.header_blocks * layout.block_bytes >= 65 * 128
    assert value.residual_bytes == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["a slice", "a masked update", "cat of a crop", "a crop as input"])
def test_code_on_packed_caches_gives_the_same_results_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PackedLayout("float32", "key", 16, Residual(1, 1, torch.float32))
    monkeypatch.setattr(test_packed_tensor_compiled, "INT8", layout)
    program, make_cache = PROGRAMS[name]
    compare(program, make_cache, backend="aot_eager")


@pytest.mark.slow
def test_a_decode_step_gives_the_same_results_in_generated_code_and_stores_in_place() -> None:
    q, k, v = torch.randn(3, 2, 2, 1, 64).bfloat16()
    caches = [packed(torch.randn(2, 2, 4096, 64).bfloat16(), role, "int4") for role in ("key", "value")]
    expected_caches = copy.deepcopy(caches)
    run = compiled(step, "int4")
    codes: list[str] = []
    for position in (64, 65, 3):  # begins a block, which takes the entry; goes on with it; opens another block again
        place = torch.tensor([position])
        if not codes:
            out, codes = run_and_get_code(run, q, k, v, *caches, place)
        else:
            out = run(q, k, v, *caches, place)
        expected = step(q, k, v, *expected_caches, place)
        assert (out - expected).norm() < 2e-2 * expected.norm()
        keys, expected_keys = caches[0], expected_caches[0]
        tags = keys.packed_layout.tags(keys.packed)
        assert torch.equal(tags, keys.packed_layout.tags(expected_keys.packed))
        assert tags.eq(1 + position // 64).all()
        written = torch.arange(4096) == position
        for cache, expected_cache in zip(caches, expected_caches, strict=True):
            values, wanted = cache.dequantize(), expected_cache.dequantize()
            torch.testing.assert_close(values[:, :, written], wanted[:, :, written], rtol=0.05, atol=0.01)
            difference = (values - wanted)[:, :, ~written].abs()
            assert not difference[:, :, 128:].any()
            assert (difference > 0.01 * wanted[:, :, ~written].abs() + 0.01).float().mean() < 1e-3
    body = codes[-1][codes[-1].index("def call") :]
    assert not re.search(r"clone\(|\.copy_\(", body)
    for shape in re.findall(r"empty_strided_cpu\(\(([^)]*)\)", body):
        sizes = [int(size) for size in shape.replace(" ", "").split(",") if size]
        assert torch.Size(sizes).numel() < 2 * 2 * 4096 * 64 // 4, f"a buffer of shape {sizes}"
