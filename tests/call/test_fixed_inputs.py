"""The caches of the last call are recognised, and inputs at fixed addresses stay where they are."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from kvcompile.call.fixed_inputs import FixedInputs, KnownCaches
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

LAYOUT = PackedLayout.parse("int8_per_token_head", "key", 16)


def caches(count: int = 2, *, growing: bool = False) -> list[PackedTensor]:
    return [PackedTensor.zeros((1, 1, 70, 16), torch.float32, LAYOUT, growing=growing) for _ in range(count)]


def data_of(own: list[PackedTensor]) -> list[torch.Tensor]:
    return [cache.packed for cache in own]


def test_the_same_caches_are_recognised_and_others_are_not() -> None:
    known, own, other = KnownCaches(), caches(), caches()
    known.remember(own, data_of(own))
    data = known.data_of(own)
    assert data is not None
    assert all(one is cache.packed for one, cache in zip(data, own, strict=True))
    assert known.data_of(other) is None
    assert known.data_of([own[0], other[1]]) is None
    assert known.data_of(own[:1]) is None
    known.remember(other, data_of(other))
    assert known.data_of(own) is None


def test_caches_are_not_kept_alive() -> None:
    known, own = KnownCaches(), caches()
    known.remember(own, data_of(own))
    data = weakref.ref(own[0].packed)
    del own
    gc.collect()
    assert data() is None
    assert known.data_of(caches()) is None


def test_caches_that_moved_or_may_move_are_not_recognised() -> None:
    known, own, growing = KnownCaches(), caches(), caches(growing=True)
    known.remember(own, data_of(own))
    with torch.no_grad():
        own[0].packed.set_(own[0].packed.clone())
    assert known.data_of(own) is None
    known.remember(growing, data_of(growing))
    assert known.data_of(growing) is None
    known.remember(own, [cache.clone().packed for cache in own])  # a graph gets a copy of the bytes of a partial view
    assert known.data_of(own) is None


def test_threads_know_their_own_caches_only() -> None:
    known, own = KnownCaches(), caches()
    known.remember(own, data_of(own))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(known.data_of(own)))
    thread.start()
    thread.join()
    assert found == [None]


def test_references_keep_their_addresses() -> None:
    fixed, first, second = FixedInputs(), caches(), caches()
    addresses = [one.data_ptr() for one in fixed.refer(data_of(first))]
    assert [one.data_ptr() for one in fixed.refer(data_of(second))] == addresses
    assert [one.data_ptr() for one in fixed.referred] == addresses


def test_buffers_hold_the_values_at_the_same_addresses() -> None:
    fixed = FixedInputs()
    values = [torch.tensor(3), torch.randn(2, 3).t(), torch.tensor([True])]
    buffers = fixed.buffers_of(values)
    assert all(torch.equal(*pair) for pair in zip(buffers, values, strict=True))
    assert [buffer.stride() for buffer in buffers] == [value.stride() for value in values]
    again = fixed.buffers_of([value.clone() for value in values])
    assert [buffer.data_ptr() for buffer in again] == [buffer.data_ptr() for buffer in buffers]
    longer = fixed.buffers_of([torch.tensor(4), torch.randn(2, 4).t(), torch.tensor([True])])
    assert all(one is not other for one, other in zip(longer, buffers, strict=True))
    assert fixed.buffers_of(values)[0] is buffers[0]
