"""``kvcompile.compile(model)`` prepares ``generate()``: its cache is packed from the start, and memory is reused."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile import KVCompileError, OptionsError, PackedTensor, collect_reports
from kvcompile.call.adjacent_parameters import adjacent_of
from kvcompile.compat.transformers import with_cache
from kvcompile.generation import generate
from kvcompile.generation.generate import Generation

transformers = pytest.importorskip("transformers")
from formats_of_every_kind import in_turn  # noqa: E402
from policies import reading_packed  # noqa: E402
from small_models import give_outlier_keys  # noqa: E402
from tiny_llama import assistant, assisted_on_static_caches, attention_llama, left_padded  # noqa: E402
from windowed_models import windowed  # noqa: E402

LOSSLESS = {"default": {"dtype": "float32"}}
"""Packed caches store float32 exactly, so tokens must equal the tokens without kvcompile."""

FORMATS = ["int8_per_token_head", "int4", "turboquant_4bit_nc"]

REPETITIVE = torch.tensor([[5, 6, 7, 8] * 5])


def generated(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(5)
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(**{**common, **arguments})


def compiled_llama(policy: Any = LOSSLESS, **sizes: Any) -> Any:
    model = attention_llama(**{"num_layers": 1, **sizes})
    return kvcompile.compile(model, policy=policy, on_unsupported="error")


@pytest.fixture(autouse=True)
def _node_by_node(request: pytest.FixtureRequest) -> None:
    """Graphs run node by node; the tests with generated code are in test_compiled_generate_code.py."""
    request.getfixturevalue("without_code_generation")
    counters.clear()


def test_a_model_with_merged_projections_generates_the_same_tokens_and_is_saved_as_before(tmp_path: Any) -> None:
    model = attention_llama()
    expected = generated(model, **left_padded())
    kvcompile.compile(model, policy=LOSSLESS, merge_projections=True, on_unsupported="error")
    for _ in range(2):
        assert torch.equal(generated(model, **left_padded()), expected)
    attention = model.model.layers[0].self_attn
    assert adjacent_of([getattr(attention, f"{name}_proj").weight for name in "kqv"]) is not None
    model.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items() if name in weights)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches that were made for requests."""
    from kvcompile.caches import requests

    caches = []
    make = requests.packed_cache

    def remember(*args: Any, **kwargs: Any) -> Any:
        caches.append(make(*args, **kwargs))
        return caches[-1]

    monkeypatch.setattr(requests, "packed_cache", remember)
    return caches


VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"inputs": REPETITIVE},
    "a batch of left-padded sequences": left_padded(),
    "sampling, several answers to a prompt": {**left_padded(), "do_sample": True, "num_return_sequences": 3},
    "beams, which reorder the cache": {**left_padded(), "num_beams": 3},
    "sampled beams": {**left_padded(), "num_beams": 2, "do_sample": True},
    "prompt lookup, which crops the cache": {"inputs": REPETITIVE, "prompt_lookup_num_tokens": 3},
    "a static cache": {**left_padded(), "cache_implementation": "static"},
    "a static cache, prefilled in chunks": {**left_padded(), "prefill_chunk_size": 8, "cache_implementation": "static"},
    "a prompt of one token": {"inputs": REPETITIVE[:, :1]},
    "one new token": {"inputs": REPETITIVE, "max_new_tokens": 1},
    "embeddings": {"inputs_embeds": torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1))},
    "guidance, which runs the model on a second cache": {"inputs": REPETITIVE, "guidance_scale": 1.5},
    "past a block of 64 tokens": {"inputs": REPETITIVE, "max_new_tokens": 50},
}


