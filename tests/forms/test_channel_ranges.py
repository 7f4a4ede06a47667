"""One tensor may hold keys and values in ranges of its channels. The ranges are packed like separate caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stack_forms import assert_close, compiled, plain
from torch import Tensor
from torch._dynamo.utils import counters

from kvcompile import last_report
from kvcompile.packed.stack import PackedRanges
from kvcompile.packed.tensor import PackedTensor

pytestmark = [pytest.mark.usefixtures("seed_without_grad", "without_code_generation")]

BATCH, NUM_HEADS, MAX_LEN, HEAD_DIM, LAYERS = 2, 4, 130, 64, 2

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
"""Takes a cache, a query, new keys and new values, each [batch, heads, n, head_dim], and positions, int64 [n]."""


def attend(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
    """Attention to keys and values [batch, heads, tokens, head_dim] or, of one head, [batch, tokens, head_dim]."""
    if keys.dim() == 3:
        keys, values = (x[:, None].expand(-1, NUM_HEADS, -1, -1) for x in (keys, values))
    mask = torch.arange(keys.shape[2], device=q.device) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


FORMS: dict[Step, tuple[int, ...]] = {}
"""Ways to write and read ranges, and the shape of the cache."""


def form(*shape: int) -> Callable[[Step], Step]:
    def remember(fn: Step) -> Step:
        FORMS[fn] = shape
        return fn

    return remember


@form(BATCH, MAX_LEN, 2 * HEAD_DIM)
def one_head_is_split(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv.index_copy_(1, pos, torch.cat([k[:, 0], v[:, 0]], -1))
    return attend(q, *kv.split(HEAD_DIM, -1), pos)


@form(BATCH, NUM_HEADS, MAX_LEN, 2 * HEAD_DIM)
def heads_are_divided_in_two(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, pos] = torch.cat([k, v], -1)
    return attend(q, *kv.chunk(2, -1), pos)


@form(BATCH, MAX_LEN, NUM_HEADS, 2 * HEAD_DIM)
def values_come_first_in_tokens_before_heads(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([v, k], -1).transpose(1, 2)
    values, keys = kv.transpose(1, 2).chunk(2, -1)
    return attend(q, keys, values, pos)


@form(BATCH, MAX_LEN, 2 * NUM_HEADS * HEAD_DIM)
def merged_heads_are_split(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([x.transpose(1, 2).flatten(2) for x in (k, v)], -1)
    keys, values = (x.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for x in kv.split(NUM_HEADS * HEAD_DIM, -1))
    return attend(q, keys, values, pos)


@form(BATCH, MAX_LEN, 2 * NUM_HEADS * HEAD_DIM)
def merged_heads_are_viewed_and_unbound(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.stack([k.transpose(1, 2), v.transpose(1, 2)], 2).flatten(2)
    keys, values = kv.view(BATCH, MAX_LEN, 2, NUM_HEADS, HEAD_DIM).unbind(2)
    return attend(q, keys.transpose(1, 2), values.transpose(1, 2), pos)


@form(BATCH, MAX_LEN, 2 * HEAD_DIM)
def each_range_is_written_alone(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos, :HEAD_DIM] = k[:, 0]
    kv[:, pos, HEAD_DIM:] = v[:, 0]
    return attend(q, kv[..., :HEAD_DIM], kv[..., HEAD_DIM:], pos)


@form(BATCH, NUM_HEADS, MAX_LEN, 2 * HEAD_DIM)
def a_range_is_copied_in_a_slice_of_tokens(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, :, pos] = torch.cat([k, v], -1)
    kv[:, :, 7:9, HEAD_DIM:].copy_(v[:, :, :1])
    return attend(q, kv[..., :HEAD_DIM], kv[..., HEAD_DIM:], pos)


@form(BATCH, MAX_LEN, 2 * LAYERS * HEAD_DIM)
def all_layers_in_one_dimension(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0], 2 * k[:, 0], 2 * v[:, 0]], -1)
    parts = kv.split(HEAD_DIM, -1)
    return attend(attend(q, *parts[:2], pos), *parts[2:], pos)


@form(LAYERS, BATCH, NUM_HEADS, MAX_LEN, 2 * HEAD_DIM)
def layers_have_a_dimension_of_their_own(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    for layer in kv:
        layer[:, :, pos] = torch.cat([k, v], -1)
        q = attend(q, *layer.chunk(2, -1), pos)
    return q


@form(BATCH, MAX_LEN, 2 * HEAD_DIM)
def a_number_clears_old_tokens_of_both(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0]], -1)
    kv[:, torch.tensor([1, 2])] = 0
    return attend(q, *kv.split(HEAD_DIM, -1), pos)


def inputs(n: int, begin: int) -> tuple[Tensor, ...]:
    return (*(torch.randn(BATCH, NUM_HEADS, n, HEAD_DIM) for _ in range(3)), torch.arange(begin, begin + n))


def run_beside_eager(fn: Step, step: Step, kv: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Run the compiled step and eager code on a plain cache; returns the cache of the compiled step."""
    expected_kv, begin = kv.clone(), 0
    for n in lengths:
        args = inputs(n, begin)
        begin += n
        torch.testing.assert_close(step(kv, *args), fn(expected_kv, *args), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain(kv), expected_kv, rtol=0, atol=0)
    return kv


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_every_form_equals_eager_code_in_a_lossless_format(fn: Step) -> None:
    """A second step gets packed ranges, which take another graph. The next test has a second step of other forms."""
    lengths = (66, 1) if fn in (one_head_is_split, layers_have_a_dimension_of_their_own) else (66,)
    kv = run_beside_eager(fn, compiled(fn, policy="float32"), torch.randn(FORMS[fn]), lengths)
    assert isinstance(kv, PackedRanges)
    assert all(isinstance(part, PackedTensor) for part in kv.parts)
    assert tuple(kv.shape) == FORMS[fn]
    sites = last_report().sites
    assert [site.rewritten for site in sites] == [True] * len(sites)


