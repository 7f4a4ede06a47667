"""Windows of a prepared model's caches move by whole blocks: any format packs them, and one graph decodes with them."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile import KVCompileError, PackedTensor, collect_reports
from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.packed.room import droppable_tokens, room_of_window

transformers = pytest.importorskip("transformers")
from windowed_models import all_windowed, windowed  # noqa: E402

from kvcompile.caches.blockwise_window import blockwise_window_class, is_blockwise, prepared_for_step  # noqa: E402

LOSSLESS = {"default": {"dtype": "float32"}}
EXACT_TOKENS = {**LOSSLESS, "residual_length": 128, "sink_tokens": 64}
"""Both store float32 exactly, so tokens must equal the tokens without kvcompile."""


def generated(model: Any, **arguments: Any) -> Any:
    torch.manual_seed(5)
    common = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    return model.generate(**{**common, **arguments})


def prompt_of(num_tokens: int, num_sequences: int = 1) -> Tensor:
    return torch.randint(3, 97, (num_sequences, num_tokens), generator=torch.Generator().manual_seed(num_tokens))


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    counters.clear()


# The layer alone

HEAD_DIM = 64
LAYOUTS = {
    "plain": None,
    "packed": PackedLayout("float32", "key", HEAD_DIM),
    "exact": PackedLayout("float32", "key", HEAD_DIM, Residual(1, 2, torch.float32)),
}


def layer_of(layout: PackedLayout | None, window: int, max_cache_len: int) -> Any:
    drops = droppable_tokens([layout.residual] if layout is not None else [])
    layer = blockwise_window_class()(max_cache_len, window, drops)
    layer.lazy_initialization(*[torch.zeros(2, 1, 1, HEAD_DIM)] * 2)
    if layout is not None:
        shape = layer.keys.shape
        layer.keys, layer.values = (PackedTensor.zeros(shape, torch.float32, layout) for _ in range(2))
    return layer


def values_of(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedTensor) else x


@pytest.mark.sampled(3)
@pytest.mark.parametrize("is_prepared", [False, True], ids=["eager", "prepared"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 130])
def test_attention_finds_each_token_of_its_window_where_the_mask_expects_it(
    window: int, layout: PackedLayout | None, is_prepared: bool
) -> None:
    draw, layer = random.Random(window), layer_of(layout, window, 10**6)
    cache, keys = transformers.StaticCache.__new__(transformers.StaticCache), torch.zeros(2, 1, 0, HEAD_DIM)
    cache.layers = [layer]
    for _ in range(60):
        num_new = draw.choice([1] * 8 + [2, 17, 63, 64, 65, window, window + 1, layer.max_cache_len, 300])
        new = torch.randn(2, 1, num_new, HEAD_DIM)
        length, offset = layer.get_mask_sizes(num_new)
        first, keys = keys.shape[2], torch.cat([keys, new], 2)
        if is_prepared:
            with prepared_for_step(cache, num_new):
                returned = layer.update(new, -new)
        else:
            returned = layer.update(new, -new)
        assert [x.shape[2] for x in returned] == [length, length]
        begin = max(first - window + 1, 0)
        assert offset <= begin
        seen = slice(begin - offset, keys.shape[2] - offset)
        for x, expected in zip(returned, (keys, -keys), strict=True):
            assert torch.equal(values_of(x)[:, :, seen], expected[:, :, begin:])
        assert layer.get_seq_length() == keys.shape[2]
        assert layer.max_cache_len == room_of_window(window, layer.drops)


def test_a_window_that_holds_the_whole_request_has_no_other_room() -> None:
    layer = layer_of(None, 16, 70)
    assert (layer.keys.shape[2], layer.num_prepared, layer.is_croppable) == (70, 0, True)
    layer.update(*[torch.randn(2, 1, 70, HEAD_DIM)] * 2)
    with pytest.raises(KVCompileError, match=r"the cache has room for 70 tokens, and 71 are needed"):
        layer.update(*[torch.randn(2, 1, 1, HEAD_DIM)] * 2)


def test_a_window_says_when_it_cannot_drop_its_last_tokens() -> None:
    layer, new = layer_of(LAYOUTS["packed"], 16, 10**6), torch.randn(2, 1, 150, HEAD_DIM)
    for token in new.split(50, 2):
        layer.update(token, token)
    layer.crop(-60)
    assert (layer.num_dropped, layer.get_seq_length()) == (64, 90)
    keys, _ = layer.update(new[:, :, 90:91], new[:, :, 90:91])
    assert torch.equal(keys[:, :, :27].dequantize(), new[:, :, 64:91])
    with pytest.raises(
        KVCompileError, match=r"a window of 16 tokens cannot remove its last 20, because it has dropped"
    ):
        layer.crop(-20)


def test_an_error_in_a_step_counts_no_token() -> None:
    layer = layer_of(None, 16, 10**6)
    cache = transformers.StaticCache.__new__(transformers.StaticCache)
    cache.layers = [layer]
    with pytest.raises(RuntimeError, match="fails"), prepared_for_step(cache, 1):
        raise RuntimeError("the step fails")
    assert (layer.get_seq_length(), layer.num_prepared) == (0, 0)


def test_a_step_that_stores_other_tokens_than_its_input_has_is_an_error() -> None:
    layer = layer_of(None, 16, 10**6)
    cache = transformers.StaticCache.__new__(transformers.StaticCache)
    cache.layers = [layer]
    with (
        pytest.raises(KVCompileError, match="stores 2 tokens in a window, and its input has 1"),
        prepared_for_step(cache, 1),
    ):
        layer.update(*[torch.zeros(2, 1, 2, HEAD_DIM)] * 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_window_goes_on_alone(copied: Any) -> None:
    layer, new = layer_of(LAYOUTS["exact"], 16, 10**6), torch.randn(2, 1, 40, HEAD_DIM)
    layer.update(new, new)
    other = copied(layer)
    other.update(*[torch.randn(2, 1, 300, HEAD_DIM)] * 2)
    keys, _ = layer.update(new[:, :, :1], new[:, :, :1])
    assert torch.equal(values_of(keys)[:, :, :41], torch.cat([new, new[:, :, :1]], 2))


# Requests


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("policy", "room"), [(LOSSLESS, 128), (EXACT_TOKENS, 192)], ids=["packed", "exact tokens"])
@pytest.mark.parametrize("make", [windowed, all_windowed])
def test_one_graph_decodes_before_and_after_the_window_moves(make: Any, policy: Any, room: int) -> None:
    model = kvcompile.compile(make(), policy=policy, on_unsupported="error")
    prompt, length = prompt_of(room - 8, 2), {"max_new_tokens": 30}
    mask = torch.ones_like(prompt)
    mask[0, : room - 12] = 0  # the padding leaves the window during the request
    result = generated(model, inputs=prompt, attention_mask=mask, return_dict_in_generate=True, **length)
    assert torch.equal(result.sequences, generated(make(), inputs=prompt, attention_mask=mask, **length))
    layers = result.past_key_values.layers
    assert (layers[0].keys.shape[2], layers[0].num_dropped) == (room, layers[0].drops)
    assert all(isinstance(layer.keys, PackedTensor) for layer in layers)
    assert counters["stats"]["unique_graphs"] == 1


def test_requests_of_other_lengths_need_few_graphs() -> None:
    model = kvcompile.compile(all_windowed(), policy=LOSSLESS)
    for num_tokens, num_sequences in ((10, 1), (40, 1), (200, 1), (10, 2), (300, 3), (20, 4), (500, 5)):
        prompt = prompt_of(num_tokens, num_sequences)
        expected = generated(all_windowed(), inputs=prompt, max_new_tokens=3)
        assert torch.equal(generated(model, inputs=prompt, max_new_tokens=3), expected)
    assert counters["stats"]["unique_graphs"] <= 4


def test_int4_windows_do_not_lose_precision_when_they_move() -> None:
    """Only the newest block is written; the others keep their bytes."""
    model, prompt = kvcompile.compile(all_windowed(), policy="int4", on_unsupported="error"), prompt_of(120)
    with collect_reports() as report:
        generated(model, inputs=prompt, max_new_tokens=30)
    assert report.notes == []
    cache = generated(model, inputs=prompt, max_new_tokens=5, return_dict_in_generate=True).past_key_values
    (layer,) = cache.layers
    before = layer.keys.dequantize()[:, :, :124]
    layer._drop(64)
    assert torch.equal(layer.keys.dequantize()[:, :, :60], before[:, :, 64:])


def test_a_layer_that_the_policy_leaves_plain_moves_with_the_others() -> None:
    policy = {"default": {"dtype": "float32"}, "rules": [{"match": {"layers": "0"}, "dtype": "auto"}]}
    model, prompt = kvcompile.compile(windowed(), policy=policy), prompt_of(100)
    result = generated(model, inputs=prompt, max_new_tokens=60, return_dict_in_generate=True)
    assert torch.equal(result.sequences, generated(windowed(), inputs=prompt, max_new_tokens=60))
    assert [type(layer.keys) for layer in result.past_key_values.layers] == [Tensor, PackedTensor]
    assert result.past_key_values.layers[0].num_dropped > 0


def test_a_cache_that_is_kept_from_a_long_request_serves_assisted_decoding_of_a_short_one() -> None:
    model, prompt = kvcompile.compile(all_windowed(), policy=LOSSLESS), prompt_of(20)
    generated(model, inputs=prompt_of(200))
    with collect_reports() as report:
        tokens = generated(model, inputs=prompt, prompt_lookup_num_tokens=2)
    assert torch.equal(tokens, generated(all_windowed(), inputs=prompt))
    assert report.notes == []


@pytest.mark.sampled(4)
@pytest.mark.parametrize("make", [windowed, all_windowed])
@pytest.mark.parametrize("room", [1, 12])
def test_an_empty_cache_that_is_shorter_than_the_window_grows(make: Any, room: int) -> None:
    plain, model = make(), kvcompile.compile(make(), policy=LOSSLESS)
    for num_tokens in (6, 100):
        cache, prompt = kvcompile.static_cache(plain, 1, room, LOSSLESS), prompt_of(num_tokens)
        expected = generated(plain, inputs=prompt, max_new_tokens=40)
        assert torch.equal(generated(model, inputs=prompt, max_new_tokens=40, past_key_values=cache), expected)


@pytest.mark.parametrize("arguments", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
def test_beams_and_samples_have_windows_that_move(arguments: dict[str, Any]) -> None:
    model, prompt = kvcompile.compile(windowed(), policy=LOSSLESS), prompt_of(120)
    expected = generated(windowed(), inputs=prompt, max_new_tokens=30, **arguments)
    assert torch.equal(generated(model, inputs=prompt, max_new_tokens=30, **arguments), expected)


# Caches that callers see


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [windowed, all_windowed])
@pytest.mark.parametrize("own", ["none", "StaticCache", "static_cache"])
def test_a_conversation_goes_on_when_its_window_has_moved(make: Any, own: str) -> None:
    plain, model = make(), kvcompile.compile(make(), policy=EXACT_TOKENS)
    cache = {
        "none": lambda: None,
        "StaticCache": lambda: transformers.StaticCache(config=plain.config, max_cache_len=600),
        "static_cache": lambda: kvcompile.static_cache(plain, 1, 600, EXACT_TOKENS),
    }[own]()
    ids, given = prompt_of(100), {} if cache is None else {"past_key_values": cache}
    for question in (3, 100, 250):
        expected = generated(plain, inputs=ids, max_new_tokens=10)
        result = generated(model, inputs=ids, max_new_tokens=10, return_dict_in_generate=True, **given)
        assert torch.equal(result.sequences, expected)
        given = {"past_key_values": result.past_key_values}
        ids = torch.cat([expected, prompt_of(question)], 1)
    assert is_blockwise(result.past_key_values.layers[0])


@pytest.mark.parametrize(
    ("policy", "room"),
    [
        pytest.param(LOSSLESS, 128, id="packed", marks=pytest.mark.slow),
        pytest.param(EXACT_TOKENS, 192, id="exact tokens"),
    ],
)
def test_calls_of_a_prepared_model_move_the_windows_of_any_static_cache(policy: Any, room: int) -> None:
    """Nothing is refused, although a graph that moves single tokens refuses exact tokens."""
    plain, prompt = windowed(), prompt_of(room + 10)
    model = kvcompile.compile(windowed(), policy=policy, on_unsupported="error")
    cache = transformers.StaticCache(config=plain.config, max_cache_len=300)
    with torch.no_grad():
        expected = plain(prompt, use_cache=False).logits
        logits = [plain(prompt[:, :10], past_key_values=cache).logits]
        parts = prompt[:, 10:].split([room - 20, *[1] * 20], 1)
        logits += [model(part, past_key_values=cache).logits for part in parts]
    assert torch.allclose(torch.cat(logits, 1), expected, atol=1e-4)
    assert cache.layers[0].num_dropped > 0
    assert all(isinstance(layer.keys, PackedTensor) for layer in cache.layers)
    assert counters["stats"]["unique_graphs"] <= 8


def test_a_returned_cache_serves_uncompiled_models_and_other_compiled_code(tmp_path: Any) -> None:
    """No code of kvcompile runs around these calls. A step that drops tokens breaks its graph."""
    plain, prompt = all_windowed(), prompt_of(120)
    given = generated(kvcompile.compile(all_windowed(), policy=LOSSLESS), inputs=prompt, return_dict_in_generate=True)
    kvcompile.save_cache(given.past_key_values, tmp_path / "cache.safetensors")
    rows = generated(plain, inputs=given.sequences, max_new_tokens=20)[:, given.sequences.shape[1] - 1 :]
    expected = plain(torch.cat([given.sequences, rows[:, 1:]], 1)).logits[:, given.sequences.shape[1] - 1 :]
    for step in (plain, torch.compile(plain, backend="eager")):
        cache = kvcompile.load_cache(tmp_path / "cache.safetensors")
        position = int(cache.get_seq_length())
        assert position == given.sequences.shape[1] - 1
        logits = []
        with torch.no_grad():
            for token in rows.T:
                logits.append(step(token[None], past_key_values=cache).logits)
        assert torch.allclose(torch.cat(logits, 1), expected, atol=1e-4)
        assert cache.layers[0].num_dropped > 0


@pytest.mark.parametrize("disable_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_conversation_widens_the_windows_of_such_a_model(
    disable_compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcompile.caches.room.room_for", lambda num_tokens, room=0: num_tokens)
    model, plain = kvcompile.compile(all_windowed(), policy=LOSSLESS), all_windowed()
    ids = torch.randint(3, 97, (1, 3), generator=torch.Generator().manual_seed(1))
    cache: dict[str, Any] = {}
    options = {"max_new_tokens": 5, "return_dict_in_generate": True, "disable_compile": disable_compile}
    rooms = []
    for _ in range(4):
        expected = generated(plain, inputs=ids, max_new_tokens=5)
        result = generated(model, inputs=ids, **options, **cache)
        assert torch.equal(result.sequences, expected)
        cache = {"past_key_values": result.past_key_values}
        ids = torch.cat([expected, torch.tensor([[11]])], 1)
        rooms.append(result.past_key_values.layers[0].keys.shape[2])
    assert rooms == [7, 13, 19, 25]  # every token but the last one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "requests"),
    [
        pytest.param(3, 5, 2, id="once"),
        pytest.param(3, 5, 3, marks=pytest.mark.slow, id="twice"),
        pytest.param(5, 3, 3, marks=pytest.mark.slow, id="by a little"),
        pytest.param(3, 12, 3, marks=pytest.mark.slow, id="past the window at once"),
    ],
)
def test_windows_that_were_cut_to_a_short_cache_grow_with_the_conversation(
    prompt_tokens: int, new_tokens: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window of the model is 16 tokens. A shorter first request makes a cache with a window as short as itself."""
    monkeypatch.setattr("kvcompile.caches.room.room_for", lambda num_tokens, room=0: num_tokens)
    model, plain = kvcompile.compile(windowed(), policy=LOSSLESS), windowed()
    ids = torch.randint(3, 97, (1, prompt_tokens), generator=torch.Generator().manual_seed(1))
    cache: dict[str, Any] = {}
    windows = []
    for _ in range(requests):
        expected = generated(plain, inputs=ids, max_new_tokens=new_tokens)
        result = generated(model, inputs=ids, max_new_tokens=new_tokens, return_dict_in_generate=True, **cache)
        assert torch.equal(result.sequences, expected)
        cache = {"past_key_values": result.past_key_values}
        windows.append(result.past_key_values.layers[0].keys.shape[2])
        ids = torch.cat([expected, torch.tensor([[11]])], 1)
    assert windows[0] < windows[-1] < ids.shape[1]
    assert all(isinstance(layer.keys, PackedTensor) for layer in result.past_key_values.layers)


def test_a_cut_window_that_has_dropped_tokens_is_named() -> None:
    model = kvcompile.compile(windowed(), policy=LOSSLESS)
    cache = kvcompile.static_cache(model, 1, 9, LOSSLESS)
    ids = torch.randint(3, 97, (1, 20), generator=torch.Generator().manual_seed(1))
    windowed()(ids[:, :8], past_key_values=cache)
    cache.layers[0].update(torch.zeros(1, 2, 2, 64), torch.zeros(1, 2, 2, 64))
    with pytest.raises(KVCompileError, match=r"room for 9 tokens.*a window that was cut to this room cannot be ext"):
        generated(model, inputs=ids, past_key_values=cache, max_new_tokens=3)
