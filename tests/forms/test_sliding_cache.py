"""A sliding window over a cache that grows by concatenation is packed, and its tokens are quantized once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

from kvcompile import cache_nbytes, last_report
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout
from kvcompile.kernels.spec.packing import byte_index, move_tokens, pack_tokens, read_tokens
from kvcompile.packed.tensor import PackedTensor
from kvcompile.packed.writes import coordinates_of, read
from kvcompile.passes.rewrite import insert as insert_ops
from kvcompile.policy.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 4, 2, 64

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


@dataclass
class Window:
    """A layer's keys or values, [batch, heads, tokens, head_dim] or [batch, tokens, heads, head_dim]."""

    tokens: Tensor


Update = Callable[[Window, Tensor, int], Tensor]
"""Adds vectors [batch, heads, n, head_dim] to a window of some tokens; returns the vectors that attention reads."""


def read_all_keep_the_last(window: Window, x: Tensor, size: int) -> Tensor:
    whole = torch.cat([window.tokens, x], 2)
    window.tokens = whole[:, :, -size + 1 :, :]
    return whole


def keep_a_copy_of_the_last(window: Window, x: Tensor, size: int) -> Tensor:
    whole = torch.cat([window.tokens, x.transpose(1, 2)], 1)
    window.tokens = whole[:, -size + 1 :].contiguous()
    return whole.transpose(1, 2)


def read_the_last(window: Window, x: Tensor, size: int) -> Tensor:
    window.tokens = torch.cat([window.tokens, x], 2)[:, :, -size:]
    return window.tokens


def make_room_first(window: Window, x: Tensor, size: int) -> Tensor:
    window.tokens = torch.cat([window.tokens[:, :, x.shape[2] - size :], x], 2)
    return window.tokens


def cut_once_it_is_full(window: Window, x: Tensor, size: int) -> Tensor:
    whole = window.tokens = torch.cat([window.tokens, x], 2)
    if whole.shape[2] > size:
        window.tokens = whole.narrow(2, whole.shape[2] - size, size)
    return whole


class Layer:
    """Attention over a window, for compiled code and for its reference, eager code on packed caches."""

    def __init__(self, update: Update, size: int, policy: str, **options: Any) -> None:
        self.update, self.size = update, size
        self.compiled = torch.compile(
            self.step, backend="kvquant", options={"policy": reading_packed(policy), **options}
        )
        axes = "bthd" if update is keep_a_copy_of_the_last else "bhtd"
        formats = Policy.load(policy).formats_for("", 0, 1)
        assert formats is not None
        self.layouts = [formats.layout(role, HEAD_DIM, torch.float32) for role in ("key", "value")]
        empty = torch.empty(BATCH, NUM_KV_HEADS, 0, HEAD_DIM).transpose(axes.index("t"), 2)
        self.windows = [Window(empty.clone()) for _ in self.layouts]
        self.expected = [
            Window(PackedTensor.zeros(empty.shape, torch.float32, layout, axes, growing=True))
            for layout in self.layouts
        ]

    def step(self, q: Tensor, k: Tensor, v: Tensor, keys: Window, values: Window) -> Tensor:
        k, v = k * 2, v * 2  # stands for projections
        read = (self.update(window, x, self.size) for window, x in ((keys, k), (values, v)))
        return F.scaled_dot_product_attention(q, *read, enable_gqa=True)

    def run(self, tokens: int, *, eager: bool = False) -> None:
        """Run one step on new tokens, and compare it with eager code on packed caches."""
        q = torch.randn(BATCH, NUM_HEADS, tokens, HEAD_DIM)
        k, v = torch.randn(2, BATCH, NUM_KV_HEADS, tokens, HEAD_DIM).unbind()
        out = (self.step if eager else self.compiled)(q, k, v, *self.windows)
        expected = self.step(q, k, v, *self.expected)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for window, other in zip(self.windows, self.expected, strict=True):
            assert isinstance(window.tokens, PackedTensor)
            assert window.tokens.shape == other.tokens.shape
            assert torch.equal(bytes_of(window.tokens), bytes_of(other.tokens))


def bytes_of(cache: Tensor) -> Tensor:
    """The bytes that a packed cache stores for its tokens, [batch, heads, tokens, bytes]."""
    assert isinstance(cache, PackedTensor)
    return read(cache, coordinates_of(cache))


