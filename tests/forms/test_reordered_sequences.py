"""Caches whose sequences a step reorders, as beam search does: packed bytes are copied, and nothing is quantized again.

Compiled steps equal plain code in a lossless format. In other formats their bytes equal the bytes of eager code on
packed caches. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN = 3, 4, 2, 32, 140
LOSSLESS = {"default": {"dtype": "float32"}}

Reorder = Callable[[Tensor, Tensor], Tensor]
"""Takes a cache and the sequences; returns the reordered cache."""

Tensors = list[Tensor]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def by_index(cache: Tensor, beams: Tensor) -> Tensor:
    return cache[beams]


def by_index_select(cache: Tensor, beams: Tensor) -> Tensor:
    return cache.index_select(0, beams)


def by_gather(cache: Tensor, beams: Tensor) -> Tensor:
    return cache.gather(0, beams[:, None, None, None].expand(-1, *cache.shape[1:]))


def by_take_along_dim(cache: Tensor, beams: Tensor) -> Tensor:
    return torch.take_along_dim(cache, beams[:, None, None, None], 0)


def by_an_index_that_counts_from_the_end(cache: Tensor, beams: Tensor) -> Tensor:
    return cache[beams - len(cache)]


def through_a_view(cache: Tensor, beams: Tensor) -> Tensor:
    return cache.transpose(0, 1)[:, beams].transpose(0, 1)


def rolled(cache: Tensor, beams: Tensor) -> Tensor:
    return cache.roll(1, 0)


REORDERS: Sequence[Reorder] = (
    by_index,
    by_index_select,
    by_gather,
    by_take_along_dim,
    by_an_index_that_counts_from_the_end,
    through_a_view,
    rolled,
)

BEAMS = ([2, 0, 0], [0, 1, 2], [1, 1, 2])


def attend(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor | None = None) -> Tensor:
    mask = None if pos is None else torch.arange(keys.shape[2]) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def before_the_write(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    for cache, x in zip(caches, new, strict=True):
        cache.copy_(reorder(cache, b))
        cache.index_copy_(2, pos, x)
    return attend(q, *caches, pos)


def after_the_write(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    for cache, x in zip(caches, new, strict=True):
        cache[:, :, pos] = x
        cache[:] = reorder(cache, b)
    return attend(q, *caches, pos)


def after_attention(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    for cache, x in zip(caches, new, strict=True):
        cache[:, :, pos] = x
    out = attend(q, *caches, pos)
    for cache in caches:
        cache.copy_(reorder(cache, b))
    return out


def returned_before(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [reorder(cache, b).index_copy(2, pos, x) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches, pos), *caches


def returned_after(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [reorder(cache.index_copy(2, pos, x), b) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches, pos), *caches


def returned_last(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [cache.index_copy(2, pos, x) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches, pos), *(reorder(cache, b) for cache in caches)


def grown_before(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [torch.cat([reorder(cache, b), x], 2) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches), *caches


def grown_after(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [reorder(torch.cat([cache, x], 2), b) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches), *caches


def grown_last(reorder: Reorder, q: Tensor, new: Tensors, caches: Tensors, pos: Tensor, b: Tensor) -> Any:
    caches = [torch.cat([cache, x], 2) for cache, x in zip(caches, new, strict=True)]
    return attend(q, *caches), *(reorder(cache, b) for cache in caches)


IN_PLACE = (before_the_write, after_the_write, after_attention)
RETURNED = (returned_before, returned_after, returned_last)
GROWN = (grown_before, grown_after, grown_last)
FORMS = (*IN_PLACE, *RETURNED, *GROWN)


def step_of(form: Callable[..., Any], reorder: Reorder) -> Callable[..., Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, beams: Tensor) -> Any:
        return form(reorder, q, [k, v], [keys, values], pos, beams)

    return step


def compiled(step: Callable[..., Any], policy: Any, on_unsupported: str = "error") -> Callable[..., Any]:
    options = {"policy": reading_packed(policy), "on_unsupported": on_unsupported}
    run: Callable[..., Any] = torch.compile(step, backend="kvquant", options=options)
    return run


def packed(caches: Sequence[Tensor], policy: Any, *, growing: bool = False) -> list[Tensor]:
    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    layouts = (formats.layout(role, HEAD_DIM, torch.float32) for role in ("key", "value"))
    pairs = zip(caches, layouts, strict=True)
    return [PackedTensor.from_dense(x, layout, "bhtd", growing=growing) for x, layout in pairs]


def rows(n: int, batch: int = BATCH) -> list[Tensor]:
    return [torch.randn(batch, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


def plain_caches(num_tokens: int) -> list[Tensor]:
    return [torch.randn(BATCH, NUM_KV_HEADS, num_tokens, HEAD_DIM) for _ in range(2)]


def dense(x: Tensor) -> Tensor:
    return x.dequantize() if isinstance(x, PackedTensor) else x


def check(form: Callable[..., Any], reorder: Reorder, policy: Any, given: Tensors, expected: Tensors) -> None:
    """Run a compiled step beside an eager one.

    A step that returns new caches leaves the passed caches unchanged. A shorter cache that shares exact blocks with
    a longer one may read them quantized (:mod:`kvcompile.packed.growing_buffer`).
    """
    step = step_of(form, reorder)
    run = compiled(step, policy)
    kept: list[tuple[Tensor, Tensor]] = []
    for at, beams in zip((63, 64, 65), BEAMS, strict=True):
        args, end = rows(1), (torch.tensor([at]), torch.tensor(beams))
        stay = form in RETURNED or (form in GROWN and policy != "int4")
        kept += [(x, dense(x).clone()) for x in given] if stay else []
        result, other = run(*args, *given, *end), step(*args, *expected, *end)
        if form not in IN_PLACE:
            result, *given = result
            other, *expected = other
        torch.testing.assert_close(result, other, rtol=1e-3, atol=1e-4)
        for cache, x in zip(given, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            torch.testing.assert_close(dense(cache), dense(x), rtol=0, atol=0 if policy == LOSSLESS else 1e-5)
    assert all(torch.equal(dense(cache), before) for cache, before in kept)
    assert all("reorder of sequences" in cache.write_form for cache in last_report().sites[0].caches)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_sequences_are_reordered_where_the_model_reorders_them(form: Callable[..., Any]) -> None:
    plain = plain_caches(62 if form in GROWN else MAX_LEN)
    check(form, by_index_select, LOSSLESS, [x.clone() for x in plain], plain)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [before_the_write, grown_last])
@pytest.mark.parametrize("reorder", REORDERS, ids=lambda reorder: reorder.__name__)
def test_a_reorder_has_many_spellings(form: Callable[..., Any], reorder: Reorder) -> None:
    plain = plain_caches(62 if form in GROWN else MAX_LEN)
    check(form, reorder, LOSSLESS, packed(plain, LOSSLESS, growing=form in GROWN), plain)


@pytest.mark.parametrize("form", [returned_after, grown_after])
def test_a_reorder_that_expands_a_whole_cache_repeats_no_sequence(form: Callable[..., Any]) -> None:
    plain = plain_caches(62 if form in GROWN else MAX_LEN)  # take_along_dim expands the cache to its own shape
    check(form, by_take_along_dim, LOSSLESS, [x.clone() for x in plain], plain)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("policy", ["int8_per_token_head", "int4"])
def test_quantized_sequences_are_copied_as_bytes_with_their_exact_blocks(form: Callable[..., Any], policy: str) -> None:
    plain = plain_caches(62 if form in GROWN else MAX_LEN)
    growing = form in GROWN
    check(form, by_index, policy, packed(plain, policy, growing=growing), packed(plain, policy, growing=growing))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [returned_before, returned_last, grown_before, grown_last])
@pytest.mark.parametrize("policy", [LOSSLESS, "int4"], ids=["float32", "int4"])
def test_a_batch_may_shrink_and_grow(form: Callable[..., Any], policy: Any) -> None:
    growing = form in GROWN
    plain = plain_caches(62 if growing else MAX_LEN)
    given, expected = packed(plain, policy, growing=growing), packed(plain, policy, growing=growing)
    step = step_of(form, by_index)
    run = compiled(step, policy)
    is_first = form in (returned_before, grown_before)
    for at, beams in zip((63, 64, 65), ([2, 0], [1, 0, 1, 1], [0, 3]), strict=True):
        args = rows(1, len(beams) if is_first else len(given[0]))
        end = torch.tensor([at]), torch.tensor(beams)
        result, *given = run(*args, *given, *end)
        other, *expected = step(*args, *expected, *end)
        torch.testing.assert_close(result, other, rtol=1e-3, atol=1e-4)
        for cache, x in zip(given, expected, strict=True):
            assert isinstance(cache, PackedTensor)
            torch.testing.assert_close(cache.dequantize(), dense(x), rtol=0, atol=1e-5)


def test_the_next_beams_may_come_from_the_result_of_attention() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Any:
        keys[:, :, pos], values[:, :, pos] = k, v
        out = attend(q, keys, values, pos)
        beams = out.sum((1, 2, 3)).argsort()
        keys.copy_(keys[beams])
        values.copy_(values[beams])
        return out, beams

    plain = plain_caches(MAX_LEN)
    given, run = packed(plain, LOSSLESS), compiled(step, LOSSLESS)
    for at in (63, 64):
        args, pos = rows(1), torch.tensor([at])
        torch.testing.assert_close(run(*args, *given, pos), step(*args, *plain, pos), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(dense(cache), x) for cache, x in zip(given, plain, strict=True))


def test_a_reorder_is_an_operator_that_inductor_does_not_see_into(
    request: pytest.FixtureRequest,
) -> None:
    """Inductor would compute an index of a cache and its copy into the cache in one loop, if it saw both."""
    graphs = request.getfixturevalue("rewritten_graphs")
    plain = plain_caches(MAX_LEN)
    run = compiled(step_of(after_attention, by_index), LOSSLESS)
    run(*rows(1), *packed(plain, LOSSLESS), torch.tensor([63]), torch.tensor([2, 0, 0]))
    reorder = torch.ops.kvcompile.reorder.default
    assert all(len(graph.find_nodes(op="call_function", target=reorder)) == 2 for graph in graphs)
    assert graphs


# Other uses of an index


def heads_for_sequences(cache: Tensor, beams: Tensor) -> Tensor:
    return cache[:, beams % NUM_KV_HEADS][:, :NUM_KV_HEADS]


def a_gather_that_differs_between_heads(cache: Tensor, beams: Tensor) -> Tensor:
    index = torch.stack([beams, beams.flip(0)], 1)[:, :, None, None]
    return cache.gather(0, index.expand_as(cache))


def a_gather_of_some_tokens(cache: Tensor, beams: Tensor) -> Tensor:
    part = cache.gather(0, beams[:, None, None, None].expand(-1, NUM_KV_HEADS, 10, HEAD_DIM))
    return torch.cat([part, cache[:, :, 10:]], 2)


def a_sum_of_sequences(cache: Tensor, beams: Tensor) -> Tensor:
    return (cache[beams] + cache) / 2


@pytest.mark.parametrize(
    "change", [heads_for_sequences, a_gather_that_differs_between_heads, a_gather_of_some_tokens, a_sum_of_sequences]
)
@pytest.mark.parametrize("form", IN_PLACE, ids=lambda form: form.__name__)
def test_other_changes_of_sequences_are_refused(form: Callable[..., Any], change: Reorder) -> None:
    step = step_of(form, change)
    plain = plain_caches(MAX_LEN)
    given = [x.clone() for x in plain]
    args, end = rows(1), (torch.tensor([63]), torch.tensor([2, 0, 0]))
    result = compiled(step, LOSSLESS, "ignore")(*args, *given, *end)
    torch.testing.assert_close(result, step(*args, *plain, *end))
    assert all(torch.equal(cache, x) for cache, x in zip(given, plain, strict=True))
    assert not last_report().sites[0].rewritten


def test_a_cache_that_is_returned_with_and_without_a_reorder_is_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, beams: Tensor) -> Any:
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return attend(q, keys, values), keys, values, keys[beams]

    plain, args, beams = plain_caches(62), rows(1), torch.tensor([2, 0, 0])
    result = compiled(step, LOSSLESS, "ignore")(*args, *(x.clone() for x in plain), beams)
    for x, other in zip(result, step(*args, *plain, beams), strict=True):
        torch.testing.assert_close(dense(x), other)
    assert not last_report().sites[0].rewritten
