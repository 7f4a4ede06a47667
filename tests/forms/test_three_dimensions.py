"""Caches of three dimensions, which lack the dimension of heads or of the batch, are packed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

N, S, D = 6, 70, 64


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor | None) -> Tensor:
    keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
    return F.scaled_dot_product_attention(q, keys, values, mask)


@pytest.mark.parametrize("mask_shape", [None, (3, S), (1, 3, S), (N, 1, S)])
def test_caches_of_three_dimensions_are_packed(mask_shape: tuple[int, ...] | None) -> None:
    new = [torch.randn(N, 3, D) for _ in range(3)]
    caches = [torch.randn(N, S, D) for _ in range(2)]
    mask = None if mask_shape is None else (torch.rand(mask_shape) < 0.5) | (torch.arange(S) < 1)
    compiled = torch.compile(step, backend="kvquant", options={"policy": "int8_per_token_head"})
    expected = step(*new, *(cache.clone() for cache in caches), torch.arange(3), mask)
    out = compiled(*new, *caches, torch.arange(3), mask)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2


def test_query_heads_may_share_the_heads_of_one_sequence() -> None:
    new, caches = [torch.randn(n, 1, D) for n in (N, 2, 2)], [torch.randn(2, S, D) for _ in range(2)]

    def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    expected = grouped(*new, *(cache.clone() for cache in caches), torch.tensor([3]))
    compiled = torch.compile(grouped, backend="kvquant", options={"policy": "int8_per_token_head"})
    torch.testing.assert_close(compiled(*new, *caches, torch.tensor([3])), expected, rtol=0, atol=0.03)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2


MERGED: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "heads of two sequences": ((2, 6, S, D), lambda cache: cache.flatten(0, 1)),
    "repeated heads of two sequences": ((2, 3, S, D), lambda cache: cache.repeat_interleave(2, 1).view(12, S, D)),
    "heads that are merged, then repeated": ((2, 3, S, D), lambda cache: cache.flatten(0, 1).repeat_interleave(2, 0)),
    "expanded heads": ((2, 3, S, D), lambda cache: cache[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, S, D)),
    "repeated heads of one sequence": ((1, 6, S, D), lambda cache: cache.squeeze(0).repeat_interleave(2, 0)),
    "the only sequence": ((1, 6, S, D), lambda cache: cache[0].repeat_interleave(2, 0)),
    "the only sequence, from the last": ((1, 6, S, D), lambda cache: cache[-1].repeat_interleave(2, 0)),
    "the only head": ((12, 1, S, D), lambda cache: cache[:, 0]),
    "repeated heads of a cache without a batch": ((6, S, D), lambda cache: cache.repeat_interleave(2, 0)),
    "one head of one sequence": ((1, S, D), lambda cache: cache.expand(12, -1, -1)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mask_shape", [(3, S), (1, 3, S), (12, 3, S)])
@pytest.mark.parametrize("form", MERGED)
def test_sdpa_of_three_dimensions_reads_heads_and_sequences(form: str, mask_shape: tuple[int, ...]) -> None:
    shape, read = MERGED[form]

    def merged(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
        keys.index_copy_(-2, pos, k), values.index_copy_(-2, pos, v)
        return F.scaled_dot_product_attention(q.view(-1, 3, D), read(keys), read(values), mask)

    heads = (2, 6) if shape[0] == 2 else (12,)
    new = [torch.randn(*heads, 3, D), *(torch.randn(*shape[:-2], 3, D) for _ in range(2))]
    caches = [torch.randn(shape) for _ in range(2)]
    mask = (torch.rand(mask_shape) < 0.5) | (torch.arange(S) < 1)
    expected = merged(*new, *(cache.clone() for cache in caches), torch.arange(3), mask)
    compiled = torch.compile(merged, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    torch.testing.assert_close(compiled(*new, *caches, torch.arange(3), mask), expected)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2


@pytest.mark.parametrize(("num_tokens", "is_packed"), [(1, True), (3, False)])
def test_query_heads_folded_into_tokens_are_packed_for_one_token_and_refused_for_more(
    num_tokens: int, is_packed: bool
) -> None:
    """Two query heads of each token lie in one dimension of the products, and in two where the mask is applied."""

    def folded(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys[:, pos], values[:, pos] = k, v
        scores = torch.bmm(q, keys.mT).unflatten(1, (2, -1)) * D**-0.5
        weights = scores.masked_fill(torch.arange(S) > pos[:, None], float("-inf")).softmax(-1)
        return torch.bmm(weights.flatten(1, 2), values)

    new = [torch.randn(N, tokens, D) for tokens in (2 * num_tokens, num_tokens, num_tokens)]
    caches = [torch.randn(N, S, D) for _ in range(2)]
    expected = folded(*new, *(cache.clone() for cache in caches), torch.arange(num_tokens))
    compiled = torch.compile(folded, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}})
    torch.testing.assert_close(compiled(*new, *caches, torch.arange(num_tokens)), expected)
    assert isinstance(caches[0], PackedTensor) == is_packed
    assert ("unflatten regroups its scores" in str(last_report())) == (not is_packed)


B, H = 3, 4


def rolled(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache.copy_(cache.roll(-2, 1))
    cache[:, -2:] = new


def in_a_mask(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    mask = torch.arange(S)[None, :, None] == (pos[0] + torch.arange(B))[:, None, None]
    cache.copy_(torch.where(mask, new[:, :1], cache))


def per_sequence(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[torch.arange(B), pos[:1] + torch.arange(B)] = new[:, 0]


def one_vector_for_all(cache: Tensor, new: Tensor, pos: Tensor) -> None:
    cache[pos[:1] + torch.arange(B), torch.arange(B)] = new[0, 0]


WRITES: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], object]]] = {
    "index_put": ("btd", lambda cache, new, pos: cache.index_copy_(1, pos, new)),
    "tokens first": ("tbd", lambda cache, new, pos: cache.index_copy_(0, pos, new.transpose(0, 1))),
    "through a view": ("tbd", lambda cache, new, pos: cache.transpose(0, 1).index_copy_(1, pos, new)),
    "one token": ("btd", lambda cache, new, pos: cache.select(1, 5).copy_(new[:, 0])),
    "per sequence": ("btd", per_sequence),
    "one vector for all": ("tbd", one_vector_for_all),
    "slice": ("btd", lambda cache, new, pos: cache.narrow(-2, 5, 2).copy_(new)),
    "scatter": ("btd", lambda cache, new, pos: cache.scatter_(1, pos[None, :, None].expand(B, -1, D), new)),
    "some sequences": ("btd", lambda cache, new, pos: cache[1:].index_copy_(1, pos, new[1:])),
    "where": ("btd", in_a_mask),
    "rolled": ("btd", rolled),
}


def attend_to_one_head(q: Tensor, cache: Tensor, axes: str) -> Tensor:
    keys = (cache if axes == "btd" else cache.transpose(0, 1))[:, None]
    return F.scaled_dot_product_attention(q, keys, keys, enable_gqa=True)


def test_every_form_of_write_is_recognised_in_three_dimensions() -> None:
    def written(q: Tensor, new: Tensor, pos: Tensor, caches: list[Tensor]) -> list[Tensor]:
        for cache, (_, write) in zip(caches, WRITES.values(), strict=True):
            write(cache, new, pos)
        return [attend_to_one_head(q, cache, axes) for cache, (axes, _) in zip(caches, WRITES.values(), strict=True)]

    q, new, pos = torch.randn(B, H, 2, D), torch.randn(B, 2, D), torch.arange(2) + 63
    plain = [torch.randn((B, S, D) if axes == "btd" else (S, B, D)) for axes, _ in WRITES.values()]
    layout = PackedLayout("int8_per_token_head", "key", D)
    packed = [PackedTensor.from_dense(x, layout, axes) for x, (axes, _) in zip(plain, WRITES.values(), strict=True)]
    expected = written(q, new, pos, packed)
    compiled = torch.compile(written, backend="kvquant", options={"policy": "int8_per_token_head"})
    torch.testing.assert_close(compiled(q, new, pos, plain), expected, rtol=1e-4, atol=1e-5)
    assert {site.reason for site in last_report().sites} == {None}
    for name, cache, eager in zip(WRITES, plain, packed, strict=True):
        assert isinstance(cache, PackedTensor), name
        assert torch.equal(cache.dequantize(), eager.dequantize()), name


def test_caches_of_three_dimensions_may_be_new_and_read_in_part() -> None:
    def returned(q: Tensor, new: Tensor) -> tuple[Tensor, ...]:
        rows, made = torch.cat([new, -new], 1).sin(), torch.zeros(B, S, D)
        made.index_copy_(1, torch.arange(2), new)
        first, _ = made.split([40, 30], 1)
        outs = [attend_to_one_head(q, x, "btd") for x in (rows, first, made[:, :1])]
        return torch.cat(outs), rows, made

    q, new = torch.randn(B, H, 2, D), torch.randn(B, 2, D)
    out, *caches = torch.compile(returned, backend="kvquant", options={"policy": "int8_per_token_head"})(q, new)
    expected, *plain = returned(q, new)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.03)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2
    assert [cache.shape for cache in caches] == [x.shape for x in plain]


def test_the_dimension_of_tokens_is_unknown_in_rows_of_a_single_token() -> None:
    def returned(q: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        rows = new.sin()
        return attend_to_one_head(q, rows, "btd"), rows

    q, new = torch.randn(B, H, 1, D), torch.randn(B, 1, D)
    options = {"policy": "int8_per_token_head", "on_unsupported": "ignore"}
    torch.testing.assert_close(torch.compile(returned, backend="kvquant", options=options)(q, new), returned(q, new))
    (site,) = last_report().sites
    assert (site.reason_code, "with a single token" in str(site.reason)) == ("unknown_read", True)
