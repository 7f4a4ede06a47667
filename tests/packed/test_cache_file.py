"""Saved caches load packed, equal and ready to be extended. A file that does not fit raises an error."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_caches import HEAD_DIM, pair, quantized, values
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import kvcompile
from kvcompile.caches.disk import MAX_HEADER
from kvcompile.errors import CacheFileError, OptionsError
from kvcompile.files import digests
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

transformers = pytest.importorskip("transformers")
from tiny_llama import fresh_cache, tiny_llama  # noqa: E402
from transformers import Cache, cache_utils  # noqa: E402

NAMES = ["int8_per_token_head", "int4_per_token_head", "turboquant_3bit"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return tmp_path / "prompt.safetensors"


def saved_and_loaded(cache: Any, file: Path, **metadata: str) -> Any:
    kvcompile.save_cache(cache, file, metadata)
    return kvcompile.load_cache(file, metadata=metadata)


def assert_equal(loaded: Tensor, cache: Tensor) -> None:
    assert type(loaded) is type(cache)
    if isinstance(cache, PackedTensor):
        assert loaded.cache_meta == cache.cache_meta
        assert loaded.packed.data_ptr() != cache.packed.data_ptr()
        assert torch.equal(loaded.packed, cache.packed)
    assert loaded.shape == cache.shape
    assert torch.equal(loaded + 0, cache + 0)


def test_plain_tensors_of_a_file_own_their_memory(file: Path) -> None:
    """A compiled call may swap them for packed caches, which is not possible for memory of the file."""
    plain = torch.randn(2, 3, 70, HEAD_DIM)
    loaded = saved_and_loaded(plain, file)
    assert loaded.untyped_storage().resizable()
    assert torch.equal(loaded, plain)


@pytest.mark.parametrize("axes", ["bdt", "bhdt", "btm"])
def test_packed_tensors_in_other_orders_come_back_in_them(axes: str, file: Path) -> None:
    sizes = {"b": 2, "h": 3, "t": 70, "d": HEAD_DIM, "m": 3 * HEAD_DIM}
    plain = torch.randn([sizes[axis] for axis in axes])
    cache = PackedTensor.from_dense(plain, PackedLayout(NAMES[0], "key", HEAD_DIM), axes)
    assert_equal(saved_and_loaded(cache, file), cache)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_tensors_come_back_packed(name: str, growing: bool, dtype: torch.dtype, file: Path) -> None:
    cache, _ = pair(PackedLayout(name, "key", HEAD_DIM), growing=growing, dtype=dtype)
    assert_equal(saved_and_loaded(cache, file), cache)
    slack = file.stat().st_size - cache.packed.nbytes
    assert 0 < slack < 2000, "the file holds the packed bytes, and a header"


@pytest.mark.parametrize(
    "view",
    [lambda c: c[:, :, 5:40], lambda c: c[1:], lambda c: c[:, 1], lambda c: c.transpose(1, 2)],
)
def test_views_are_saved_alone(view: Any, file: Path) -> None:
    cache, _ = pair(PackedLayout("int4_per_token_head", "value", HEAD_DIM))
    assert_equal(saved_and_loaded(view(cache), file), view(cache))


@pytest.mark.parametrize("growing", [False, True])
def test_tensors_keep_the_order_of_their_dimensions_in_memory(growing: bool, file: Path) -> None:
    plain = torch.randn(2, 70, 3, HEAD_DIM).transpose(1, 2)
    packed = PackedTensor.from_dense(plain, PackedLayout(NAMES[0], "key", HEAD_DIM), growing=growing)
    for cache in (packed.with_stride(plain.stride()), plain, plain[:, :2, 5:40]):
        loaded = saved_and_loaded(cache, file)
        assert_equal(loaded, cache)
        assert loaded.stride() == cache.clone().stride()
        assert content_of(file)["memory_order"] == [0, 2, 1, 3]
    assert_equal(saved_and_loaded(packed, file), packed)
    assert "memory_order" not in content_of(file), "earlier files describe contiguous tensors alike"


def test_caches_with_a_residual_come_back(file: Path) -> None:
    formats = kvcompile.Policy.load({"default": {"dtype": "int4"}, "sink_tokens": 64}).formats_for("", 0, 1)
    assert formats is not None
    layout = formats.layout("key", HEAD_DIM, torch.float32)
    cache = PackedTensor.from_dense(values(2, 3, 200, HEAD_DIM), layout)
    assert_equal(saved_and_loaded(cache, file), cache)


def test_a_tree_keeps_its_form_and_the_identity_of_its_tensors(file: Path) -> None:
    packed, _ = pair(PackedLayout("fp8_e4m3", "key", HEAD_DIM))
    plain, transposed = torch.randn(3, 4), torch.randn(3, 4).to(torch.bfloat16).t()
    tree = {"layers": [(packed, plain), (packed, transposed)], 3: plain, "length": 7, "name": None, "open": True}
    loaded = saved_and_loaded(tree, file)
    assert list(loaded) == list(tree)
    assert [loaded[name] for name in ("length", "name", "open")] == [7, None, True]
    ((first, second), (same, third)), again = loaded["layers"], loaded[3]
    assert same is first
    assert again is second
    for one, other in ((first, packed), (second, plain), (third, transposed)):
        assert_equal(one, other)


@torch.no_grad()
def filled(kind: str) -> tuple[Any, Any]:
    """A model and a cache of a prompt of 20 tokens: plain, partly or all packed, or plain with full windows."""
    model = tiny_llama(num_layers=2)
    ids = torch.randint(0, 97, (2, 20))
    cache = kvcompile.static_cache(model, 2, 64, "int4") if kind == "packed" else fresh_cache(model, kind)
    if kind == "sliding":
        cache = Cache(layers=[cache_utils.DynamicSlidingWindowLayer(16) for _ in range(2)])
    model(ids, past_key_values=cache)
    if kind == "dynamic":
        for layer in cache.layers:
            layout = PackedLayout("int8_per_token_head", "key", 64)
            layer.keys = PackedTensor.from_dense(layer.keys, layout, growing=True)
    return model, cache


@pytest.mark.parametrize("kind", ["static", "dynamic", "packed", "sliding"])
@torch.no_grad()
def test_a_cache_of_transformers_is_continued_where_it_was_saved(kind: str, file: Path) -> None:
    model, cache = filled(kind)
    loaded = saved_and_loaded(cache, file, model="tiny")
    assert type(loaded) is type(cache)
    assert int(loaded.get_seq_length()) == 20
    for ids in torch.randint(0, 97, (2, 5)).split([3, 1, 1], dim=1):
        expected, logits = (model(ids, past_key_values=each).logits for each in (cache, loaded))
        assert torch.equal(logits, expected)
    assert int(loaded.get_seq_length()) == int(cache.get_seq_length()) == 25
    for one, other in zip(loaded.layers, cache.layers, strict=True):
        assert set(vars(one)) == set(vars(other))
        assert_equal(one.keys, other.keys)
        assert_equal(one.values, other.values)


def test_both_parts_of_an_encoder_decoder_cache_come_back(file: Path) -> None:
    cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    for part, tokens in ((cache.self_attention_cache, 3), (cache.cross_attention_cache, 9)):
        part.update(values(2, 3, tokens, HEAD_DIM), values(2, 3, tokens, HEAD_DIM), 0)
    cache.is_updated[0] = True
    loaded = saved_and_loaded(cache, file)
    assert loaded.is_updated == {0: True}
    assert_equal(loaded.cross_attention_cache.layers[0].values, cache.cross_attention_cache.layers[0].values)
    assert loaded.self_attention_cache.layers[0].update(*[values(2, 3, 1, HEAD_DIM)] * 2)[0].shape[2] == 4
    loaded.self_attention_cache.update(*[values(2, 3, 1, HEAD_DIM)] * 2, 1)  # adds a new layer


def test_layers_that_share_the_keys_of_others_come_back_empty(file: Path) -> None:
    config = transformers.Gemma3nTextConfig(num_hidden_layers=4, num_kv_shared_layers=2)
    cache = transformers.DynamicCache(config=config)
    for index in range(2):
        cache.update(values(2, 3, 5, HEAD_DIM), values(2, 3, 5, HEAD_DIM), index)
    loaded = saved_and_loaded(cache, file)
    assert list(map(type, loaded.layers)) == list(map(type, cache.layers))
    for one, other in zip(loaded.layers[:2], cache.layers[:2], strict=True):
        assert_equal(one.keys, other.keys)
    assert all(layer.keys is None for layer in loaded.layers[2:])


def rewrite_header(file: Path, **changes: str) -> None:
    with safe_open(file, "pt") as opened:
        header = {**opened.metadata(), **changes}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    save_file(tensors, file, {**header, "digest": digests.of_header(header)})


def content_of(file: Path) -> Any:
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["content"])


WRONG_HEADERS = {
    "another version": ({"version": "1"}, "has version 1 of the format, and this kvcompile reads 5"),
    "another kind of file": ({"format": "pt"}, "is not a cache"),
    "another Transformers": ({"transformers": "4.40.1"}, r"a cache of Transformers 4\.40\.1"),
    "another model": ({"author": "other"}, "author is 'other' in the file, and 'tiny' was expected"),
    "an unknown class": ({"content": '{"object": "os", "state": []}'}, "no cache class 'os'"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_HEADERS.values(), ids=WRONG_HEADERS.keys())
def test_a_file_that_does_not_fit_is_an_error(changes: dict[str, str], message: str, file: Path) -> None:
    cache = transformers.DynamicCache()
    cache.update(values(1, 2, 3, HEAD_DIM), values(1, 2, 3, HEAD_DIM), 0)
    kvcompile.save_cache(cache, file, {"author": "tiny"})
    rewrite_header(file, **changes)
    with pytest.raises(CacheFileError, match=message):
        kvcompile.load_cache(file, metadata={"author": "tiny"})


@pytest.mark.parametrize("cache", [transformers.DynamicCache(), [], [1, 2]], ids=["cache", "list", "numbers"])
def test_a_cache_without_tensors_is_not_saved(cache: Any, file: Path) -> None:
    with pytest.raises(CacheFileError, match="holds no tensors; save it after the model has read a prompt"):
        kvcompile.save_cache(cache, file)
    assert not file.exists()


def test_half_a_file_and_another_kind_of_file_are_errors_with_a_remedy(file: Path) -> None:
    kvcompile.save_cache(values(1, 2, 3, HEAD_DIM), file)
    for content in (file.read_bytes()[:-100], b"a text", b""):
        file.write_bytes(content)
        with pytest.raises(
            CacheFileError, match=r"is damaged or is not a safetensors file \(.*\); save the cache again$"
        ):
            kvcompile.load_cache(file)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (["int9", "key", HEAD_DIM], "unknown cache format 'int9'"),
        (["int8_per_token_head", "key", 32], "int8_per_token_head with 2304 bytes"),
    ],
)
def test_bytes_that_do_not_fit_their_layout_are_an_error(layout: list[Any], message: str, file: Path) -> None:
    kvcompile.save_cache(pair(PackedLayout("int8_per_token_head", "key", HEAD_DIM))[0], file)
    rewrite_header(file, content=json.dumps({**content_of(file), "layout": layout}))
    with pytest.raises(CacheFileError, match=message):
        kvcompile.load_cache(file)


def test_a_damaged_file_is_an_error(file: Path) -> None:
    kvcompile.save_cache(torch.randn(100), file)
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(CacheFileError, match=r"prompt\.safetensors"):
        kvcompile.load_cache(file)


def test_an_object_that_cannot_be_saved_is_named_and_the_file_is_unchanged(file: Path) -> None:
    kvcompile.save_cache(torch.ones(2), file)
    with pytest.raises(CacheFileError, match=r"layers\.1\.parts is a builtins\.set"):
        kvcompile.save_cache({"layers": [torch.ones(1), {"parts": {1}}]}, file)
    with pytest.raises(CacheFileError, match="keys is a Parameter"):
        kvcompile.save_cache({"keys": torch.nn.Parameter(torch.ones(1))}, file)
    itself: list[Any] = [torch.ones(1)]
    itself.append(itself)
    with pytest.raises(CacheFileError, match="the cache contains itself"):
        kvcompile.save_cache(itself, file)
    with pytest.raises(CacheFileError, match="'position' is 3; give a string"):
        kvcompile.save_cache(torch.ones(1), file, {"position": 3})  # type: ignore[dict-item]
    assert kvcompile.load_cache(file).tolist() == [1, 1]
    assert list(file.parent.iterdir()) == [file]


def test_a_loaded_cache_has_the_saved_values_and_can_be_written(file: Path) -> None:
    x, layout = values(2, 3, 70, HEAD_DIM), PackedLayout("int8_per_token_head", "key", HEAD_DIM)
    loaded = saved_and_loaded(PackedTensor.from_dense(x, layout), file)
    assert torch.equal(loaded.dequantize(), quantized(x, layout))
    loaded[:, :, 69:] = x[:, :, :1]
    assert torch.equal(loaded[:, :, 69:].dequantize(), quantized(x, layout)[:, :, :1])


def test_a_flipped_bit_is_noticed_wherever_it_lies(file: Path) -> None:
    caches = [pair(PackedLayout("int8_per_token_head", role, HEAD_DIM))[0] for role in ("key", "value")]
    kvcompile.save_cache({"keys": caches[0], "values": caches[1], "length": 7}, file)
    whole = file.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    for end, begin in [(header_end, 0)] * 400 + [(len(whole), header_end)] * 100:
        damaged = bytearray(whole)
        damaged[chance.randrange(begin, end)] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(CacheFileError, match=r"prompt\.safetensors"):
            kvcompile.load_cache(file)


def test_a_huge_header_is_not_read(file: Path) -> None:
    save_file({"keys": torch.zeros(3)}, file, {"content": "[]" * (MAX_HEADER // 2)})
    with pytest.raises(CacheFileError, match=rf"at most {MAX_HEADER} are read"):
        kvcompile.load_cache(file)


def test_a_path_of_any_length_gives_a_short_message() -> None:
    with pytest.raises(OSError, match="too long") as raised:
        kvcompile.load_cache("x" * 10_000)
    assert len(str(raised.value)) < 300


def test_exchanged_tensors_are_noticed(file: Path) -> None:
    kvcompile.save_cache({"keys": torch.zeros(3), "values": torch.ones(3)}, file)
    with safe_open(file, "pt") as opened:
        header, (keys, values) = opened.metadata(), (opened.get_tensor(name) for name in ("keys", "values"))
    save_file({"keys": values, "values": keys}, file, header)
    with pytest.raises(CacheFileError, match="keys has another digest"):
        kvcompile.load_cache(file)
    assert kvcompile.load_cache(file, verify=False)["keys"].tolist() == [1, 1, 1]


WRONG_DESCRIPTIONS = {
    "an unknown dtype": {"dtype": "load"},
    "too many tokens": {"shape": [2, 3, 2000, HEAD_DIM]},
    "another batch": {"shape": [1, 3, 130, HEAD_DIM]},
    "an axis twice": {"axes": "bhhd"},
    "an unknown axis": {"axes": "bhxd"},
    "a start beyond the block": {"start": 64},
    "a start before the block": {"start": -1},
    "too few sizes": {"shape": [2, 3]},
    "no layout": {"layout": None},
    "an order in memory with a dimension twice": {"memory_order": [0, 1, 1, 3]},
    "an order in memory of too few dimensions": {"memory_order": [0, 1, 2]},
    "no order in memory": {"memory_order": None},
}


@pytest.mark.parametrize("changes", WRONG_DESCRIPTIONS.values(), ids=WRONG_DESCRIPTIONS.keys())
def test_a_description_that_contradicts_the_tensors_is_an_error(changes: dict[str, Any], file: Path) -> None:
    layout = PackedLayout("int8_per_token_head", "key", HEAD_DIM)
    kvcompile.save_cache(PackedTensor.from_dense(values(2, 3, 130, HEAD_DIM), layout), file)
    rewrite_header(file, content=json.dumps({**content_of(file), **changes}))
    with pytest.raises(CacheFileError, match=r"prompt\.safetensors"):
        kvcompile.load_cache(file)


def test_ranges_of_channels_that_are_not_the_last_stacked_dimension_are_an_error(file: Path) -> None:
    cache = PackedTensor.from_dense(values(2, 3, 130, HEAD_DIM), PackedLayout("int8_per_token_head", "key", HEAD_DIM))
    kvcompile.save_cache(PackedStack.of_parts([cache, cache.clone()], (2,), (0,)), file)
    rewrite_header(file, content=json.dumps({**content_of(file), "ranges": True}))
    with pytest.raises(CacheFileError, match=r"prompt\.safetensors.*not ranges of channels"):
        kvcompile.load_cache(file)


@pytest.mark.parametrize("content", ["null", "NaN", '{"list": [{"tensor": "0"}]}'])
def test_a_description_that_leaves_out_tensors_is_an_error(content: str, file: Path) -> None:
    kvcompile.save_cache([torch.ones(2), torch.zeros(2)], file)
    rewrite_header(file, content=content)
    with pytest.raises(
        CacheFileError, match=r"described as a part of the file, but the file has the further tensor [01]"
    ):
        kvcompile.load_cache(file)


def test_a_cache_belongs_to_the_model_that_computed_it(file: Path) -> None:
    model = tiny_llama(num_layers=2)
    kvcompile.save_cache(torch.ones(2), file, model=model)
    kvcompile.load_cache(file, model=torch.compile(model))
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    with pytest.raises(CacheFileError, match="another model computed it"):
        kvcompile.load_cache(file, model=model)
    kvcompile.save_cache(torch.ones(2), file)
    with pytest.raises(CacheFileError, match="saved without a model"):
        kvcompile.load_cache(file, model=model)


def test_arguments_that_are_no_model_and_no_device_are_named(file: Path) -> None:
    kvcompile.save_cache([torch.zeros(2)], file)
    with pytest.raises(OptionsError, match=r"save_cache: model is 5; pass the torch\.nn\.Module"):
        kvcompile.save_cache([torch.zeros(2)], file, model=5)  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match=r"load_cache: model is 5; pass the torch\.nn\.Module"):
        kvcompile.load_cache(file, model=5)  # type: ignore[arg-type]
    for device in ("foo", 3.5):
        with pytest.raises(OptionsError, match=f"load_cache: device is '?{device}'?; pass a device such as 'cpu'"):
            kvcompile.load_cache(file, device=device)


def test_a_device_that_cannot_be_used_is_named_and_the_file_is_not_blamed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_driver(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"Found no NVIDIA driver on your system. {'Please check that you have a GPU. ' * 20}")

    kvcompile.save_cache([torch.zeros(2)], file)
    device = f"cuda:{torch.cuda.device_count()}"
    message = rf"^load_cache: device '{device}' cannot be used here \(.*\); the file was not read, so give .*'cpu'$"
    with pytest.raises(OptionsError, match=message):
        kvcompile.load_cache(file, device=device)
    monkeypatch.setattr(torch, "empty", without_driver)
    with pytest.raises(OptionsError, match=message) as raised:
        kvcompile.load_cache(file, device=device)
    assert "Found no NVIDIA driver" in str(raised.value)


def test_a_device_without_room_does_not_blame_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    kvcompile.save_cache([torch.zeros(2)], file)
    monkeypatch.setattr("kvcompile.caches.file.Reader.make", no_room)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        kvcompile.load_cache(file)


def test_only_regular_files_are_replaced_and_read(file: Path) -> None:
    target, pipe = file.with_name("target"), file.with_name("pipe")
    file.symlink_to(target)
    os.mkfifo(pipe)
    for path in (file, pipe, file.parent):
        with pytest.raises(CacheFileError, match="is not replaced"):
            kvcompile.save_cache(torch.ones(2), path)
    with pytest.raises(CacheFileError, match="not a regular file"):
        kvcompile.load_cache(pipe)
    assert file.is_symlink()


def test_a_folder_without_an_index_is_a_mistake_or_an_interrupted_save(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CacheFileError, match=r"is a folder without a cache; give load_cache the file that save_cache"):
        kvcompile.load_cache(tmp_path)
    (tmp_path / "0a1b-rank-0-of-2.safetensors").touch()
    with pytest.raises(CacheFileError, match=r"has no index\.json: save_cache of several ranks was not completed"):
        kvcompile.load_cache(tmp_path)


def test_a_path_without_a_file_is_named(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match=file.name):
        kvcompile.load_cache(file)
    for path in ("", "a\0b"):
        with pytest.raises(CacheFileError, match=r"^load_cache: '.*' is not a path; give it the file that save_cache"):
            kvcompile.load_cache(path)


def test_a_path_that_cannot_be_written_is_named_as_the_user_wrote_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied", str(file.with_name("tmp1234")), None, str(file))

    for name in ("mkdir", "replace"):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            with pytest.raises(PermissionError) as raised:
                kvcompile.save_cache(torch.ones(2), file)
        assert str(raised.value) == f"[Errno 13] Permission denied: '{file}'"


def test_a_file_has_the_permissions_of_the_umask(file: Path) -> None:
    before = os.umask(0o027)
    try:
        kvcompile.save_cache(torch.ones(2), file)
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640


def test_metadata_of_the_file_itself_are_refused(file: Path) -> None:
    with pytest.raises(CacheFileError, match="'digest' itself; choose another name"):
        kvcompile.save_cache(torch.ones(2), file, {"digest": "0"})


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match=r"save_cache: .*nowhere is not a folder"):
        kvcompile.save_cache(torch.zeros(2), tmp_path / "nowhere" / "cache.safetensors")
    with pytest.raises(CacheFileError, match="is not a path; give one without a null character"):
        kvcompile.save_cache(torch.zeros(2), "a\0b")