@pytest.mark.parametrize("fn", [heads_are_divided_in_two, merged_heads_are_split], ids=lambda fn: fn.__name__)
def test_a_form_equals_eager_code_on_packed_caches(fn: Step) -> None:
    kv = torch.randn(FORMS[fn])
    step = compiled(fn)
    step(kv, *inputs(3, 0))
    reference = kv.clone()
    assert isinstance(reference, PackedRanges)
    args = inputs(6, 3)
    assert_close(step(kv, *args), fn(reference, *args))
    assert_close(plain(kv), plain(reference))


def test_the_parts_have_the_names_of_chunks() -> None:
    compiled(one_head_is_split)(torch.randn(FORMS[one_head_is_split]), *inputs(1, 0))
    (site,) = last_report().sites
    assert [cache.source for cache in site.caches] == ["L['kv'].chunk(2, -1)[0]", "L['kv'].chunk(2, -1)[1]"]


def test_a_graph_without_ranges_reads_the_packed_tensor() -> None:
    kv = torch.randn(FORMS[one_head_is_split])
    compiled(one_head_is_split)(kv, *inputs(3, 0))
    assert isinstance(kv, PackedRanges)
    whole = compiled(lambda kv: kv.sum(-1) + kv[..., 3], on_unsupported="ignore")
    torch.testing.assert_close(whole(kv), plain(kv).sum(-1) + plain(kv)[..., 3])


# Growing caches


def grow(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    kv = torch.cat([kv, torch.cat([k[:, 0], v[:, 0]], -1)], 1)
    return attend(q, *kv.split(HEAD_DIM, -1), pos), kv


def grow_by_heads(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    kv = torch.cat([kv, torch.cat([k, v], -1)], 2)
    return attend(q, *kv.chunk(2, -1), pos), kv


@pytest.mark.parametrize(
    ("fn", "shape", "lengths"),
    [(grow, (BATCH, 20), (5, 1, 1, 40, 1)), (grow_by_heads, (BATCH, NUM_HEADS, 20), (5, 1, 1, 1))],
)
def test_a_cache_that_grows_is_packed_and_compiles_once_for_all_lengths(
    fn: Step, shape: tuple[int, ...], lengths: tuple[int, ...]
) -> None:
    counters.clear()
    step = compiled(fn, policy="float32")
    kv = torch.randn(*shape, 2 * HEAD_DIM)
    expected_kv, begin = kv.clone(), 20
    for n in lengths:
        args = inputs(n, begin)
        begin += n
        (out, kv), (expected, expected_kv) = step(kv, *args), fn(expected_kv, *args)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(plain(kv), expected_kv, rtol=0, atol=0)
    assert isinstance(kv, PackedRanges)
    assert {cache.kind for site in last_report().sites for cache in site.caches} == {"growing"}
    assert counters["stats"]["unique_graphs"] <= 3  # a plain cache, a prompt and single tokens


# Uses that are refused


def ranges_of_different_sizes(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0], v[:, 0]], -1)
    return attend(q, kv[..., :HEAD_DIM], kv[..., HEAD_DIM:], pos)


def overlapping_ranges(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0], v[:, 0]], -1)
    return attend(q, kv[..., 32 : 32 + HEAD_DIM], kv[..., :HEAD_DIM], pos)


def the_whole_is_summed_up(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Any:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0], v[:, 0]], -1)
    return attend(q, *kv.split(HEAD_DIM, -1)[:2], pos), kv.sum()


def channels_are_written_across_ranges(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos, 32 : 32 + HEAD_DIM] = k[:, 0]
    return attend(q, *kv.split(HEAD_DIM, -1)[:2], pos)


def part_of_a_range_is_written(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos, :32] = k[:, 0, :, :32]
    return attend(q, *kv.split(HEAD_DIM, -1)[:2], pos)


def ranges_change_places(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv.copy_(kv.roll(HEAD_DIM, -1))
    return attend(q, *kv.split(HEAD_DIM, -1)[:2], pos)


def the_tensor_is_cast(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
    kv[:, pos] = torch.cat([k[:, 0], v[:, 0], v[:, 0]], -1)
    keys, values, _ = kv.half().split(HEAD_DIM, -1)
    return attend(q.half(), keys, values, pos)


REFUSED = [
    ranges_of_different_sizes,
    overlapping_ranges,
    the_whole_is_summed_up,
    channels_are_written_across_ranges,
    part_of_a_range_is_written,
    ranges_change_places,
    the_tensor_is_cast,
]


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_other_uses_of_the_tensor_are_refused_with_a_reason_and_equal_eager_code(fn: Step) -> None:
    kv = torch.randn(BATCH, MAX_LEN, 3 * HEAD_DIM)
    expected_kv, args = kv.clone(), inputs(2, 5)
    out, expected = compiled(fn, on_unsupported="ignore")(kv, *args), fn(expected_kv, *args)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert type(kv) is Tensor
    assert torch.equal(kv, expected_kv)
    (site,) = last_report().sites
    assert site.reason_code, site
