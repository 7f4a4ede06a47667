"""The cache layers of Transformers work with packed keys and values."""

from __future__ import annotations

import copy

import pytest
import torch
from formats_of_every_kind import BY_TOKEN_AT_16
from packed_caches import HEAD_DIM, assert_same, quantized, values

from kvcompile.call.adoption import adopt
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor

cache_utils = pytest.importorskip("transformers.cache_utils")


pytestmark = pytest.mark.usefixtures("seed_without_grad")


class Twins:
    """Two layers with the same tokens: one is packed after its first update, one is plain with quantized values."""

    def __init__(self, make_layer, name: str, tokens: int) -> None:
        self.key, self.value = (PackedLayout(name, role, HEAD_DIM) for role in ("key", "value"))
        self.packed, self.plain = make_layer(), make_layer()
        self._update(tokens)
        growing = not isinstance(self.packed, cache_utils.StaticLayer)
        self.packed.keys = PackedTensor.from_dense(self.packed.keys, self.key, growing=growing)
        self.packed.values = PackedTensor.from_dense(self.packed.values, self.value, growing=growing)
        self.check()

    def _update(self, tokens):
        batch = 2 if not self.plain.is_initialized else self.plain.keys.shape[0]
        keys, vals = values(batch, 3, tokens, HEAD_DIM), values(batch, 3, tokens, HEAD_DIM)
        return self.packed.update(keys, vals), self.plain.update(quantized(keys, self.key), quantized(vals, self.value))

    def update(self, *tokens: int) -> None:
        for count in tokens:
            for attended, expected in zip(*self._update(count), strict=True):
                if isinstance(attended, PackedTensor):
                    assert_same(attended, expected)
            self.check()

    def both(self, method: str, *args) -> None:
        for layer in (self.packed, self.plain):
            getattr(layer, method)(*args)
        self.check()

    def check(self) -> None:
        if self.plain.keys is None:  # since Transformers 5.18, reset() of a growing layer drops its tensors
            assert self.packed.keys is None
            assert self.packed.values is None
            return
        assert_same(self.packed.keys, self.plain.keys)
        assert_same(self.packed.values, self.plain.values)


every_format = pytest.mark.parametrize("name", BY_TOKEN_AT_16)


@every_format
def test_a_packed_dynamic_layer_equals_a_plain_one(name):
    twins = Twins(cache_utils.DynamicLayer, name, tokens=60)
    twins.update(1, 2, 1, 64)
    twins.both("crop", -5)
    twins.update(3)
    twins.both("batch_repeat_interleave", 2)
    twins.update(1)
    twins.both("reorder_cache", torch.tensor([3, 1, 1, 0]))
    twins.both("batch_select_indices", torch.tensor([0, 2]))
    twins.update(2)
    snapshot, expected = copy.deepcopy(twins.packed), copy.deepcopy(twins.plain)
    twins.both("reset")
    assert_same(snapshot.keys, expected.keys)


@every_format
def test_a_packed_dynamic_sliding_window_layer_equals_a_plain_one(name):
    twins = Twins(lambda: cache_utils.DynamicSlidingWindowLayer(20), name, tokens=5)
    twins.update(*[1] * 20, 60, 1)
    for layer in (twins.packed, twins.plain):
        layer.activate_past_recording()
    twins.update(4)
    twins.both("crop", -2)
    twins.both("reset")


@every_format
def test_a_packed_static_layer_equals_a_plain_one(name):
    twins = Twins(lambda: cache_utils.StaticLayer(70), name, tokens=5)
    twins.update(58, 1, 1, 3)
    twins.both("reorder_cache", torch.tensor([1, 1]))
    twins.both("reset")
    twins.update(3)


@every_format
def test_a_packed_static_sliding_window_layer_equals_a_plain_one(name):
    twins = Twins(lambda: cache_utils.StaticSlidingWindowLayer(70, sliding_window=20), name, tokens=5)
    twins.update(14, 1, 1, 1, 7, 1, 30, 1)
    twins.both("reset")
    twins.update(3)


def test_a_static_cache_of_a_model_is_adopted_and_measured():
    cache = cache_utils.StaticCache(config=_config(), max_cache_len=128)
    for index in range(2):
        cache.update(values(2, 3, 5, HEAD_DIM), values(2, 3, 5, HEAD_DIM), index)
    before = cache_nbytes(cache)
    for layer in cache.layers:
        adopt(layer.keys, PackedLayout("int8_per_token_head", "key", HEAD_DIM))
        adopt(layer.values, PackedLayout("int8_per_token_head", "value", HEAD_DIM))
    plain_bytes, packed_bytes = 4 * 2 * 3 * 128 * HEAD_DIM * 4, 4 * 2 * 3 * 128 * (HEAD_DIM + 4)
    assert before - cache_nbytes(cache) == plain_bytes - packed_bytes
    cache.update(values(2, 3, 1, HEAD_DIM), values(2, 3, 1, HEAD_DIM), 1)
    cache.reset()
    assert cache.layers[0].keys.abs().max() == 0


def _config():
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3, hidden_size=3 * HEAD_DIM)
