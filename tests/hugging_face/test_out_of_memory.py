"""A request that runs out of memory leaves a model and its caches usable: the next request is packed and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile.caches import layer, probe
from kvcompile.caches.room import make_room
from kvcompile.compat.continuous_batching import allocator_classes
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

transformers = pytest.importorskip("transformers")
from tiny_llama import attention_llama  # noqa: E402
from transformers.generation import ContinuousBatchingConfig  # noqa: E402

LOSSLESS = {"default": {"dtype": "float32"}}


class OutOfMemoryOnce:
    """A function that fails in its ``n``-th call, and otherwise does what another function does."""

    def __init__(self, function: Callable[..., Any], n: int = 1) -> None:
        self._function, self._calls_left = function, n

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls_left -= 1
        if self._calls_left == 0:
            raise torch.OutOfMemoryError("there is no memory")
        return self._function(*args, **kwargs)


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    """Graphs run node by node."""


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_a_cache_of_which_some_tensors_became_longer_is_extended_by_the_next_request(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, policy = attention_llama(num_layers=2), Policy.load("int8_per_token_head")
    cache = kvcompile.static_cache(model, 1, 64, policy)
    with monkeypatch.context() as patched:
        patched.setattr(layer, "extended", OutOfMemoryOnce(layer.extended, n))
        with pytest.raises(torch.OutOfMemoryError):
            make_room(cache, model, policy, 200, is_on_top=False)
    make_room(cache, model, policy, 200, is_on_top=False)
    rooms = [(each.max_cache_len, each.keys.shape[2], each.values.shape[2]) for each in cache.layers]
    assert set(rooms) == {(rooms[0][0],) * 3}
    assert rooms[0][0] >= 200


def test_a_model_that_ran_out_of_memory_while_it_was_examined_gets_a_packed_cache_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = kvcompile.compile(attention_llama(), policy=LOSSLESS), torch.tensor([[5, 6, 7]])
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "pad_token_id": 0}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("there is no memory")

    with monkeypatch.context() as patched:
        patched.setattr(probe, "_run_eagerly", fail)
        with pytest.raises(torch.OutOfMemoryError):
            model.generate(ids, **settings)
    result = model.generate(ids, **settings, return_dict_in_generate=True)
    cache = result["cache" if "cache" in result else "past_key_values"]
    assert all(isinstance(each.keys, PackedTensor) for each in cache.layers)


@pytest.mark.skipif(allocator_classes() is None, reason="this release of Transformers has no allocators")
def test_a_manager_of_continuous_batches_serves_the_requests_after_one_that_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = kvcompile.compile(attention_llama(), policy=LOSSLESS)
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1)
    batching = ContinuousBatchingConfig(num_blocks=16, page_size=64, max_batch_tokens=64)

    def batched() -> list[Any]:
        settings = {"generation_config": config, "continuous_batching_config": batching, "warmup": False}
        results = model.generate_batch([[5, 6, 7], [8, 9]], persistent_manager=True, **settings)
        return [(each.generated_tokens, each.error) for each in results.values()]

    expected = batched()
    with monkeypatch.context() as patched:
        operator = torch.ops.kvcompile.paged_attention
        patched.setattr(torch.ops.kvcompile, "paged_attention", OutOfMemoryOnce(operator))
        assert all(error is not None for _, error in batched())
    assert batched() == expected
    assert all(error is None for _, error in expected)
