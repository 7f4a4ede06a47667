"""A cache that grows by concatenation appends in place, without any visible difference."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from packed_caches import HEAD_DIM, INT8, assert_same, every_order, pair, quantized, shape_of, values

from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.packed.growing_buffer import GrowingBuffer, capacity_blocks
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def storage_of(cache):
    return cache.packed.untyped_storage().data_ptr()


def append(cache, plain, tokens=1, dim=2):
    x = values(*cache.shape[:dim], tokens, *cache.shape[dim + 1 :])
    return torch.cat([cache, x], dim), torch.cat([plain, quantized(x, INT8)], dim)


@every_order
def test_appending_copies_the_cache_only_when_its_storage_is_full(axes):
    cache = PackedTensor.zeros(shape_of(axes, 0), torch.float32, INT8, axes, growing=True)
    plain = torch.zeros(shape_of(axes, 0))
    storages = []
    for _ in range(400):
        cache, plain = append(cache, plain, dim=axes.index("t"))
        storages.append(storage_of(cache))
    assert_same(cache, plain)
    assert len(set(storages)) <= 5


def test_the_storage_of_a_cache_is_at_most_one_and_a_half_times_its_length():
    for length in range(1025, 40000, 7):
        assert capacity_blocks(length) * BLOCK_TOKENS <= 1.5 * length
    cache, plain = pair(INT8, tokens=1025, growing=True)
    for tokens in (1, 63, 64, 300, 1):
        cache, plain = append(cache, plain, tokens)
        assert cache_nbytes(cache) <= 1.5 * plain.shape[2] * 2 * 3 * INT8.bytes_per_token
    assert_same(cache, plain)


def test_the_packed_data_is_the_prefix_that_holds_the_cache_and_at_least_two_blocks():
    cache, _ = pair(INT8, tokens=7, growing=True)
    blocks = []
    for _ in range(130):
        cache = torch.cat([cache, values(*shape_of("bhtd", 1))], 2)
        blocks.append(cache.packed.shape[0])
    assert blocks == [2] * 121 + [3] * 9


def test_a_shorter_cache_keeps_its_values_while_a_longer_one_shares_its_storage():
    short = pair(INT8, growing=True)
    long = append(*short, tokens=20)
    assert storage_of(short[0]) == storage_of(long[0])
    assert_same(*short)
    assert_same(*long)


def test_a_second_append_to_the_same_cache_forks_it():
    prompt = pair(INT8, growing=True)
    beams = [append(*prompt), append(*prompt), append(*prompt)]
    assert len({storage_of(cache) for cache, _ in beams}) == 3
    beams = [append(*beam) for beam in beams]
    for cache, plain in [*beams, prompt]:
        assert_same(cache, plain)


def test_one_of_the_threads_that_continue_a_cache_has_its_room_and_the_others_copy(monkeypatch):
    has_room = GrowingBuffer._has_room
    monkeypatch.setattr(GrowingBuffer, "_has_room", lambda *of: time.sleep(0.01) or has_room(*of))  # others continue
    prompt = pair(INT8, growing=True)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: append(*prompt), range(4)))
    assert len({storage_of(cache) for cache, _ in answers}) == 4
    for cache, plain in [*answers, prompt]:
        assert_same(cache, plain)


def test_a_rejected_draft_is_cropped_and_overwritten_by_the_next_tokens():
    cache, plain = append(*pair(INT8, growing=True), tokens=5)
    draft, plain_draft = cache, plain
    cache, plain = append(cache[..., :-3, :], plain[..., :-3, :], tokens=2)
    assert_same(cache, plain)
    assert_same(draft, plain_draft)


def test_a_write_to_one_cache_is_seen_by_its_views_and_by_no_other_cache():
    short = pair(INT8, growing=True)
    views = short[0][:, :, 3:66], short[1][:, :, 3:66]
    beams = short[0][1], short[1][1]
    long = append(*short)
    for cache in short:
        cache[:, :, 5:65].zero_()
    assert_same(*views)
    assert_same(*beams)
    assert_same(*short)
    assert_same(*long)
    for cache in long:
        cache.zero_()
    assert_same(*short)
    assert_same(*long)
    assert_same(*append(*short))


def test_a_write_copies_nothing_once_the_shorter_caches_are_gone():
    cache, plain = pair(INT8, growing=True)
    cache, plain = append(cache, plain)
    before = storage_of(cache)
    cache.zero_()
    assert storage_of(cache) == before


def test_a_cache_that_moved_to_be_written_goes_on_growing_in_place():
    short = pair(INT8, growing=True)
    long = append(*short, tokens=40)
    for cache in short:
        cache.zero_()
    longer = append(*short)
    assert storage_of(longer[0]) == storage_of(short[0]) != storage_of(long[0])
    assert_same(*longer)
    assert_same(*long)


def test_a_window_that_shares_its_storage_moves_with_its_views():
    prompt = pair(INT8, tokens=300, growing=True)
    window = append(prompt[0][:, :, 250:], prompt[1][:, :, 250:], tokens=1)
    views = window[0][:, :, 40:], window[1][:, :, 40:]
    longer = append(*window)
    for cache in window:
        cache[:, :, 3:45].zero_()
    for cache, plain in (prompt, window, views, longer, append(*window)):
        assert_same(cache, plain)


def test_a_sliding_window_does_not_keep_the_tokens_that_left_it():
    cache, plain = pair(INT8, tokens=50, growing=True)
    for _ in range(300):
        cache, plain = append(cache[:, :, -49:], plain[:, :, -49:])
    assert_same(cache, plain)
    assert cache_nbytes(cache) == 2 * BLOCK_TOKENS * 2 * 3 * INT8.bytes_per_token


def test_a_cache_of_fixed_size_becomes_a_growing_one_by_concatenation():
    cache, plain = pair(INT8)
    longer, plain_longer = append(cache, plain)
    assert longer.growing
    assert_same(longer, plain_longer)
    cache.zero_()
    assert_same(longer, plain_longer)


def test_extended_reserves_space_for_the_caller_to_store_to():
    cache, plain = pair(INT8, tokens=60, growing=True)
    longer = cache.extended(9)
    assert longer.shape == (2, 3, 69, HEAD_DIM)
    assert storage_of(longer) == storage_of(cache)
    x = values(*shape_of("bhtd", 9))
    longer[:, :, 60:] = x
    assert_same(longer, torch.cat([plain, quantized(x, INT8)], 2))
    assert_same(cache, plain)
    assert storage_of(cache.extended(9)) != storage_of(cache)


def test_a_part_of_the_heads_does_not_grow_into_the_storage_of_the_others():
    cache, plain = pair(INT8, growing=True)
    part, plain_part = cache[:, 1:], plain[:, 1:]
    x = values(2, 2, 3, HEAD_DIM)
    assert_same(torch.cat([part, x], 2), torch.cat([plain_part, quantized(x, INT8)], 2))
    assert_same(cache, plain)


def test_unused_room_is_zero_so_that_nothing_ever_decodes_to_nan():
    cache, _ = pair(INT8, tokens=70, growing=True)
    longer = torch.cat([cache, values(*shape_of("bhtd", 60))], 2).extended(200)
    assert longer.isfinite().all()


def test_other_shapes_and_dtypes_are_concatenated_like_plain_caches():
    cache, plain = pair(INT8, growing=True)
    with pytest.raises(RuntimeError, match="does not extend a packed cache"):
        torch.cat([cache, torch.zeros(2, 2, 1, HEAD_DIM)], 2)
    x = torch.zeros(2, 3, 1, HEAD_DIM, dtype=torch.float64)
    assert torch.equal(torch.cat([cache, x], 2), torch.cat([plain, x], 2))
    assert_same(torch.cat([cache, torch.tensor([])], 2), plain)


@pytest.fixture
def first_five():
    """A compiled function that returns a view of its input."""
    torch._dynamo.reset()
    yield torch.compile(lambda cache: cache[:, :, :5], backend="aot_eager")
    torch._dynamo.reset()


def test_a_view_that_a_compiled_function_returns_shares_writes_with_its_cache_only(first_five):
    short = pair(INT8, growing=True)
    view = first_five(short[0]), short[1][:, :, :5]
    long = append(*short)
    for part in view:
        part.zero_()
    assert_same(*short)
    for cache in short:
        cache[:, :, 3:4].copy_(cache[:, :, 8:9])
    assert_same(*view)
    assert_same(*short)
    assert_same(*long)


def test_a_write_is_an_error_if_a_compiled_function_returned_a_view_of_one_of_several_caches(first_five):
    short = pair(INT8, growing=True)
    long = append(*short)
    view = first_five(short[0]), short[1][:, :, :5]
    for cache in (short[0], long[0], view[0]):
        with pytest.raises(NotImplementedError, match="clone the view"):
            cache.zero_()
    for cache in (short, long, view, append(*view), append(*long)):
        assert_same(*cache)
    del view
    for cache in long:
        cache.zero_()
    assert_same(*short)
    assert_same(*long)