SLOW_VARIANTS = ("sampled beams", "a static cache", "a prompt of one token")
"""Other variants cover these: they sample, have beams, have a static cache, or feed one token."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, id=name, marks=pytest.mark.slow if name in SLOW_VARIANTS else ())
        for name, arguments in VARIANTS.items()
    ],
)
def test_every_way_to_decode_gives_the_same_tokens_with_one_packed_cache(
    arguments: dict[str, Any], made: list[Any]
) -> None:
    """The report names the class of the model that generates, not the function that is compiled."""
    expected = generated(attention_llama(num_layers=1), **arguments)
    model = compiled_llama()
    with collect_reports() as report:
        for _ in range(2):
            assert torch.equal(generated(model, **arguments), expected)
    (cache,) = made
    assert isinstance(cache.layers[0].keys, PackedTensor)
    if not {"prompt_lookup_num_tokens", "max_new_tokens"} & arguments.keys():  # such requests may run eager code only
        assert len(report.graphs) == 1
        assert report.totals.rewritten == report.totals.sites == 1
        assert report.notes == []
        (origin,) = [graph.origin for graph in report.graphs]
        assert origin is not None
        assert origin.model == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "implementation", [None, pytest.param("static", marks=[assisted_on_static_caches, pytest.mark.slow])]
)
def test_wrong_guesses_of_an_assistant_are_cropped(implementation: str | None, made: list[Any]) -> None:
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE, max_new_tokens=24)
    model, helper = compiled_llama(), kvcompile.compile(assistant(), policy=LOSSLESS)
    arguments = {"inputs": REPETITIVE, "cache_implementation": implementation, "max_new_tokens": 24}
    for assisting in (assistant(), helper):
        assert torch.equal(generated(model, assistant_model=assisting, **arguments), expected)
    assert len(made) == 1, "the assistant has the cache that Transformers makes"
    assert isinstance(made[0].layers[0].keys, PackedTensor)


def test_attentions_of_assisted_decoding_are_as_wide_as_in_transformers() -> None:
    arguments = {"inputs": REPETITIVE, "output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    plain, model = attention_llama(num_layers=1), kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    for each in (plain, model):
        each.set_attn_implementation("eager")
    expected, found = (generated(each, assistant_model=assistant(), **arguments).attentions for each in (plain, model))
    torch.testing.assert_close(found, expected)


def test_attentions_that_the_implementation_does_not_give_leave_the_cache_packed() -> None:
    """Transformers then logs a warning in each layer, which would break the graph within attention."""
    arguments = {"inputs": REPETITIVE, "output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    expected = generated(attention_llama(num_layers=1), **arguments).sequences
    result = generated(compiled_llama(), **arguments)
    assert torch.equal(result.sequences, expected)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("policy", "arguments"),
    in_turn(FORMATS, [{}, {"num_beams": 3}, {"do_sample": True}]),
)
def test_tokens_equal_the_tokens_of_a_packed_cache_that_is_passed(policy: str, arguments: dict[str, Any]) -> None:
    """Both models read prompts packed, as a model that is not prepared always does."""
    plain, model = attention_llama(num_layers=1), compiled_llama(reading_packed(policy))
    for num_tokens in (60, 30):  # the second request reuses the memory of the first
        arguments |= left_padded(num_tokens)
        cache = kvcompile.static_cache(plain, 2 * arguments.get("num_beams", 1), 128, policy)
        expected = generated(plain, past_key_values=cache, **arguments)
        assert torch.equal(generated(model, **arguments), expected)


def test_outlier_keys_of_the_first_prompt_are_noted() -> None:
    model = give_outlier_keys(attention_llama(num_layers=2, head_dim=32), 1024.0, layers=(1,))
    kvcompile.compile(model, policy="int4_per_token_head")
    with collect_reports() as report:
        for _ in range(2):
            generated(model, inputs=REPETITIVE, max_new_tokens=2)
    (note,) = report.notes
    assert note.startswith("model.layers.1.self_attn: its keys have outlier channels")
    ignoring = {"default": {"dtype": "int4_per_token_head"}, "key_outliers": "ignore"}
    kvcompile.compile(model, policy=ignoring)
    with collect_reports() as report:
        generated(model, inputs=REPETITIVE, max_new_tokens=1)
    assert not any("outlier" in note for note in report.notes)


# Memory


def test_the_next_request_of_the_same_or_a_smaller_length_uses_the_memory_again(made: list[Any]) -> None:
    model = compiled_llama("int4")
    counts, addresses = [], []
    for num_tokens in (60, 60, 9, 40):
        generated(model, **left_padded(num_tokens))
        counts.append(counters["stats"]["unique_graphs"])
        addresses.append(made[0].layers[0].keys.packed.data_ptr())
    assert len(made) == 1
    assert counts == [1, 1, 1, 1]
    assert len(set(addresses)) == 1


def test_the_memory_of_a_cache_that_is_too_small_is_freed_before_a_larger_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvcompile.caches import requests

    alive: list[Callable[[], Any]] = []
    make = requests.packed_cache

    def watch(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        assert [reference() for reference in alive] == [None] * len(alive)
        cache = make(*args, **kwargs)
        alive.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(requests, "packed_cache", watch)
    model = compiled_llama()
    generated(model, **left_padded(20))
    for prompt in (left_padded(100), left_padded(20), {"inputs": REPETITIVE}):  # the last has another batch size
        generated(model, **prompt, max_new_tokens=1)  # no step to compile
    assert len(alive) == 3


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    class Stop(Exception):
        pass

    def fail(ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        raise Stop

    expected = generated(attention_llama(num_layers=1), **left_padded())
    model = compiled_llama()
    with pytest.raises(Stop):
        generated(model, **left_padded(40), stopping_criteria=[fail])
    assert torch.equal(generated(model, **left_padded()), expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 64), "batch_size: expected a whole number of at least 1, got 0"),
        ((1, -1), "max_len: expected a whole number of at least 1, got -1"),
        ((1, 64.5), "max_len: expected a whole number of at least 1, got 64.5"),
        ((True, 64), "batch_size: expected a whole number of at least 1, got True"),
        ((1, 10**30), f"max_len: give at most {10**12}, got {10**30}"),
    ],
)
def test_sizes_of_a_cache_that_are_no_positive_integers_are_named(arguments: tuple[Any, Any], message: str) -> None:
    with pytest.raises(KVCompileError, match=f"^static_cache: {message}$"):
        kvcompile.static_cache(attention_llama(num_layers=1), *arguments, "int4")


def test_objects_that_are_not_models_are_named() -> None:
    name: Any = "path/to/model"
    with pytest.raises(OptionsError, match=r"^compile: expected a module or a function, got str; load the model"):
        kvcompile.compile(name)
    for function in (kvcompile.explain, kvcompile.verify):
        with pytest.raises(OptionsError, match=f"^{function.__name__}: expected a module or a function, got str; load"):
            function(name, torch.zeros(1))
    with pytest.raises(KVCompileError, match=r"^static_cache: Linear has no config of Transformers; make its caches"):
        kvcompile.static_cache(torch.nn.Linear(1, 1), 1, 64, "int4")


def test_a_cache_for_other_sequences_or_another_dtype_names_the_remedy() -> None:
    model = attention_llama(num_layers=1)
    for cache in (
        kvcompile.static_cache(model, 2, 64, "int8_per_token_head"),
        kvcompile.static_cache(attention_llama(num_layers=1).half(), 1, 64, "int8_per_token_head"),
    ):
        with pytest.raises(RuntimeError, match=r"make the cache for this model, its dtype and this number of sequenc"):
            model(torch.zeros(1, 3, dtype=torch.int64), **with_cache(model, cache))


def test_requests_in_inference_mode_and_outside_of_it_take_turns() -> None:
    expected = generated(attention_llama(num_layers=1), **left_padded())
    model = compiled_llama()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(generated(model, **left_padded()), expected)


def test_two_requests_at_once_have_separate_caches(made: list[Any]) -> None:
    prompts = [left_padded(20), left_padded(30)]
    expected = [generated(attention_llama(num_layers=1), **prompt) for prompt in prompts]
    model, together = compiled_llama(), Barrier(2)

    def meet(ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        together.wait(timeout=60)
        return torch.zeros(len(ids), dtype=torch.bool)

    def answer(prompt: dict[str, Tensor]) -> Tensor:
        common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return model.generate(**prompt, **common, stopping_criteria=[meet])

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(answer, prompts))
    for tokens, right in zip(answers, expected, strict=True):
        assert torch.equal(tokens, right)
    assert len(made) == 2


# Caches that callers see


@pytest.mark.parametrize(
    "policy", [pytest.param(LOSSLESS, marks=pytest.mark.slow, id="lossless"), pytest.param("int4", id="int4")]
)
def test_a_returned_cache_is_the_callers_and_grows_with_the_conversation(policy: Any) -> None:
    plain, model = attention_llama(num_layers=1), compiled_llama(policy)
    first = generated(model, **left_padded(), return_dict_in_generate=True)
    cache = first.past_key_values
    assert type(cache) is transformers.StaticCache
    before = cache.layers[0].keys.packed.clone()
    generated(model, **left_padded(25))
    assert torch.equal(cache.layers[0].keys.packed, before)
    by_hand = kvcompile.static_cache(plain, 2, 300, policy)
    right = generated(plain, **left_padded(), past_key_values=by_hand, return_dict_in_generate=True)
    for question, length in (([[11, 12]], 50), ([[13]], 3)):
        ids = torch.cat([first.sequences, torch.tensor(question).expand(2, -1)], 1)
        first = generated(model, inputs=ids, past_key_values=cache, max_new_tokens=length, return_dict_in_generate=True)
        right = generated(
            plain, inputs=ids, past_key_values=by_hand, max_new_tokens=length, return_dict_in_generate=True
        )
        assert first.past_key_values is cache
        assert torch.equal(first.sequences, right.sequences)
    assert cache.layers[0].keys.shape[2] >= first.sequences.shape[1] - 1


@assisted_on_static_caches
def test_assisted_decoding_reads_a_conversation_anew_into_its_returned_cache() -> None:
    plain, model = attention_llama(num_layers=1), compiled_llama()
    first = generated(model, inputs=REPETITIVE, return_dict_in_generate=True)
    ids, cache = torch.cat([first.sequences, torch.tensor([[7, 8]])], 1), first.past_key_values
    second = generated(model, inputs=ids, past_key_values=cache, prompt_lookup_num_tokens=3)
    assert torch.equal(second, generated(plain, inputs=ids))
    assert cache.get_seq_length() == second.shape[1] - 1  # Transformers itself would store the first tokens twice
    ids, new = torch.cat([second, torch.tensor([[9]])], 1), torch.tensor([[second[0, -1], 9]])
    more = {"attention_mask": torch.ones_like(ids), "prompt_lookup_num_tokens": 3}
    third = generated(model, inputs=new, past_key_values=cache, **more)
    assert torch.equal(third[:, 2:], generated(plain, inputs=ids)[:, ids.shape[1] :])


def test_embeddings_of_the_whole_conversation_need_no_additional_room() -> None:
    model, plain = compiled_llama(), attention_llama(num_layers=1)
    prompt = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    cache = kvcompile.static_cache(plain, 1, 64, LOSSLESS)
    first = generated(model, inputs=prompt, past_key_values=cache, max_new_tokens=10)
    again = {"inputs_embeds": plain.get_input_embeddings()(first), "max_new_tokens": 10}
    assert torch.equal(
        generated(model, inputs=None, past_key_values=cache, **again), generated(plain, inputs=None, **again)
    )
    assert cache.layers[0].keys.shape[2] == 64


def test_only_a_cache_that_is_too_short_is_extended_also_if_the_prompt_lacks_its_tokens() -> None:
    model, plain = compiled_llama(), attention_llama(num_layers=1)
    prompt = torch.randint(3, 97, (1, 70), generator=torch.Generator().manual_seed(1))
    cache = kvcompile.static_cache(plain, 1, 90, LOSSLESS)
    first = generated(model, inputs=prompt, past_key_values=cache, return_dict_in_generate=True).sequences
    ids = torch.cat([first, torch.tensor([[7]])], 1)
    second = generated(plain, inputs=ids)
    assert torch.equal(generated(model, inputs=ids, past_key_values=cache), second)
    assert cache.layers[0].keys.shape[2] == 90
    question = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(2))
    third = generated(plain, inputs=torch.cat([second, question], 1))
    held = int(cache.get_seq_length())
    new = torch.cat([second, question], 1)[:, held:]
    mask = torch.ones(1, held + new.shape[1], dtype=torch.long)
    answer = generated(model, inputs=new, past_key_values=cache, attention_mask=mask)
    assert torch.equal(answer, third[:, held:])
    assert cache.layers[0].keys.shape[2] == 192


def repeated(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = (x.repeat_interleave(3, 0) for x in (layer.keys, layer.values))


def selected(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = (x[torch.tensor([1])] for x in (layer.keys, layer.values))


def reordered(cache: Any) -> None:
    cache.reorder_cache(torch.tensor([1, 0]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("change", "sequences"), [(repeated, [0, 0, 0, 1, 1, 1]), (selected, [1]), (reordered, [1, 0])]
)
def test_a_conversation_goes_on_with_other_sequences_of_a_returned_cache(
    change: Callable[[Any], None], sequences: list[int]
) -> None:
    model, prompts = compiled_llama("int8_per_token_head"), torch.randint(3, 97, (2, 20))
    conversations = []
    for changed in (False, True):
        first = generated(model, inputs=prompts, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.tensor([[11, 12]]).expand(2, -1)], 1)
        if changed:
            change(first.past_key_values)
            ids = ids[sequences]
        packed = first.past_key_values.layers[0].keys
        assert isinstance(packed, PackedTensor)
        assert packed.shape[0] == len(ids)
        conversations.append(generated(model, inputs=ids, past_key_values=first.past_key_values))
    assert torch.equal(conversations[1], conversations[0][sequences])


def test_beams_take_a_cache_of_all_their_sequences() -> None:
    model, prompts = compiled_llama("int8_per_token_head"), torch.randint(3, 97, (2, 20))
    cache = kvcompile.static_cache(model, 2 * 3, 64, "int8_per_token_head")
    own = generated(model, inputs=prompts, num_beams=3, past_key_values=cache)
    assert torch.equal(own, generated(model, inputs=prompts, num_beams=3))
    assert cache.layers[0].keys.shape[0] == 6


def test_a_returned_cache_can_be_saved_and_copied(tmp_path: Any) -> None:
    arguments = {"inputs": REPETITIVE, "return_dict_in_generate": True, "disable_compile": True}
    cache = generated(compiled_llama("int4"), **arguments).past_key_values
    kvcompile.save_cache(cache, tmp_path / "cache.safetensors")
    for other in (kvcompile.load_cache(tmp_path / "cache.safetensors"), copy.deepcopy(cache)):
        assert torch.equal(other.layers[0].keys.packed, cache.layers[0].keys.packed)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_cache_that_the_caller_passes_is_used_and_packed_by_the_first_compiled_step(
    kind: str, made: list[Any]
) -> None:
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE)
    model = compiled_llama()
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    cache = static if kind == "static" else transformers.DynamicCache(config=model.config)
    result = generated(model, inputs=REPETITIVE, past_key_values=cache, return_dict_in_generate=True)
    assert torch.equal(result.sequences, expected)
    assert result.past_key_values is cache
    assert isinstance(cache.layers[0].keys, PackedTensor)
    assert made == []


def test_disable_compile_runs_on_a_packed_cache_without_compiling(made: list[Any]) -> None:
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE)
    assert torch.equal(generated(compiled_llama(), inputs=REPETITIVE, disable_compile=True), expected)
    assert len(made) == 1
    assert not counters["stats"]["unique_graphs"]


# Requests that are not served


def experts() -> Any:
    """A mixture of experts in float32: shapes alone do not tell its code which experts compute."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.MixtralConfig(**sizes, **heads, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(config).eval()


