"""Graphs may take the only dimension of sequences and heads for either: they share a packed cache.

Multi-query attention keeps [batch, tokens, head_dim]. Batched products read it as heads of one sequence, or as
sequences of one head, and a model may attend in one way to a prompt and in another to a token.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from calibrated_bases import based
from torch import Tensor, nn

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")

H, S, D = 4, 70, 32

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Takes queries [batch, n, heads * head_dim], keys, values and a mask [n, tokens]."""


def by_einsum(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bnhd,bsd->bhns", q.unflatten(2, (H, D)), keys) * D**-0.5
    return torch.einsum("bhns,bsd->bnhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), values).flatten(2)


def by_sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    keys, values = (x.unsqueeze(1).expand(-1, H, -1, -1) for x in (keys, values))
    q = q.unflatten(2, (H, D)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, keys, values, mask).transpose(1, 2).flatten(2)


def of_one_sequence(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """For batch 1: the query heads are the batch of three dimensions."""
    q = q[0].unflatten(1, (H, D)).transpose(0, 1)
    return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True).transpose(0, 1).flatten(1)[None]


def by_bmm(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """For one token: the query heads of a sequence are the rows of a matrix, as in GPTBigCode."""
    scores = torch.bmm(q.view(-1, H, D), keys.mT) * D**-0.5
    return torch.bmm(scores.masked_fill(~mask, -torch.inf).softmax(-1), values).view(q.shape)


def in_three_dimensions(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """For one token: each head of each sequence is an entry of the batch."""
    keys, values = (x.repeat_interleave(H, 0) for x in (keys, values))
    return F.scaled_dot_product_attention(q.view(-1, 1, D), keys, values, mask).view(-1, 1, H * D)


class MultiQuery(nn.Module):
    """Multi-query attention with a static cache."""

    def __init__(self, batch: int, prompt: Attend, token: Attend) -> None:
        super().__init__()
        self.attend_prompt, self.attend_token = prompt, token
        self.register_buffer("keys", torch.zeros(batch, S, D))
        self.register_buffer("values", torch.zeros(batch, S, D))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.keys.index_copy_(1, pos, k), self.values.index_copy_(1, pos, v)
        attend = self.attend_token if q.shape[1] == 1 else self.attend_prompt
        return attend(q, self.keys, self.values, torch.arange(S) <= pos[:, None])


def new_tokens(batch: int, n: int) -> list[Tensor]:
    return [torch.randn(batch, n, H * D), torch.randn(batch, n, D), torch.randn(batch, n, D)]


def compiled(fn: Callable[..., Tensor], **options: object) -> Callable[..., Tensor]:
    return torch.compile(fn, backend="kvquant", options={"policy": {"default": {"dtype": "float32"}}, **options})


FORMS = [
    (1, of_one_sequence, by_bmm),
    (1, of_one_sequence, in_three_dimensions),
    (3, by_einsum, by_bmm),
    (3, by_sdpa, in_three_dimensions),
]


@pytest.mark.parametrize(("batch", "prompt", "token"), FORMS)
@torch.no_grad()
def test_a_prompt_and_its_tokens_share_a_multi_query_cache(batch: int, prompt: Attend, token: Attend) -> None:
    model, plain = (MultiQuery(batch, prompt, token) for _ in range(2))
    run = compiled(model)
    for start, n in ((0, 5), (5, 1), (6, 1)):
        inputs = [*new_tokens(batch, n), torch.arange(start, start + n)]
        torch.testing.assert_close(run(*inputs), plain(*inputs))
        assert [site.reason for site in last_report().sites] == [None]
    assert isinstance(model.keys, PackedTensor)
    torch.testing.assert_close(model.keys.dequantize(), plain.keys)


@pytest.mark.parametrize(("one", "other"), [(by_einsum, by_bmm), (by_bmm, by_einsum)])
@torch.no_grad()
def test_two_attentions_of_one_graph_share_a_multi_query_cache(one: Attend, other: Attend) -> None:
    def both(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
        mask = torch.arange(S) <= pos
        return torch.stack([one(q, keys, values, mask), other(q.sin(), keys, values, mask)])

    caches, new, pos = [torch.randn(3, S, D) for _ in range(2)], new_tokens(3, 1), torch.tensor([9])
    expected = both(*new, *(cache.clone() for cache in caches), pos)
    torch.testing.assert_close(compiled(both)(*new, *caches, pos), expected)
    assert [type(cache) for cache in caches] == [PackedTensor] * 2


@torch.no_grad()
def test_a_write_for_each_sequence_tells_sequences_from_heads() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys[torch.arange(3), pos], values[torch.arange(3), pos] = k[:, 0], v[:, 0]
        return by_bmm(q, keys, values, torch.arange(S) <= pos[:, None, None])

    caches, new, pos = [torch.randn(3, S, D) for _ in range(2)], new_tokens(3, 1), torch.tensor([9, 4, 69])
    expected = step(*new, *(cache.clone() for cache in caches), pos)
    torch.testing.assert_close(compiled(step)(*new, *caches, pos), expected)
    assert isinstance(caches[0], PackedTensor)
    assert caches[0].axes == "btd"


def of_all(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)


FOUR_DIMENSIONS: dict[str, tuple[tuple[int, ...], Attend]] = {
    "the only sequence": ((1, H, S, D), lambda q, k, v, mask: F.scaled_dot_product_attention(q[0], k[0], v[0])[None]),
    "the only head": (
        (3, 1, S, D),
        lambda q, k, v, mask: torch.bmm((torch.bmm(q[:, :, 0], k[:, 0].mT) * D**-0.5).softmax(-1), v[:, 0])[:, :, None],
    ),
}


@pytest.mark.parametrize("form", FOUR_DIMENSIONS)
@torch.no_grad()
def test_caches_of_four_dimensions_with_one_sequence_or_one_head_are_shared_too(form: str) -> None:
    shape, attend = FOUR_DIMENSIONS[form]

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k), values.index_copy_(2, pos, v)
        return of_all(q, keys, values) if q.shape[2] > 1 else attend(q, keys, values, q)

    caches = [torch.randn(shape) for _ in range(2)]
    plain, run = [cache.clone() for cache in caches], compiled(step)
    for n in (3, 1):
        new = [torch.randn(shape[0], heads, n, D) for heads in (H, shape[1], shape[1])]
        torch.testing.assert_close(run(*new, *caches, torch.arange(n)), step(*new, *plain, torch.arange(n)))
        assert [site.reason for site in last_report().sites] == [None]


OTHER_PLACES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "tokens for sequences": ((6, 6, D), lambda cache: cache.transpose(0, 1)[:, None]),
    "heads before sequences": ((6, S, D), lambda cache: cache.view(3, 2, S, D).transpose(0, 1)),
    "a head of several": ((6, S, D), lambda cache: cache[1:2, None]),
    "every other head": ((6, S, D), lambda cache: cache[::2][None]),
}


@pytest.mark.parametrize("is_first", [True, False], ids=["packed by the first graph", "packed by the first attention"])
@pytest.mark.parametrize("form", OTHER_PLACES)
@torch.no_grad()
def test_reads_that_name_other_bytes_are_refused_and_right(form: str, is_first: bool) -> None:
    shape, view = OTHER_PLACES[form]
    tokens = shape[1]

    def step(q: Tensor, new: Tensor, keys: Tensor, values: Tensor, pos: Tensor, ways: str) -> Tensor:
        keys.index_copy_(1, pos, new), values.index_copy_(1, pos, new)
        parts = []
        if "1" in ways:
            scores = torch.bmm(q, keys.mT) * D**-0.5
            parts.append(torch.bmm(scores.softmax(-1), values))
        if "2" in ways:
            viewed = view(keys)
            own = q.reshape(-1)[: viewed.shape[0] * viewed.shape[1] * D].view(*viewed.shape[:2], 1, D)
            parts.append(F.scaled_dot_product_attention(own, viewed, view(values)))
        return torch.cat([part.flatten() for part in parts])

    caches, pos = [torch.randn(shape) for _ in range(2)], torch.tensor([tokens - 1])
    plain, run = [cache.clone() for cache in caches], compiled(step, on_unsupported="ignore")
    for ways in ("1", "2") if is_first else ("12",):
        q, new = torch.randn(6, H, D), torch.randn(6, 1, D)
        expected = step(q, new, *plain, pos, ways)
        torch.testing.assert_close(run(q, new, *caches, pos, ways), expected)
    assert None not in [site.reason for site in last_report().sites]


@torch.no_grad()
def test_several_sequences_of_several_heads_are_not_taken_for_each_other() -> None:
    def step(q: Tensor, new: Tensor, keys: Tensor, values: Tensor, pos: Tensor, heads_first: bool) -> Tensor:
        keys.index_copy_(2, pos, new), values.index_copy_(2, pos, new)
        if heads_first:
            keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        return F.scaled_dot_product_attention(q, keys, values)

    caches, pos = [torch.randn(2, 2, S, D) for _ in range(2)], torch.tensor([9])
    plain, run = [cache.clone() for cache in caches], compiled(step, on_unsupported="ignore")
    for heads_first in (True, False):
        q, new = torch.randn(2, 2, 2, 1, D)
        expected = step(q, new, *plain, pos, heads_first)
        torch.testing.assert_close(run(q, new, *caches, pos, heads_first), expected)
    assert [site.reason_code for site in last_report().sites] == ["packed_otherwise"]


@torch.no_grad()
def test_a_batch_of_another_size_is_right() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        batch = q.shape[0]
        keys[:batch, pos], values[:batch, pos] = k, v
        return by_bmm(q, keys[:batch], values[:batch], torch.arange(S) <= pos)

    caches = [torch.randn(3, S, D) for _ in range(2)]
    plain, run = [cache.clone() for cache in caches], compiled(step, on_unsupported="ignore")
    for pos, batch in enumerate((3, 1)):
        inputs = new_tokens(batch, 1)
        expected = step(*inputs, *plain, torch.tensor([pos]))
        torch.testing.assert_close(run(*inputs, *caches, torch.tensor([pos])), expected)


@torch.no_grad()
def test_a_format_that_is_calibrated_for_each_head_is_refused_if_sequences_are_taken_for_heads() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(1, pos, k), values.index_copy_(1, pos, v)
        return by_einsum(q, keys, values, torch.arange(S) <= pos)

    name = based("int3_unrotated_mean", 3, D).name
    layouts = [PackedLayout(name, role, D) for role in ("key", "value")]
    caches = [PackedTensor.from_dense(torch.randn(3, S, D), layout, "htd") for layout in layouts]
    plain, new, pos = [cache.dequantize() for cache in caches], new_tokens(3, 1), torch.tensor([9])
    out = compiled(step, on_unsupported="ignore")(*new, *caches, pos)
    (site,) = last_report().sites
    assert "attention takes heads of the key cache for sequences" in str(site.reason)
    torch.testing.assert_close(out, step(*new, *plain, pos), rtol=0, atol=0.2)
