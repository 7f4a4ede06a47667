"""A function compiled for plain caches also runs with the packed caches that replace them, but with no others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from decode_steps import step
from torch import Tensor
from torch._dynamo.utils import counters

import kvcompile
from kvcompile.call.adoption import adopt
from kvcompile.call.plain_or_packed import PlainOrPacked
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.calling import InputAction

INT8 = "int8_per_token_head"
BATCH, HEADS, MAX_LEN, HEAD_DIM = 2, 2, 70, 32
SHAPE = (BATCH, HEADS, MAX_LEN, HEAD_DIM)

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def stacked_step(q: Tensor, k: Tensor, v: Tensor, caches: Tensor, pos: Tensor) -> Tensor:
    return step(q, k, v, caches[0], caches[1], pos)


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Tensor]:
    return torch.compile(function, backend=kvcompile.kvquant(policy=INT8, on_unsupported="error"), **how)


def plain_for(function: Callable[..., Any]) -> list[Tensor]:
    """Empty caches as ``function`` takes them."""
    return [torch.zeros(2, *SHAPE)] if function is stacked_step else [torch.zeros(SHAPE) for _ in range(2)]


def packed_by_hand(format_name: str = INT8, shape: Sequence[int] = SHAPE, axes: str = "bhtd", **how: Any) -> list[Any]:
    """A key cache and a value cache of random values."""
    dtype = how.pop("dtype", torch.float32)
    layouts = (PackedLayout(format_name, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(torch.randn(shape, dtype=dtype), layout, axes, **how) for layout in layouts]


def run(function: Callable[..., Tensor], caches: Sequence[Tensor], position: int = 5) -> Tensor:
    """A step with a random token at ``position``; the same token for equal positions."""
    torch.manual_seed(position)
    shape = (3, len(caches[0]) if len(caches) == 2 else BATCH, HEADS, 1, HEAD_DIM)
    return function(*torch.randn(shape, dtype=caches[0].dtype), *caches, torch.tensor([position]))


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("function", [step, stacked_step])
def test_one_graph_serves_plain_caches_and_the_same_caches_after_packing(
    function: Callable[..., Any], dynamic: bool | None
) -> None:
    for_plain, held = compiled(function, dynamic=dynamic), plain_for(function)
    results = [run(for_plain, held)]
    with torch.compiler.set_stance("fail_on_recompile"):
        results += [run(for_plain, held, position) for position in (6, 7)]
        again = plain_for(function)
        for position, result in zip((5, 6, 7), results, strict=True):
            assert torch.equal(run(for_plain, again, position), result)
    assert num_graphs() == 1
    assert {type(cache) for cache in (*held, *again)} == {PackedStack if function is stacked_step else PackedTensor}


def test_packed_caches_are_read_and_written_as_by_a_function_that_is_compiled_for_them() -> None:
    for_plain, own = compiled(step), packed_by_hand()
    run(for_plain, plain_for(step))
    twin = [copy.deepcopy(cache) for cache in own]
    results = [run(for_plain, own, position) for position in (64, 69)]
    assert num_graphs() == 1
    torch._dynamo.reset()
    for_packed = compiled(step)
    for position, result in zip((64, 69), results, strict=True):
        assert torch.equal(run(for_packed, twin, position), result)
    assert num_graphs() == 2
    assert all(torch.equal(a.packed, b.packed) for a, b in zip(own, twin, strict=True))


OTHERS: dict[str, Callable[[], list[Any]]] = {
    "another format": lambda: packed_by_hand("int4_per_token_head"),
    "a growing cache": lambda: packed_by_hand(growing=True),
    "another number of sequences": lambda: packed_by_hand(shape=(1, *SHAPE[1:])),
    "another size": lambda: packed_by_hand(shape=(BATCH, HEADS, 140, HEAD_DIM)),
    "another dtype": lambda: packed_by_hand(dtype=torch.bfloat16),
    "another order of axes": lambda: packed_by_hand(axes="bthd"),
    "a view of sequences": lambda: [cache[1:] for cache in packed_by_hand(shape=(3, *SHAPE[1:]))],
    "a view of heads": lambda: [cache[:, 1:] for cache in packed_by_hand(shape=(BATCH, 3, MAX_LEN, HEAD_DIM))],
    "a view of tokens": lambda: [cache[:, :, 7:77] for cache in packed_by_hand(shape=(BATCH, HEADS, 90, HEAD_DIM))],
    "only one packed cache in this format": lambda: [packed_by_hand()[0], packed_by_hand("bfloat16")[1]],
    "keys for values": lambda: packed_by_hand()[::-1],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("other", OTHERS)
def test_other_packed_caches_are_compiled_for(other: str) -> None:
    for_plain, held = torch.compile(step, backend=kvcompile.kvquant(policy=INT8)), OTHERS[other]()
    run(for_plain, plain_for(step))
    before = [cache.dequantize() for cache in held]
    result = run(for_plain, held)
    assert num_graphs() == 2
    torch.testing.assert_close(result.float(), run(step, before).float(), atol=0.1, rtol=0.1)


def test_a_mark_on_a_packed_cache_is_obeyed() -> None:
    for_plain, held = compiled(step), plain_for(step)
    run(for_plain, held)
    torch._dynamo.maybe_mark_dynamic(held[0], 2)
    torch._dynamo.mark_dynamic(held[0], 0)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        run(for_plain, held)


def test_one_packed_cache_in_two_places_is_no_replacement_for_two_plain_caches() -> None:
    for_plain, held = compiled(step), plain_for(step)
    run(for_plain, held)
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        run(for_plain, [held[0], held[0]])


def test_filters_of_guards_find_the_widened_guard_as_dynamos_own() -> None:
    found: list[str] = []

    def keep_tensors(entries: Sequence[Any]) -> list[bool]:
        found.extend(entry.guard_type for entry in entries if "keys" in entry.name)
        return [entry.guard_type == "TENSOR_MATCH" for entry in entries]

    how = {"policy": INT8, "guard_filter_fn": keep_tensors}
    for_plain, held = torch.compile(step, backend="kvquant", options=how), plain_for(step)
    run(for_plain, held)
    run(for_plain, held, 6)
    assert found == ["TENSOR_MATCH"]
    run(for_plain, packed_by_hand("int4_per_token_head"))
    assert num_graphs() == 2


def test_a_slice_of_tokens_of_a_packed_cache_is_compiled_for_because_code_may_read_strides() -> None:
    def step_with_strides(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        return step(q, k, v, kc, vc, pos) * kc.stride(1)

    run_step = compiled(step_with_strides, dynamic=False)
    plain, longer = plain_for(step), packed_by_hand(shape=(*SHAPE[:2], 2 * SHAPE[2], SHAPE[3]))
    run(run_step, plain)
    slices = [cache[:, :, : SHAPE[2]] for cache in longer]
    expected = run(compiled(step), [cache.clone() for cache in slices])
    torch.testing.assert_close(run(run_step, slices), expected * longer[0].stride(1), rtol=1e-4, atol=1e-4)


def test_code_for_caches_in_one_order_in_memory_admits_packed_caches_in_this_order_only() -> None:
    """``reshape`` is a view in one order and a copy in the other: the write reaches the cache in one of them only."""
    layout, (batch, heads, tokens, head_dim) = PackedLayout(INT8, "key", HEAD_DIM), SHAPE
    action = InputAction(0, "static", layout, axes="bhtd")
    in_orders = [lambda: torch.zeros(SHAPE), lambda: torch.zeros(batch, tokens, heads, head_dim).transpose(1, 2)]
    for place, make in enumerate(in_orders):
        code = PlainOrPacked(make(), {(): action})
        run_with = code.widened(lambda plain: True)
        for _ in range(2):  # the check remembers the cache that it has admitted
            assert [run_with(adopt(other(), layout)) for other in in_orders] == [place == 0, place == 1]