def reads_the_length_of_its_cache() -> Any:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_position_embeddings": 64}
    types = {
        "attention_types": [[["local"], 1]],
        "window_size": 8,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **types)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model


def state_space() -> Any:
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config).eval()


def encoder_decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(vocab_size=97, **sizes, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None)
    return transformers.T5ForConditionalGeneration(config).eval()


def by_a_callers_code(model: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    return model(input_ids).logits.argmax(-1)


UNSERVED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "without a cache": (lambda: attention_llama(num_layers=1), {"use_cache": False}),
    "a state-space model": (state_space, {}),
    "a model that computes other logits with a static cache": (reads_the_length_of_its_cache, {}),
    "an encoder-decoder": (encoder_decoder, {"max_new_tokens": 2}),
    "prompt lookup with sliding windows": (windowed, {"prompt_lookup_num_tokens": 2}),
    "code of the caller": (lambda: attention_llama(num_layers=1), {"custom_generate": by_a_callers_code}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("make", "arguments"), UNSERVED.values(), ids=UNSERVED.keys())
def test_a_request_that_cannot_be_served_runs_as_without_kvcompile(
    make: Callable[[], Any], arguments: dict[str, Any]
) -> None:
    prompt = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    expected = generated(make(), inputs=prompt, **arguments)
    model = kvcompile.compile(make(), policy=LOSSLESS)
    for _ in range(2):
        assert torch.equal(generated(model, inputs=prompt, **arguments), expected)


def test_a_mixture_of_experts_decodes_on_a_packed_cache(made: list[Any]) -> None:
    prompt = torch.randint(3, 97, (1, 6), generator=torch.Generator().manual_seed(1))
    model = kvcompile.compile(experts(), policy=LOSSLESS)
    assert torch.equal(generated(model, inputs=prompt), generated(experts(), inputs=prompt))
    assert [type(layer.keys) for (cache,) in [made] for layer in cache.layers] == [PackedTensor]


def test_a_model_that_computes_other_logits_with_a_static_cache_is_named() -> None:
    with pytest.raises(kvcompile.KVCompileError, match="GPTNeoForCausalLM computes other logits with a static cache"):
        kvcompile.static_cache(reads_the_length_of_its_cache(), 1, 64, LOSSLESS)


def test_a_policy_that_packs_nothing_leaves_generate_to_transformers(made: list[Any]) -> None:
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE)
    model = kvcompile.compile(attention_llama(num_layers=1), policy={"default": {"dtype": "auto"}})
    for _ in range(2):
        result = generated(model, inputs=REPETITIVE, return_dict_in_generate=True)
        assert torch.equal(result.sequences, expected)
        assert type(result.past_key_values) is transformers.DynamicCache
    assert len(made) == 1


