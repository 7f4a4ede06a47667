"""``generate()`` after ``kvcompile.compile``, with generated code: steps are compiled and recorded once."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile import PackedTensor
from kvcompile.caches import prompt_kernels
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.precompile import _start, precompile

transformers = pytest.importorskip("transformers")
from tiny_llama import attention_llama, tiny_llama  # noqa: E402
from windowed_models import windowed  # noqa: E402

POLICY = "int8_per_token_head"


def prompt(num_tokens: int, device: str, seed: int = 0) -> Tensor:
    return torch.randint(3, 97, (2, num_tokens), generator=torch.Generator().manual_seed(seed)).to(device)


def generated(model: Any, ids: Tensor, **arguments: Any) -> Any:
    torch.manual_seed(5)
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    return model.generate(ids, **{**common, **arguments})


def by_hand(model: Any, ids: Tensor, **arguments: Any) -> Any:
    """The result of eager code on a packed cache that the caller passes."""
    num_sequences = len(ids) * arguments.get("num_beams", 1)
    cache = kvcompile.static_cache(model, num_sequences, 128, POLICY)
    return generated(model, ids, past_key_values=cache, disable_compile=True, **arguments)


@pytest.mark.usefixtures("no_kernels_of_inductor")
def test_decode_steps_compile_once_for_requests_of_any_length_and_kind(fresh_compiler: None) -> None:
    model, plain = kvcompile.compile(tiny_llama(num_layers=1), policy=POLICY), tiny_llama(num_layers=1)
    lengths: list[dict[str, Any]] = [{}, {"do_sample": True}, {"cache_implementation": "static"}]
    for seed, arguments in enumerate(lengths):
        ids = prompt(9 + 20 * seed, "cpu", seed)
        result = generated(model, ids, return_dict_in_generate=False, **arguments)
        arguments.pop("cache_implementation", None)
        assert torch.equal(result, by_hand(plain, ids, **arguments).sequences)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["kvquant"]["packed_calls"] == 3 * 7


def test_merged_projections_of_a_batch_compile(fresh_compiler: None) -> None:
    """Both layers call the regions of a store, whose code views tensors without gaps."""
    model = attention_llama(num_layers=2)
    expected = generated(model, prompt(9, "cpu"), max_new_tokens=4)
    kvcompile.compile(model, policy="float32", merge_projections=True)
    assert torch.equal(generated(model, prompt(9, "cpu"), max_new_tokens=4).sequences, expected.sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True}], ids=["greedy", "beams", "sampling"])
def test_decode_steps_are_recorded_once_for_all_requests(arguments: dict[str, Any], recordings: list[Any]) -> None:
    model, plain = (tiny_llama(num_layers=2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kvcompile.compile(model, policy=POLICY)
    addresses = set()
    for seed, num_tokens in enumerate((40, 40, 9, 30)):
        ids = prompt(num_tokens, "cuda", seed)
        if seed == 2:  # the caller owns a returned cache, so the next request takes another one
            result = generated(model, ids, **arguments)
            assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
            addresses.add(result.past_key_values.layers[0].keys.packed.data_ptr())
            tokens = result.sequences
        else:
            tokens = generated(model, ids, return_dict_in_generate=False, **arguments)
        expected = by_hand(plain, ids, **arguments).sequences
        assert tokens.shape == expected.shape
        assert (tokens == expected).float().mean() > 0.9
    assert len(recordings) == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [{}, {"residual_length": 128, "sink_tokens": 64}], ids=["packed", "exact tokens"])
def test_recorded_steps_decode_before_and_after_a_window_moves(exact: dict[str, int], recordings: list[Any]) -> None:
    """The windows of 16 tokens move once during the second request, and the third is longer than their room."""
    model, plain = (windowed().cuda() for _ in range(2))
    kvcompile.compile(model, policy={"default": {"dtype": "float32"}, **exact})
    for num_tokens in (20, 180 if exact else 120, 300, 40):
        ids = prompt(num_tokens, "cuda", num_tokens)
        tokens = generated(model, ids, return_dict_in_generate=False, max_new_tokens=30)
        assert torch.equal(tokens, generated(plain, ids, max_new_tokens=30).sequences)
    assert counters["stats"]["unique_graphs"] <= 2
    assert 1 <= len(recordings) <= 3  # the layer without a window has three sizes
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
def test_hidden_states_of_all_steps_can_be_returned(recordings: list[Any]) -> None:
    model, plain = (tiny_llama(num_layers=1, device="cuda") for _ in range(2))
    kvcompile.compile(model, policy={"default": {"dtype": "float32"}})
    ids = prompt(20, "cuda")
    result = generated(model, ids, output_hidden_states=True)
    expected = generated(plain, ids, output_hidden_states=True)
    for step, right in zip(result.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(step[-1], right[-1], rtol=1e-3, atol=1e-3)
    assert not recordings


@pytest.mark.gpu
def test_a_dynamic_cache_of_the_caller_is_not_recorded(recordings: list[Any]) -> None:
    model = kvcompile.compile(tiny_llama(num_layers=1, device="cuda"), policy=POLICY)
    cache = transformers.DynamicCache(config=model.config)
    assert generated(model, prompt(20, "cuda"), past_key_values=cache).past_key_values is cache
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert not recordings


@pytest.mark.gpu
def test_requests_of_several_threads_are_right(fresh_compiler: None) -> None:
    model, plain = (tiny_llama(num_layers=1, device="cuda") for _ in range(2))
    kvcompile.compile(model, policy={"default": {"dtype": "float32"}})
    prompts = [prompt(20, "cuda", seed) for seed in range(4)]
    expected = [generated(plain, ids).sequences for ids in prompts]
    generated(model, prompts[0], return_dict_in_generate=False)
    start = Barrier(2)

    def answer(some: list[Tensor]) -> list[Tensor]:
        start.wait(timeout=60)
        common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return [model.generate(ids, **common) for ids in some]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(answer, (prompts[:2], prompts[2:]))
    for tokens, right in zip(first + second, expected, strict=True):
        assert torch.equal(tokens, right)


def test_a_thread_that_compiles_does_not_change_a_request_of_another_thread() -> None:
    model = kvcompile.compile(tiny_llama(num_layers=1), policy={"default": {"dtype": "float32"}})
    expected = generated(model, prompt(20, "cpu")).sequences
    compiling, read = Event(), Event()

    def backend(gm: Any, inputs: Any) -> Any:
        compiling.set()
        assert read.wait(timeout=60)
        return gm

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(torch.compile(lambda x: x + 1, backend=backend), torch.ones(3))
        assert compiling.wait(timeout=60)
        try:
            if not torch.compiler.is_compiling():
                pytest.skip("this release of PyTorch says that it compiles only in the thread that does")
            out = generated(model, prompt(20, "cpu"), max_new_tokens=1).sequences
        finally:
            read.set()
        assert torch.equal(other.result(), torch.full((3,), 2.0))
    assert torch.equal(out, expected[:, :21])


@pytest.mark.gpu
def test_the_plain_cache_never_exists(fresh_compiler: None) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40000}
    model = tiny_llama(num_layers=16, device="cuda", dtype=torch.bfloat16, **heads)
    kvcompile.compile(model, policy="int4_per_token_head")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    room = {"cache_implementation": "static", "max_cache_len": 32768, "disable_compile": True}
    result = generated(model, prompt(100, "cuda"), max_new_tokens=3, **room)
    plain_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in result.past_key_values.layers)
    assert plain_bytes == 2 * 16 * 2 * 4 * 32768 * 128 * 2
    assert torch.cuda.max_memory_allocated() - before < 0.7 * plain_bytes


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("make", "num_tokens", "num_kernels"),
    [(tiny_llama, 70, 1), (tiny_llama, 3000, 1), (windowed, 100, 1), (windowed, 300, 2)],
)
def test_all_kernels_of_the_first_prompt_are_compiled_before_it_runs(
    make: Any, num_tokens: int, num_kernels: int, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    sizes = {"num_layers": 2, "max_position_embeddings": 4096} if make is tiny_llama else {}
    model = make(**sizes).to("cuda", torch.bfloat16)
    for kernel in [found for found in gc.get_objects() if type(found) is launcher.Launcher]:
        monkeypatch.setattr(kernel, "compiled", {})
    _start.cache_clear()
    launched, late = [], []
    launch = launcher.Launcher.__call__

    def watched(self: Any, *arguments: Any) -> None:
        before = len(self.compiled)
        launch(self, *arguments)
        if launcher._INSTEAD.get() is None:
            launched.append(self.kernel)
            late.extend([self.kernel] * (len(self.compiled) - before))

    def compiled_now(*arguments: Any) -> None:
        compilation = precompile(*arguments)
        assert compilation is not None
        compilation.result()

    monkeypatch.setattr(launcher.Launcher, "__call__", watched)
    monkeypatch.setattr(prompt_kernels, "precompile", compiled_now)
    kvcompile.compile(model, policy=POLICY)
    generated(model, prompt(num_tokens, "cuda"), max_new_tokens=1)
    # Layers share a kernel, and repeat its first launch; a window that is shorter than the prompt stores fewer tokens.
    # The prompt attends to its own keys and values.
    assert len(launched) <= num_kernels
    assert not late