def storage_of(cache: Tensor) -> int:
    assert isinstance(cache, PackedTensor)
    return cache.packed.untyped_storage().data_ptr()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("update", "size", "policy", "steps"),
    [
        (read_all_keep_the_last, 70, "int8_per_token_head", (11, 70, 3, 200)),
        (keep_a_copy_of_the_last, 128, "turboquant_4bit_nc", (150, 1)),
        (read_the_last, 64, "turboquant_3bit_nc", (40, 40)),
        (make_room_first, 64, "fp8_e4m3", (40, 60)),
        (cut_once_it_is_full, 64, "turboquant_k8v4", (63, 1, 1)),
        # Each further length takes a graph.
        pytest.param(read_all_keep_the_last, 70, "fp8_e4m3", (11, 1, 70, 1, 3), marks=pytest.mark.slow),
        pytest.param(read_the_last, 64, "turboquant_3bit_nc", (40, 40, 1), marks=pytest.mark.slow),
        pytest.param(make_room_first, 64, "fp8_e4m3", (40, 1, 60), marks=pytest.mark.slow),
    ],
)
def test_every_form_of_window_keeps_the_bytes_of_its_tokens(
    update: Update, size: int, policy: str, steps: Sequence[int]
) -> None:
    layer = Layer(update, size, policy, on_unsupported="error")
    for tokens in steps:
        layer.run(tokens)


def test_the_graph_for_a_gpu_gives_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_ops, "_uses_kernels", lambda data: True)  # operators run their specification on a CPU
    layer = Layer(read_all_keep_the_last, 70, "int4_per_token_head", on_unsupported="error")
    for tokens in (80, 1):
        layer.run(tokens)


def test_compiled_and_eager_steps_take_turns() -> None:
    layer = Layer(read_all_keep_the_last, 70, "int8_per_token_head", on_unsupported="error")
    for tokens, eager in ((80, False), (1, True), (1, False)):
        layer.run(tokens, eager=eager)


def test_a_cache_that_the_caller_still_holds_keeps_its_tokens_and_can_be_continued() -> None:
    layer = Layer(read_all_keep_the_last, 70, "int8_per_token_head", on_unsupported="error")
    layer.run(80)
    held, expected = ([window.tokens for window in windows] for windows in (layer.windows, layer.expected))
    before = [bytes_of(cache).clone() for cache in held]
    for _ in range(2):
        layer.run(1)
        assert all(torch.equal(bytes_of(cache), kept) for cache, kept in zip(held, before, strict=True))
        layer.windows, layer.expected = ([Window(cache) for cache in caches] for caches in (held, expected))


def test_a_window_has_room_for_one_block_more_and_nothing_of_that_room_ever_shows() -> None:
    layer = Layer(read_all_keep_the_last, 100, "fp8_e4m3", on_unsupported="error")
    for tokens in (300, 1, 1):
        layer.run(tokens)
        for window in layer.windows:
            cache = window.tokens
            assert isinstance(cache, PackedTensor)
            assert cache_nbytes(cache) == 3 * BLOCK_TOKENS * BATCH * NUM_KV_HEADS * (HEAD_DIM + 4)
            longer = cache.extended(BLOCK_TOKENS)
            assert storage_of(longer) == storage_of(cache)
            kept = bytes_of(cache)
            longer.packed.fill_(0xFF)  # NaN as a code and as a scale
            cache.packed[byte_index(cache.packed_layout, *coordinates_of(cache))] = kept
            window.tokens = longer[:, :, : cache.num_tokens]


