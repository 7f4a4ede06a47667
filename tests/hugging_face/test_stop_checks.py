"""On GPUs ``generate()`` learns one step late that all sequences have ended, and the results show no trace of it.

On a CPU these tests let Transformers' deferred check run with events that are already over.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile import PackedTensor
from kvcompile.compat import stop_checks

transformers = pytest.importorskip("transformers")
from tiny_llama import attention_llama, tiny_llama  # noqa: E402

LOSSLESS = {"default": {"dtype": "float32"}}
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


class _Event:
    def __init__(self, **how: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture
def late_on_cpu(monkeypatch: pytest.MonkeyPatch, without_code_generation: None) -> None:
    monkeypatch.setattr(stop_checks, "DEVICES", ("cpu",))
    monkeypatch.setattr(torch, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state))
    counters.clear()


def generated(model: Any, ids: Tensor = IDS, **arguments: Any) -> Any:
    return model.generate(ids, **{"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, **arguments})


def pair(policy: Any = LOSSLESS) -> tuple[Any, Any]:
    """A plain model and a compiled one, with the same weights."""
    return attention_llama(num_layers=1), kvcompile.compile(attention_llama(num_layers=1), policy=policy)


def last_of(tokens: Tensor) -> list[int]:
    """End tokens with which the request that gave ``tokens`` stops after three new tokens."""
    new = tokens[:, IDS.shape[1] :]
    return [int(new[0, 2]), int(new[1, 2])]


def steps() -> int:
    return int(counters["kvquant"]["packed_calls"])


class Counting(transformers.LogitsProcessor, transformers.StoppingCriteria):
    """The caller's own code, which counts its calls and changes nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any) -> Any:
        self.calls += 1
        is_criterion = scores is None
        return torch.zeros(len(input_ids), dtype=torch.bool) if is_criterion else scores


class Kept(transformers.generation.streamers.BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())

    def end(self) -> None:
        self.tokens.append([])


@pytest.mark.usefixtures("late_on_cpu")
def test_a_request_that_ends_early_runs_one_step_too_many_and_returns_the_same_tokens() -> None:
    plain, model = pair()
    ends = last_of(generated(plain))
    expected = generated(plain, eos_token_id=ends)
    assert torch.equal(generated(model, eos_token_id=ends), expected)
    num_new_tokens = expected.shape[1] - IDS.shape[1]
    assert 1 < num_new_tokens < 8
    assert steps() == num_new_tokens  # usually one step less, because the prompt gives the first token


@pytest.mark.usefixtures("late_on_cpu")
def test_a_request_that_ends_at_its_greatest_length_runs_no_step_too_many() -> None:
    plain, model = pair()
    assert torch.equal(generated(model), generated(plain))
    assert steps() == 7
    assert torch.equal(generated(model, eos_token_id=96), generated(plain, eos_token_id=96))
    assert steps() == 14


@pytest.mark.usefixtures("late_on_cpu")
def test_the_next_request_draws_the_same_random_numbers() -> None:
    plain, model = pair()
    torch.manual_seed(3)
    ends = last_of(generated(plain, do_sample=True))
    results = []
    for each in (plain, model):
        torch.manual_seed(3)
        results.append([generated(each, do_sample=True, eos_token_id=end) for end in (ends, None)])
    assert results[0][0].shape[1] < results[0][1].shape[1]
    for expected, tokens in zip(*results, strict=True):
        assert torch.equal(tokens, expected)


@pytest.mark.usefixtures("late_on_cpu")
@pytest.mark.parametrize("may_end_early", [True, False])
def test_a_streamer_gets_the_same_tokens(may_end_early: bool) -> None:
    plain, model = pair()
    ids = IDS[:1]
    end = generated(plain, ids)[0, 11].item() if may_end_early else None
    streamers = [Kept(), Kept()]
    for each, streamer in zip((plain, model), streamers, strict=True):
        generated(each, ids, streamer=streamer, eos_token_id=end)
    assert streamers[0].tokens == streamers[1].tokens


@pytest.mark.usefixtures("late_on_cpu")
@pytest.mark.parametrize("policy", ["int8_per_token_head", "int4"], ids=["without exact tokens", "with exact tokens"])
def test_a_returned_cache_has_no_token_of_the_step_too_many(policy: str) -> None:
    """With exact tokens the extra step would replace one of them, so these requests ask after each token."""
    model = kvcompile.compile(attention_llama(num_layers=1), policy=policy)
    ends = last_of(generated(model))
    counters.clear()
    result = generated(model, eos_token_id=ends, return_dict_in_generate=True, output_logits=True)
    num_new_tokens = result.sequences.shape[1] - IDS.shape[1]
    assert steps() == num_new_tokens - (policy == "int4")
    assert len(result.logits) == num_new_tokens
    cache = result.get("cache", result.past_key_values)
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert cache.get_seq_length() == result.sequences.shape[1] - 1
    again = kvcompile.static_cache(model, 2, 64, policy)
    model(result.sequences[:, :-1], past_key_values=again)
    visible = cache.get_seq_length()
    for name in ("keys", "values"):
        kept, expected = (getattr(each.layers[0], name).dequantize()[:, :, :visible] for each in (cache, again))
        torch.testing.assert_close(kept, expected)


@pytest.mark.usefixtures("late_on_cpu")
@pytest.mark.parametrize("argument", ["logits_processor", "stopping_criteria"])
def test_code_of_the_caller_is_called_as_often_as_before(argument: str) -> None:
    plain, model = pair()
    ends = last_of(generated(plain))
    calls = []
    for each in (plain, model):
        counting = Counting()
        generated(each, eos_token_id=ends, **{argument: [counting]})
        calls.append(counting.calls)
    assert calls[0] == calls[1]


@pytest.mark.usefixtures("late_on_cpu")
def test_other_models_ask_after_each_token() -> None:
    """The class of Transformers is replaced for the process, but serves only models that are compiled."""
    plain, model = pair()
    ends = last_of(generated(model))
    calls = []
    forward = plain.forward
    plain.forward = lambda *args, **kwargs: (calls.append(1), forward(*args, **kwargs))[1]
    tokens = generated(plain, eos_token_id=ends)
    assert len(calls) == tokens.shape[1] - IDS.shape[1]


@pytest.mark.gpu
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_host_waits_as_often_for_a_long_answer_as_for_a_short_one(do_sample: bool) -> None:
    model = kvcompile.compile(tiny_llama(num_layers=2, device="cuda"), policy="int8_per_token_head")
    ids, waits = IDS.cuda(), []
    generated(model, ids, max_new_tokens=40, do_sample=do_sample)
    for num_new_tokens in (4, 40):
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                generated(model, ids, max_new_tokens=num_new_tokens, eos_token_id=96, do_sample=do_sample)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing" in str(warning.message) for warning in caught))
    assert 0 < waits[0] == waits[1]


@pytest.mark.gpu
def test_requests_on_a_gpu_end_early_with_the_same_tokens(fresh_compiler: None) -> None:
    plain, model = (tiny_llama(num_layers=1, device="cuda") for _ in range(2))
    kvcompile.compile(model, policy=LOSSLESS)
    torch.manual_seed(3)
    ends = last_of(generated(plain, IDS.cuda(), do_sample=True).cpu())
    results = []
    for each in (plain, model):
        torch.manual_seed(3)
        ids = IDS.cuda()
        results.append([generated(each, ids, do_sample=True, eos_token_id=end) for end in (ends, None, ends)])
    for expected, tokens in zip(*results, strict=True):
        assert torch.equal(tokens, expected)