def test_a_model_that_does_not_run_with_a_static_cache_gets_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise KVCompileError("static_cache: TestModel does not run")

    monkeypatch.setattr("kvcompile.caches.requests.packed_cache", refuse)
    expected = generated(attention_llama(num_layers=1), inputs=REPETITIVE)
    model = compiled_llama()
    with collect_reports() as report:
        for _ in range(2):
            assert torch.equal(generated(model, inputs=REPETITIVE), expected)
    line = "generate() of this LlamaForCausalLM runs without a packed cache: static_cache: TestModel does not run"
    assert report.notes[0] == line


def test_an_additional_compile_config_is_an_error() -> None:
    config = transformers.CompileConfig()
    with pytest.raises(OptionsError, match=r"drop compile_config, or call kvcompile.uncompile\(model\)"):
        generated(compiled_llama(), inputs=REPETITIVE, compile_config=config)


# The model


def test_no_cache_is_packed_for_attention_that_transformers_compiles_itself() -> None:
    """Transformers' compiled ``flex_attention`` cannot read packed caches. ``generate()`` then keeps plain caches."""
    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(KVCompileError, match=r"static_cache: .* call model.set_attn_implementation\('sdpa'\)"):
        kvcompile.static_cache(model, 1, 64, LOSSLESS)
    model.set_attn_implementation("sdpa")
    result = generated(model, inputs=REPETITIVE, return_dict_in_generate=True)
    assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)