def test_a_format_whose_tokens_share_scales_is_refused_from_the_first_call_on() -> None:
    layer = Layer(read_all_keep_the_last, 16, "int4", on_unsupported="ignore")
    plain = [Window(window.tokens) for window in layer.windows]
    for tokens in (11, 9):
        x = [torch.randn(BATCH, heads, tokens, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        torch.testing.assert_close(layer.compiled(*x, *layer.windows), layer.step(*x, *plain))
        (site,) = last_report().sites
        assert site.reason_code == "unsupported_format"
        assert "moves tokens" in str(site.reason)
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(layer.windows, plain, strict=True))


def window_and_whole(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    whole = torch.cat([keys, k], 2)
    return whole, whole, whole[:, :, -16:]


def window_of_heads(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    whole = torch.cat([keys, k], 2)
    return whole, whole[:, 1:]


def window_that_is_summed_up(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    whole = torch.cat([keys, k], 2)
    window = whole[:, :, -16:]
    return whole, window, window.sum()


def every_other_token(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    whole = torch.cat([keys, k], 2)
    return whole, whole[:, :, ::2]


def old_tokens_are_read_too(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    window = torch.cat([keys, k], 2)[:, :, -16:]
    return window, window, keys.mean(2)


def cut_twice(keys: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    window = torch.cat([keys[:, :, 2:], k], 2)[:, :, -16:]
    return window, window


UNSAFE = {
    window_and_whole: "used_elsewhere",
    window_of_heads: "computed_from_cache",
    window_that_is_summed_up: "escaping_view",
    every_other_token: "computed_from_cache",
    old_tokens_are_read_too: "used_elsewhere",
    cut_twice: "computed_from_cache",
}


@pytest.mark.parametrize("update", UNSAFE, ids=lambda update: update.__name__)
def test_other_uses_of_a_window_are_refused(update: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
        whole, *kept = update(keys, k)
        values = torch.cat([values, v], 2)[:, :, -whole.shape[2] :]
        return F.scaled_dot_product_attention(q, whole, values, enable_gqa=True), kept, values

    q, k, v = (torch.randn(BATCH, heads, 1, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    keys, values = torch.randn(2, BATCH, NUM_KV_HEADS, 20, HEAD_DIM).unbind()
    args = [q, k, v, keys.clone(), values.clone()]
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})
    torch.testing.assert_close(compiled(*args), step(*args), rtol=1e-5, atol=1e-6)
    assert [site.reason_code for site in last_report().sites] == [UNSAFE[update]]


def test_a_part_of_a_packed_cache_is_not_taken_for_a_separate_cache() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        keys.index_copy_(2, torch.tensor([5]), k)
        values.index_copy_(2, torch.tensor([5]), v)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    q, k, v = (torch.randn(BATCH, heads, 1, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    plain = torch.randn(2, BATCH, NUM_KV_HEADS, 100, HEAD_DIM)
    given, expected = (
        [
            PackedTensor.from_dense(x, PackedLayout("int8_per_token_head", role, HEAD_DIM))
            for x, role in zip(plain, ("key", "value"), strict=True)
        ]
        for _ in range(2)
    )
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "ignore"})
    out = compiled(q, k, v, *(cache[:, :, 7:] for cache in given))
    torch.testing.assert_close(out, step(q, k, v, *(cache[:, :, 7:] for cache in expected)), rtol=1e-4, atol=1e-5)
    assert [site.reason_code for site in last_report().sites] == ["packed_otherwise"]
    assert all(torch.equal(one.packed, other.packed) for one, other in zip(given, expected, strict=True))


@pytest.mark.parametrize("format_name", ["int8_per_token_head", "turboquant_3bit"])
def test_tokens_move_to_other_data_byte_by_byte(format_name: str) -> None:
    layout = PackedLayout(format_name, "key", HEAD_DIM)
    x = torch.randn(BATCH, NUM_KV_HEADS, 200, HEAD_DIM)
    data = pack_tokens(layout, x)
    before = data.clone()
    source = torch.randperm(200)[:70]
    moved = move_tokens(data, layout, source, data.new_zeros(3, *data.shape[1:]))
    assert torch.equal(moved[:2], pack_tokens(layout, x[:, :, source]))
    assert torch.equal(read_tokens(moved, layout, 70), read_tokens(data, layout, 200)[:, :, source])
    assert not moved[2].any()
    assert torch.equal(data, before)


def test_the_window_of_transformers_is_packed() -> None:
    layers = pytest.importorskip("transformers.cache_utils")

    class Model:
        def __init__(self) -> None:
            self.cache = layers.DynamicSlidingWindowLayer(sliding_window=70)

        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, *self.cache.update(k * 2, v * 2), enable_gqa=True)

    def packed(x: Tensor, layout: PackedLayout) -> Tensor:
        return PackedTensor.from_dense(x * 2, layout).dequantize()

    formats = [PackedLayout("int8_per_token_head", role, HEAD_DIM) for role in ("key", "value")]
    model, expected = Model(), layers.DynamicSlidingWindowLayer(sliding_window=70)
    options = {"policy": reading_packed("int8_per_token_head"), "on_unsupported": "error"}
    compiled = torch.compile(lambda *x: model(*x), backend="kvquant", options=options)
    for tokens in (90, 1):
        q, k, v = (torch.randn(BATCH, heads, tokens, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
        whole = expected.update(packed(k, formats[0]), packed(v, formats[1]))
        out = compiled(q, k, v)
        torch.testing.assert_close(
            out, F.scaled_dot_product_attention(q, *whole, enable_gqa=True), rtol=1e-4, atol=1e-5
        )
        assert isinstance(model.cache.keys, PackedTensor)
        assert torch.equal(model.cache.keys.dequantize(), expected.keys)
