"""Caches that a step writes out of place and returns, as in JAX: the caller may keep every cache that it has passed.

Compiled steps equal plain code in a lossless format, and eager code on packed caches in a lossy one. Graphs run node
by node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.stack import PackedStack
from kvcompile.packed.tensor import PackedTensor

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 2, 4, 2, 32, 70
LOSSLESS, LOSSY = {"default": {"dtype": "float32"}}, "int8_per_token_head"

Write = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Takes a cache, new vectors, their positions and the dimension of tokens; returns the new cache."""

Step = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def index_copy(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    return cache.index_copy(dim, pos, x)


def scatter(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    shape = [-1 if at == dim else 1 for at in range(x.dim())]
    return cache.scatter(dim, pos.view(shape).expand(x.shape), x)


def slice_scatter(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    return cache.slice_scatter(x, dim, 3, 3 + x.shape[dim])


def select_scatter(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    return cache.select_scatter(x.select(dim, 0), dim, 3)


def where(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    here = torch.arange(cache.shape[dim]) == pos[0]
    return torch.where(here.view([-1 if at == dim else 1 for at in range(x.dim())]), x.narrow(dim, 0, 1), cache)


def written_copy(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    cache = cache.clone()
    cache.index_copy_(dim, pos, x)
    return cache


def through_a_view(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    return cache.transpose(0, dim).index_put((pos,), x.transpose(0, dim)).transpose(0, dim)


def two_writes(cache: Tensor, x: Tensor, pos: Tensor, dim: int) -> Tensor:
    last = x.shape[dim] - 1
    cache = cache.index_copy(dim, pos[:last], x.narrow(dim, 0, last))
    return cache.index_copy(dim, pos[last:], x.narrow(dim, last, 1))


WRITES: Sequence[Write] = (
    index_copy,
    scatter,
    slice_scatter,
    select_scatter,
    where,
    written_copy,
    through_a_view,
    two_writes,
)


def visible(pos: Tensor, kv_len: int = MAX_LEN) -> Tensor:
    return torch.arange(kv_len) <= pos[:, None]


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def rows(n: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    return q, k, v


def caches(axes: str = "bhtd", batch: int = BATCH) -> list[Tensor]:
    sizes = {"b": batch, "h": NUM_KV_HEADS, "t": MAX_LEN, "d": HEAD_DIM}
    return [torch.randn([sizes[axis] for axis in axes]) for _ in range(2)]


def packed(caches: Sequence[Tensor], axes: str = "bhtd", **options: Any) -> list[PackedTensor]:
    layouts = (PackedLayout(LOSSY, role, HEAD_DIM) for role in ("key", "value"))
    return [PackedTensor.from_dense(x, layout, axes, **options) for x, layout in zip(caches, layouts, strict=True)]


def dense(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedTensor) else x


def compiled(step: Step, policy: Any, **options: Any) -> Step:
    options = {"policy": reading_packed(policy), "on_unsupported": "error", **options}
    result: Step = torch.compile(step, backend="kvquant", options=options)
    return result


def check_steps(step: Step, policy: Any, given: list[Tensor], expected: list[Tensor], lengths: Sequence[int]) -> None:
    """Run a compiled step beside an eager one, each on the caches that it has returned before.

    Every cache that was passed keeps its values, also after later steps.
    """
    run = compiled(step, policy)
    kept: list[tuple[Tensor, Tensor]] = []
    start = 0
    for n in lengths:
        q, k, v = rows(n)
        pos = torch.arange(start, start + n)
        kept += [(x, dense(x).clone()) for x in given]
        out, *given = run(q, k, v, *given, pos)
        result, *expected = step(q, k, v, *expected, pos)
        torch.testing.assert_close(out, result, rtol=1e-4, atol=1e-5)
        for cache, other in zip(given, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            assert torch.equal(cache.dequantize(), dense(other))
        start += n
    for cache, before in kept:
        assert torch.equal(dense(cache), before)


def functional_step(write: Write, axes: str = "bhtd") -> Step:
    dim, order = axes.index("t"), [axes.index(axis) for axis in "bhtd"]

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
        k, v = (x.permute(["bhtd".index(axis) for axis in axes]) for x in (k, v))
        keys, values = write(keys, k, pos, dim), write(values, v, pos, dim)
        return attend(q, keys.permute(order), values.permute(order), visible(pos)), keys, values

    return step


WRITES_AND_AXES = [*zip(WRITES, itertools.cycle(("bhtd", "bthd", "tbhd")), strict=False)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("write", "axes"),
    WRITES_AND_AXES,
    ids=lambda param: getattr(param, "__name__", param),
)
def test_a_returned_cache_is_packed_and_the_caches_that_were_passed_keep_their_values(write: Write, axes: str) -> None:
    lengths = (1, 1) if write in (select_scatter, where) else (65, 2)
    step, plain = functional_step(write, axes), caches(axes)
    with kvcompile.collect_reports() as report:
        check_steps(step, LOSSLESS, [x.clone() for x in plain], [x.clone() for x in plain], lengths)
    assert {cache.kind for site in report.sites for cache in site.caches} == {"functional"}


@pytest.mark.parametrize(
    ("write", "axes"),
    [
        pytest.param(*case, marks=() if case[0] in (index_copy, where, two_writes) else pytest.mark.slow)
        for case in WRITES_AND_AXES
    ],
    ids=lambda param: getattr(param, "__name__", param),
)
def test_a_returned_cache_in_a_lossy_format_equals_the_cache_of_eager_code(write: Write, axes: str) -> None:
    step, plain = functional_step(write, axes), caches(axes)
    n = 1 if write in (select_scatter, where) else 65
    check_steps(step, LOSSY, list(packed(plain, axes)), list(packed(plain, axes)), (n,))


def test_a_plain_cache_stays_plain_and_two_requests_may_begin_with_it() -> None:
    run, step, (keys, values) = compiled(functional_step(index_copy), LOSSLESS), functional_step(index_copy), caches()
    before = keys.clone(), values.clone()
    prompt = run(*rows(60), keys, values, torch.arange(60))[1:]
    assert (type(keys), type(values)) == (Tensor, Tensor)
    assert torch.equal(keys, before[0])
    assert torch.equal(values, before[1])
    for start in (60, 60, 10):  # continued twice, and from an earlier token
        q, k, v = rows(3)
        pos = torch.arange(start, start + 3)
        found, expected = run(q, k, v, *prompt, pos), step(q, k, v, *map(dense, prompt), pos)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(dense(one), other, rtol=1e-4, atol=1e-5)


def test_a_module_may_replace_its_caches() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, keys: Tensor, values: Tensor) -> None:
            super().__init__()
            self.register_buffer("keys", keys)
            self.register_buffer("values", values)

        def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
            self.keys = self.keys.index_copy(2, pos, k)
            self.values = self.values.index_copy(2, pos, v)
            return attend(q, self.keys, self.values, visible(pos))

    given = caches()
    layer, expected = Layer(*given), Layer(*(x.clone() for x in given))
    run = compiled(layer, LOSSLESS)
    for start, n in ((0, 65), (65, 1), (66, 1)):
        q, k, v = rows(n)
        pos = torch.arange(start, start + n)
        torch.testing.assert_close(run(q, k, v, pos), expected(q, k, v, pos), rtol=1e-4, atol=1e-5)
    assert isinstance(layer.keys, PackedTensor)
    assert torch.equal(layer.keys.dequantize(), expected.keys)
    assert torch.equal(layer.values.dequantize(), expected.values)


def test_a_returned_stack_of_caches_is_packed() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, pos: Tensor) -> Any:
        kv = kv.index_copy(3, pos, torch.stack([k, v]))
        return attend(q, kv[0], kv[1], visible(pos)), kv

    run, kv = compiled(step, LOSSLESS), torch.stack(caches())
    expected, before, given = kv.clone(), kv.clone(), kv
    for start, n in ((0, 3), (3, 1), (4, 1)):
        q, k, v = rows(n)
        pos = torch.arange(start, start + n)
        out, kv = run(q, k, v, kv, pos)
        result, expected = step(q, k, v, expected, pos)
        torch.testing.assert_close(out, result, rtol=1e-4, atol=1e-5)
        assert isinstance(kv, PackedStack)
        assert torch.equal(kv.dequantize(), expected)
    assert type(given) is Tensor
    assert torch.equal(given, before)


def growing_from_a_prefix(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    shape = q.shape[0], -1, -1, -1
    keys, values = torch.cat([keys.expand(shape), k], 2), torch.cat([values.expand(shape), v], 2)
    return attend(q, keys, values, None), keys, values


def repeated_prefix(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    keys, values = (torch.cat([x.repeat(BATCH, 1, 1, 1), y], 2) for x, y in ((keys, k), (values, v)))
    return attend(q, keys, values, None), keys, values


def written_from_a_prefix(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    pos = torch.arange(3, 3 + q.shape[2])
    keys, values = (x.expand(q.shape[0], -1, -1, -1).index_copy(2, pos, y) for x, y in ((keys, k), (values, v)))
    return attend(q, keys, values, None), keys, values


@pytest.mark.parametrize("step", [growing_from_a_prefix, repeated_prefix, written_from_a_prefix])
def test_a_prefix_is_repeated_for_a_batch_and_stays_unchanged(step: Step) -> None:
    run, prefix = compiled(step, LOSSLESS), caches(batch=1)
    before = [x.clone() for x in prefix]
    for n in (5, 1):  # two requests
        q, k, v = rows(n)
        found, expected = run(q, k, v, *prefix), step(q, k, v, *prefix)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert isinstance(one, PackedTensor)
            assert torch.equal(one.dequantize(), other)
    for cache, plain in zip(prefix, before, strict=True):
        assert type(cache) is Tensor
        assert torch.equal(cache, plain)


def selected_prefix(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    second, pos = torch.tensor([1]), torch.arange(3, 3 + q.shape[2])
    keys, values = (x[second].expand(BATCH, -1, -1, -1).index_copy(2, pos, y) for x, y in ((keys, k), (values, v)))
    return attend(q, keys, values, None), keys, values


@pytest.mark.parametrize("step", [written_from_a_prefix, selected_prefix])
def test_caches_of_several_sequences_do_not_repeat_the_first(step: Step) -> None:
    (q, k, v), given = rows(2), caches(batch=BATCH)
    found, expected = compiled(step, LOSSLESS)(q, k, v, *given), step(q, k, v, *given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(dense(one), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("growing", [True, False])
def test_the_bytes_of_a_packed_prefix_are_repeated(growing: bool) -> None:
    prefix = packed(caches(batch=1), growing=growing)
    before = [x.packed.clone() for x in prefix]
    q, k, v = rows(3)
    out, *found = compiled(growing_from_a_prefix if growing else written_from_a_prefix, LOSSY)(q, k, v, *prefix)
    expected = [x.index_select(0, torch.zeros(BATCH, dtype=torch.int64)) for x in prefix]
    if growing:
        expected = [torch.cat([x, y], 2) for x, y in zip(expected, (k, v), strict=True)]
    else:
        expected = [x.index_copy(2, torch.arange(3, 6), y) for x, y in zip(expected, (k, v), strict=True)]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(dense(one), dense(other))
    torch.testing.assert_close(out, attend(q, *map(dense, expected), None), rtol=1e-4, atol=1e-5)
    for cache, data in zip(prefix, before, strict=True):
        assert torch.equal(cache.packed, data)


def old_keys_are_attended_to(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    new_keys, new_values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    return attend(q, keys, new_values, visible(pos)), new_keys, new_values


def old_keys_are_added_up(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    total = keys.sum()
    keys, values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    return attend(q, keys, values, visible(pos)) + total, keys, values


def keys_are_written_after_the_read(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    keys, values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    out = attend(q, keys, values, visible(pos))
    return out, index_copy(keys, k * 2, pos, 2), values


def states_before_the_last_are_returned(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Any:
    first = index_copy(keys, k, pos, 2)
    keys, values = index_copy(first, k * 2, pos, 2), index_copy(values, v, pos, 2)
    return attend(q, keys, values, visible(pos)), keys, values, first


def a_view_is_returned_too(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    keys, values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    return attend(q, keys, values, visible(pos)), keys, values, keys[:, :, :2]


def only_a_part_is_returned(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    keys, values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    return attend(q, keys, values, visible(pos)), keys[:, :1], values


def old_keys_are_changed_in_place(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
    new_keys, values = index_copy(keys, k, pos, 2), index_copy(values, v, pos, 2)
    keys.mul_(0.5)
    return attend(q, new_keys, values, visible(pos)), new_keys, values


def keys_and_values_continue_one_cache(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor
) -> Any:
    keys, values = index_copy(keys, k, pos, 2), index_copy(keys, v, pos, 2)
    return attend(q, keys, values, visible(pos)), keys, values


UNSAFE: dict[Step, str] = {
    old_keys_are_attended_to: "plain_read_only",
    old_keys_are_added_up: "used_elsewhere",
    keys_are_written_after_the_read: "written_after_read",
    states_before_the_last_are_returned: "used_elsewhere",
    a_view_is_returned_too: "used_elsewhere",
    only_a_part_is_returned: "not_written_back",
    old_keys_are_changed_in_place: "used_elsewhere",
    keys_and_values_continue_one_cache: "used_elsewhere",
}


@pytest.mark.parametrize("step", UNSAFE, ids=lambda step: step.__name__)
def test_other_uses_of_a_returned_cache_are_refused_and_stay_right(step: Step) -> None:
    given = caches()
    q, k, v = rows(3)
    pos = torch.arange(3, 6)
    expected_given = [x.clone() for x in given]
    with kvcompile.collect_reports() as report:
        found = compiled(step, LOSSY, on_unsupported="ignore")(q, k, v, *given, pos)
    assert [site.reason_code for site in report.sites] == [UNSAFE[step]]
    for one, other in zip((*found, *given), (*step(q, k, v, *expected_given, pos), *expected_given), strict=True):
        assert type(one) is Tensor
        assert torch.equal(one, other)


def heads_repeated(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    keys, values = (torch.cat([x[:, :1].expand(-1, NUM_KV_HEADS, -1, -1), y], 2) for x, y in ((keys, k), (values, v)))
    return attend(q, keys, values, None), keys, values


def sequences_in_turn(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    keys, values = (torch.cat([x.repeat(2, 1, 1, 1), y.repeat(2, 1, 1, 1)], 2) for x, y in ((keys, k), (values, v)))
    return attend(q.repeat(2, 1, 1, 1), keys, values, None), keys, values


@pytest.mark.parametrize("step", [heads_repeated, sequences_in_turn])
def test_other_repetitions_of_a_cache_stay_right(step: Step) -> None:
    given = caches()
    q, k, v = rows(3)
    found, expected = compiled(step, LOSSLESS, on_unsupported="ignore")(q, k, v, *given), step(q, k, v, *given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(dense(one), other, rtol=1e-4, atol=1e-5)