def test_a_request_whose_steps_run_eagerly_is_not_taken_for_one_without_packed_caches() -> None:
    with collect_reports() as report:
        generated(compiled_llama(), inputs=REPETITIVE, disable_compile=True)
    assert report.remarks == []
    assert report.eager_requests == 1


def test_a_model_may_attend_otherwise_in_its_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kvcompile.compile(attention_llama(num_layers=1), policy=LOSSLESS)
    for by_flex in (True, False, True):
        monkeypatch.setattr(generate, "attends_by_flex", lambda config, by_flex=by_flex: by_flex)
        result = generated(model, inputs=REPETITIVE, return_dict_in_generate=True, disable_compile=True)
        assert isinstance(result.past_key_values.layers[0].keys, PackedTensor) is not by_flex


def test_one_call_undoes_it() -> None:
    model = attention_llama(num_layers=1)
    before = dict(vars(model))
    assert kvcompile.compile(model, policy=LOSSLESS) is model
    generated(model, inputs=REPETITIVE)
    assert kvcompile.uncompile(model) is model
    after = dict(vars(model))
    assert after.pop("_compiled_call_impl", None) is None
    assert after == before
    result = generated(model, inputs=REPETITIVE, return_dict_in_generate=True)
    assert type(result.past_key_values) is transformers.DynamicCache
    assert type(result.past_key_values.layers[0].keys) is Tensor


