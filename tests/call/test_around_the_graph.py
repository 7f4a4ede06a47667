"""Results do not depend on the holder of the cache, nor on the code, thread or process that continues with it."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from releases import needs_release
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.codecache import compiled_fx_graph_hash

import kvcompile.compilation.graph_compiler
from kvcompile import collect_reports
from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, HEAD_DIM, MAX_LEN = 2, 2, 64, 140
LOSSLESS = {"default": {"dtype": "float32"}}
"""Packed caches store float32 exactly, so results must equal the results without the backend."""

Step = Callable[..., Tensor]


def compiled(step: Any, policy: Any = LOSSLESS, **how: Any) -> Any:
    options = {"policy": policy, "on_unsupported": "error"}
    return torch.compile(step, backend="kvquant", options=options, **how)


def attention(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    mask = torch.arange(keys.shape[2]) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return attention(q, keys, values, pos)


def tokens(count: int, start: int, generator: torch.Generator | None = None) -> tuple[Tensor, ...]:
    """Queries, keys and values of ``count`` tokens, and their positions."""
    rows = torch.randn(3, BATCH, HEADS, count, HEAD_DIM, generator=generator)
    return *rows.unbind(), torch.arange(start, start + count)


def new_caches() -> list[Tensor]:
    return [torch.zeros(BATCH, HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("seed_without_grad")
    torch._dynamo.reset()


node_by_node = pytest.mark.usefixtures("without_code_generation")


# The holder of the cache


@dataclass
class Pair:
    keys: Tensor
    values: Tensor


class Holder(nn.Module):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys)
        self.register_buffer("values", values)


def in_attributes(cache: Any) -> tuple[Tensor, Tensor]:
    return cache.keys, cache.values


HOLDERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Sequence[Tensor]]]] = {
    "a list of layers": (lambda k, v: [[k, v]], lambda cache: cache[0]),
    "a dict": (lambda k, v: {"keys": k, "values": v}, lambda cache: (cache["keys"], cache["values"])),
    "a dataclass": (Pair, in_attributes),
    "a module": (Holder, in_attributes),
}


@node_by_node
@pytest.mark.parametrize(("hold", "held"), HOLDERS.values(), ids=HOLDERS.keys())
def test_a_cache_is_packed_wherever_it_is_held(hold: Any, held: Any) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, cache: Any) -> Tensor:
        keys, values = held(cache)  # [batch, tokens, heads, head_dim]
        keys[:, pos], values[:, pos] = k.transpose(1, 2), v.transpose(1, 2)
        return attention(q, keys.transpose(1, 2), values.transpose(1, 2), pos)

    cache, expected = (hold(*(x.transpose(1, 2).contiguous() for x in new_caches())) for _ in range(2))
    run = compiled(forward)
    for start in (0, 5):
        new = tokens(5, start)
        torch.testing.assert_close(run(*new, cache), forward(*new, expected), rtol=1e-4, atol=1e-5)
    for packed, plain in zip(held(cache), held(expected), strict=True):
        assert isinstance(packed, PackedTensor)
        assert torch.equal(packed.dequantize(), plain)


@pytest.mark.parametrize("generated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_caches_that_cannot_be_packed_serve_calls_of_any_size_and_number(
    generated: bool, request: pytest.FixtureRequest
) -> None:
    if not generated:
        request.getfixturevalue("without_code_generation")

    scale = {"factor": 0.5}

    def forward(q: Tensor, k: Tensor, v: Tensor, pos: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return step(q * scale["factor"], k, v, keys, values, pos)

    run = compiled(forward, dynamic=True)
    for count, scale["factor"] in ((3, 0.5), (5, 2.0), (3, 0.25)):
        caches, expected = new_caches(), new_caches()
        held = weakref.ref(caches[0])
        new = tokens(count, 7)
        torch.testing.assert_close(run(*new, *caches), forward(*new, *expected))
        assert type(held()) is Tensor
        assert all(torch.equal(cache, plain) for cache, plain in zip(caches, expected, strict=True))


@node_by_node
def test_garbage_that_holds_a_cache_does_not_matter() -> None:
    caches = new_caches()
    cycle: list[Any] = [weakref.ref(caches[0])]
    cycle.append(cycle)
    del cycle
    compiled(step)(*tokens(3, 0)[:3], *caches, torch.arange(3))
    assert all(isinstance(cache, PackedTensor) for cache in caches)


@node_by_node
def test_a_fake_mode_that_has_seen_a_cache_does_not_matter() -> None:
    """The modes of ``torch.export`` live as long as the exported module, and each knows the buffers of the module."""
    mode, caches = FakeTensorMode(), new_caches()
    fakes = [mode.from_tensor(cache) for cache in caches]
    compiled(step)(*tokens(3, 0)[:3], *caches, torch.arange(3))
    assert all(isinstance(cache, PackedTensor) for cache in caches)
    assert [fake.shape for fake in fakes] == [cache.shape for cache in caches]


# The code that continues with it


def with_graph_breaks(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    k = k.clone()
    torch._dynamo.graph_break()
    out = step(q, k, v, keys, values, pos)
    torch._dynamo.graph_break()
    return out.clone()


def another_region(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    return step(q, k, v, keys, values, pos) * 1


STEPS: dict[str, Callable[[], list[Step]]] = {
    "fullgraph": lambda: [compiled(step, fullgraph=True)],
    "dynamic": lambda: [compiled(step, dynamic=True)],
    "graph breaks": lambda: [compiled(with_graph_breaks)],
    "regions that share a cache": lambda: [compiled(step), compiled(another_region)],
    "compiled and uncompiled steps": lambda: [compiled(step), step],
}


@pytest.mark.sampled(2)
@node_by_node
@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())
def test_steps_in_turn_give_the_results_of_one_function(make: Callable[[], list[Step]]) -> None:
    steps, caches, expected = make(), new_caches(), new_caches()
    start = 0
    with collect_reports() as report:
        for index, count in enumerate((5, 1, 70)):
            q, k, v, pos = tokens(count, start)
            out = steps[index % len(steps)](q, k, v, *caches, pos)
            torch.testing.assert_close(out, step(q, k, v, *expected, pos), rtol=1e-4, atol=1e-5)
            start += count
    assert report.totals.rewritten == report.totals.sites > 0
    assert report.notes == []
    for packed, plain in zip(caches, expected, strict=True):
        assert isinstance(packed, PackedTensor)
        assert torch.equal(packed.dequantize(), plain)


@node_by_node
def test_each_model_of_a_process_has_its_policy_and_a_packed_cache_keeps_its_format() -> None:
    runs = {policy: compiled(step, policy) for policy in ("fp8_e4m3", "int8_per_token_head")}
    caches = {policy: new_caches() for policy in runs}
    for owner, runner in (*zip(runs, runs, strict=True), tuple(runs), tuple(runs)[::-1]):
        expected = copy.deepcopy(caches[owner])
        q, k, v, pos = tokens(3, 10 * (owner != runner))
        out = runs[runner](q, k, v, *caches[owner], pos)
        for cache in caches[owner]:
            assert isinstance(cache, PackedTensor)
            assert cache.packed_layout.format_name == owner
        if owner != runner:  # the cache is packed already; otherwise this call adopts it
            torch.testing.assert_close(out, step(q, k, v, *expected, pos), rtol=1e-4, atol=1e-5)
            assert torch.equal(caches[owner][0].dequantize(), expected[0].dequantize())


# Threads


def growing_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    keys, values = torch.cat([keys, k + 1], 2), torch.cat([values, v + 1], 2)
    return F.scaled_dot_product_attention(q, keys, values), keys, values


@node_by_node
def test_threads_run_compiled_steps_on_separate_caches() -> None:
    """Threads adopt caches at once, continue one prompt, and decode.

    The threads stay at the same stage, so that all use the same graph of a function. With different graphs, each call
    moves its graph to the front of the list that other threads search. Dynamo may then compile a graph again, and takes
    no calls meanwhile.
    """
    fixed, growing = ([compiled(fn), compiled(fn)] for fn in (step, growing_step))
    layouts = [PackedLayout("float32", role, HEAD_DIM) for role in ("key", "value")]

    def new_prompt() -> list[PackedTensor]:
        rows = torch.randn(2, BATCH, HEADS, 20, HEAD_DIM)
        return [PackedTensor.from_dense(x, layout, growing=True) for x, layout in zip(rows, layouts, strict=True)]

    def decode(thread: int, prompt: list[PackedTensor], adopted: Callable[[], object]) -> None:
        """Fill the caches, and continue the prompt that all threads share."""
        torch.set_grad_enabled(False)  # each thread has its own grad mode
        generator = torch.Generator().manual_seed(thread)
        caches, expected = new_caches(), new_caches()
        longer: list[Tensor] = list(prompt)
        expected_longer = [x.dequantize() for x in prompt]
        for start in range(12):
            q, k, v, pos = tokens(1, start, generator)
            out = fixed[thread % 2](q, k, v, *caches, pos)
            torch.testing.assert_close(out, step(q, k, v, *expected, pos), rtol=1e-4, atol=1e-5)
            out, *longer = growing[thread % 2](q, k, v, *longer, pos)
            plain, *expected_longer = growing_step(q, k, v, *expected_longer, pos)
            torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
            if start == 0:
                adopted()
        for packed, plain in zip((*caches, *longer), (*expected, *expected_longer), strict=True):
            assert isinstance(packed, PackedTensor)
            assert torch.equal(packed.dequantize(), plain)

    decode(0, new_prompt(), lambda: None)
    warm = new_caches()

    def use_graph_for_packed_caches() -> None:
        fixed[0](*tokens(1, 1)[:3], *warm, torch.tensor([1]))

    fixed[0](*tokens(1, 0)[:3], *warm, torch.tensor([0]))  # with plain caches, as in each thread's first step
    graphs, prompt = counters["stats"]["unique_graphs"], new_prompt()
    barrier = Barrier(4, use_graph_for_packed_caches, timeout=60)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda thread: decode(thread, prompt, barrier.wait), range(4)))
    assert counters["stats"]["unique_graphs"] == graphs


# Keys of caches on disk


@needs_release("2.13", "Dynamo cannot trace torch.cond with a tensor subclass, and raises an error of its own")
@node_by_node
def test_a_branch_that_takes_a_packed_cache_is_an_error_that_names_the_cache() -> None:
    def branch(q: Tensor, keys: Tensor, values: Tensor, wanted: Tensor) -> Tensor:
        result: Tensor = torch.cond(wanted, F.scaled_dot_product_attention, lambda q, *_: q.clone(), (q, keys, values))
        return result

    caches, (q, k, v, pos) = new_caches(), tokens(1, 0)
    compiled(branch)(q, *caches, torch.tensor(True))  # plain caches stay plain
    compiled(step)(q, k, v, *caches, pos)
    with pytest.raises(BackendCompilerFailed, match=r"cond \(.*torch.cond.*\) takes the packed cache keys"):
        compiled(branch)(q, *caches, torch.tensor(True))


@node_by_node
def test_inductors_cache_has_another_key_for_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str] = []
    interpret = kvcompile.compilation.graph_compiler.compile_fx_inner

    def keep_key(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        keys.append(compiled_fx_graph_hash(gm, example_inputs, dict(kwargs), [])[0])
        return interpret(gm, example_inputs, **kwargs)

    monkeypatch.setattr(kvcompile.compilation.graph_compiler, "compile_fx_inner", keep_key)
    policies = ["int8_per_token_head", "fp8_e4m3", "turboquant_4bit_nc", "int8_per_token_head"]
    for policy in policies:
        torch._dynamo.reset()
        compiled(step, policy)(*tokens(1, 5)[:3], *new_caches(), torch.tensor([5]))
    assert keys[0] == keys[-1]
    assert len(set(keys)) == len(set(policies)) == len(keys) - 1
