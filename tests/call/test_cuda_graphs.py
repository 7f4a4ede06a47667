"""Under CUDA graphs a decode step is recorded once, and replayed with any caches of the same shapes."""

from __future__ import annotations

import copy
import ctypes
import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import kvcompile
from kvcompile.kernels import ops

transformers = pytest.importorskip("transformers")
from tiny_llama import MAX_LEN, fresh_cache, tiny_llama  # noqa: E402

PROMPT, STEPS = 30, 6


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def prompt_cache(model: Any, policy: Any, seed: int) -> Any:
    """A packed static cache that eager code filled with a random prompt."""
    generator = torch.Generator().manual_seed(seed)
    cache = kvcompile.static_cache(model, 2, MAX_LEN, policy)
    prompt = torch.randint(0, 97, (2, PROMPT), generator=generator).to(model.device)
    model(input_ids=prompt, past_key_values=cache)
    return cache


def decode(step: Any, cache: Any, token: int) -> Tensor:
    ids = torch.full((2, 1), token, device="cuda")
    torch.compiler.cudagraph_mark_step_begin()
    return step(input_ids=ids, past_key_values=cache).logits.clone()


def compiled(model: Any, policy: Any) -> Any:
    options = {"policy": policy, "on_unsupported": "error", "triton.cudagraphs": True}
    return torch.compile(model, backend="kvquant", options=options)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["int8_per_token_head", "int4", "turboquant_4bit_nc"])