def test_compiling_anew_replaces_the_options(made: list[Any]) -> None:
    model = compiled_llama("int8_per_token_head")
    generated(model, inputs=REPETITIVE)
    kvcompile.compile(model, policy="int4")
    generated(model, inputs=REPETITIVE)
    assert [cache.layers[0].keys.format_name for cache in made] == ["int8_per_token_head", "int4_per_channel"]
    kvcompile.uncompile(model)
    assert Generation.of(model) is None


def test_copies_generate_as_their_class_does(made: list[Any]) -> None:
    model = compiled_llama()
    expected = generated(model, inputs=REPETITIVE)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        result = generated(copied, inputs=REPETITIVE, return_dict_in_generate=True)
        assert torch.equal(result.sequences, expected)
        assert type(result.past_key_values) is transformers.DynamicCache
    assert len(made) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_can_be_compiled_too(copied: Callable[[Any], Any]) -> None:
    model = compiled_llama()
    other = kvcompile.compile(copied(model), policy=LOSSLESS)
    for each in (model, other):
        result = generated(each, inputs=REPETITIVE, return_dict_in_generate=True)
        assert isinstance(result.past_key_values.layers[0].keys, PackedTensor)
    kvcompile.uncompile(other)
    assert Generation.of(other) is None
    assert Generation.of(model) is not None


def test_calls_outside_of_generate_are_compiled_as_by_model_compile() -> None:
    model, plain = compiled_llama(), attention_llama(num_layers=1)
    cache, expected = (transformers.StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    with torch.no_grad():
        logits = model(input_ids=REPETITIVE, past_key_values=cache).logits
        right = plain(input_ids=REPETITIVE, past_key_values=expected).logits
    torch.testing.assert_close(logits, right)
    assert isinstance(cache.layers[0].keys, PackedTensor)


def test_explain_and_static_cache_take_a_compiled_model() -> None:
    model = compiled_llama()
    cache = kvcompile.static_cache(model, 1, 64, LOSSLESS)
    report = kvcompile.explain(model, REPETITIVE, past_key_values=cache, policy=LOSSLESS)
    assert report.totals.rewritten == report.totals.sites == 1


def test_a_pipeline_takes_a_compiled_model(made: list[Any]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{index}": index for index in range(97)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", unk_token="w1")

    def answers(model: Any) -> Any:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        return [pipe("w5 w6 w7", max_new_tokens=5, do_sample=False) for _ in range(2)]

    assert answers(compiled_llama()) == answers(attention_llama(num_layers=1))
    assert len(made) == 1