def test_a_decode_step_is_recorded_once_for_all_caches(
    policy: str, recordings: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama(device="cuda")
    step = compiled(model, policy)
    caches = [prompt_cache(model, policy, seed) for seed in range(3)]
    references = copy.deepcopy(caches)
    with caplog.at_level(logging.WARNING):
        for token in range(STEPS):
            for cache, reference in zip(caches, references, strict=True):
                logits, expected = decode(step, cache, token), decode(model, reference, token)
                assert (logits - expected).norm() < 1e-3 * expected.norm()
    assert [layer.get_seq_length() for cache in caches for layer in cache.layers] == [PROMPT + STEPS] * 6
    assert len(recordings) == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not [record for record in caplog.records if "cudagraph" in record.getMessage().lower()]


@pytest.mark.gpu
def test_the_mode_reduce_overhead_replays_too(recordings: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUANT_POLICY", "int8_per_token_head")
    model = tiny_llama(device="cuda")
    step = torch.compile(model, backend="kvquant", mode="reduce-overhead")
    cache = fresh_cache(model, "static")
    model(input_ids=torch.randint(0, 97, (2, PROMPT), device="cuda"), past_key_values=cache)
    for token in range(STEPS):
        decode(step, cache, token)
    assert isinstance(cache.layers[0].keys, kvcompile.PackedTensor)
    assert len(recordings) == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_one_kernel_computes_the_positions_and_the_lengths_of_all_layers() -> None:
    model = tiny_llama(device="cuda", num_layers=3)
    step = compiled(model, "int4_per_token_head")
    cache = prompt_cache(model, "int4_per_token_head", 0)
    _, codes = run_and_get_code(decode, step, cache, 0)
    (kernel,) = re.findall(r"triton_for_\w+\.run\((.*), stream", codes[-1])
    arguments = kernel.split(", ")
    positions = re.findall(r"positions=(\w+)", codes[-1])
    assert len(positions) == 3
    assert set(positions) <= set(arguments)
    assert sum(arguments.count(name) == 2 for name in set(arguments)) == 3  # read and changed: the lengths


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_graph_that_makes_a_cache_or_lets_one_grow_is_not_recorded(kind: str, recordings: list[Any]) -> None:
    model = tiny_llama(device="cuda", num_layers=1)
    step = compiled(model, "int8_per_token_head")
    kept = []
    for _ in range(4):
        cache = fresh_cache(model, kind)
        ids = torch.randint(0, 97, (2, PROMPT), device="cuda")
        logits = step(input_ids=ids, past_key_values=cache).logits
        expected = model(input_ids=ids).logits
        assert (logits - expected).norm() < 2e-2 * expected.norm()
        kept.append((cache, cache.layers[0].keys[:, :, :PROMPT].dequantize().clone()))
    for cache, keys in kept:
        assert torch.equal(cache.layers[0].keys[:, :, :PROMPT].dequantize(), keys)
    assert not recordings


class _CompiledError(Exception):
    """Leaves the backend in place of Inductor's compilation."""


@pytest.fixture
def inner_call(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of Inductor's compilation, on a CPU that passes for a GPU."""
    call: dict[str, Any] = {}

    def compile_fx_inner(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        call.update(kwargs, gm=gm, example_inputs=example_inputs)
        raise _CompiledError

    monkeypatch.setattr("kvcompile.compilation.graph_compiler.compile_fx_inner", compile_fx_inner)
    pass_for_a_gpu(monkeypatch)
    return call


def pass_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.passes.calling.Rewritten.on_cuda", True)
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)


def compile_step(model: Any, cache: Any) -> None:
    with pytest.raises(Exception, match="_CompiledError"):
        compiled(model, "int8_per_token_head")(input_ids=torch.zeros(2, 1, dtype=torch.long), past_key_values=cache)


def test_other_mutated_inputs_lie_in_buffers_and_weights_keep_their_addresses(inner_call: dict[str, Any]) -> None:
    model = tiny_llama(num_layers=2)
    compile_step(model, prompt_cache(model, "int8_per_token_head", 0))
    gm, examples = inner_call["gm"], inner_call["example_inputs"]
    placeholders = gm.graph.find_nodes(op="placeholder")
    stores = gm.graph.find_nodes(op="call_function", target=torch.ops.kvcompile.store_pair.default)
    changed = [placeholders.index(data) for node in stores for data in node.args]
    assert len(changed) == 4  # keys and values of two layers
    assert all(examples[index].dtype == torch.uint8 and set(examples[index].stride()) == {0} for index in changed)
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    buffered = [placeholders.index(node.args[0]) for node in copies]
    assert [examples[index].shape for index in buffered] == [(), ()]  # two lengths
    assert [node.meta["val"].shape for node in gm.graph.output_node().args[0]] == [(2, 1, 97)]  # logits
    weights = {index for index, value in enumerate(examples) if value.is_floating_point() and value.numel() > 32}
    assert set(inner_call["static_input_idxs"]) >= weights | set(changed) | set(buffered)


def referred(data: Tensor) -> Tensor:
    """The bytes that a reference on a CPU refers to."""
    address = int(data.as_strided((8,), (1,)).view(torch.int64))
    return torch.frombuffer((ctypes.c_uint8 * data.numel()).from_address(address), dtype=torch.uint8).view(data.shape)


@pytest.mark.usefixtures("no_kernels_of_inductor")
def test_generated_code_stores_and_attends_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_for_a_gpu(monkeypatch)
    write, attend = ops.write_tokens_, ops.attend
    monkeypatch.setattr(ops, "write_tokens_", lambda data, *rest: write(referred(data), *rest))
    monkeypatch.setattr(
        ops, "attend", lambda query, k, v, *rest, **more: attend(query, referred(k), referred(v), *rest, **more)
    )
    chunk, model = 5, tiny_llama(num_layers=1)
    step = compiled(model, "int4_per_token_head")
    caches = [prompt_cache(model, "int4_per_token_head", seed) for seed in range(2)]
    references = copy.deepcopy(caches)
    for token in range(2):
        ids = torch.full((2, chunk), token)
        for cache, reference in zip(caches, references, strict=True):
            logits = step(input_ids=ids, past_key_values=cache).logits
            with monkeypatch.context() as eager:
                eager.setattr(ops, "write_tokens_", write)
                eager.setattr(ops, "attend", attend)
                expected = model(input_ids=ids, past_key_values=reference).logits
            assert (logits - expected).norm() < 1e-3 * expected.norm()
    assert [layer.get_seq_length() for layer in caches[1].layers] == [PROMPT + 2 * chunk]


def test_a_step_on_growing_caches_asks_for_no_recording(inner_call: dict[str, Any]) -> None:
    model = tiny_llama(num_layers=1)
    compile_step(model, fresh_cache(model, "dynamic"))
    assert not inner_call["cudagraphs"]
