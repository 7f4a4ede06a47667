"""Caches of latents [batch, tokens, channels] are packed like caches with a dimension of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("without_code_generation", "seed_without_grad")

BATCH, NUM_HEADS, MAX_LEN, RANK, HEAD_DIM = 2, 4, 70, 48, 32
WEIGHT = torch.randn(2 * NUM_HEADS * HEAD_DIM, RANK, generator=torch.Generator().manual_seed(0)) / 7

Step = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""(query [B, H, n, HEAD_DIM], new latents [B, n, RANK], cache, positions [n]) -> output, or output and cache."""


def attend(q: Tensor, latents: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention on keys and values of all heads, projected from [batch, tokens, channels]."""
    key, value = F.linear(latents, WEIGHT).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2).chunk(2, -1)
    return F.scaled_dot_product_attention(q, key, value, attn_mask=mask)


def up_to(positions: Tensor) -> Tensor:
    return torch.arange(MAX_LEN) <= positions[:, None]


def fixed(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache.index_copy_(1, positions, new)
    return attend(q, cache, up_to(positions))


def written_out(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache[:, positions] = new
    key, value = torch.einsum("btr,khdr->kbhtd", cache, WEIGHT.view(2, NUM_HEADS, HEAD_DIM, RANK))
    return (q @ key.mT).masked_fill(~up_to(positions), -1e9).softmax(-1) @ value


def tokens_first(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache[positions] = new.transpose(0, 1)
    return attend(q, cache.transpose(0, 1), up_to(positions))


def a_window(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    full = torch.cat([cache, new], 1)
    out = attend(q, full)
    cache.copy_(full[:, -MAX_LEN:])
    return out


def growing(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache = torch.cat([cache, new], 1)
    return attend(q, cache), cache


def sliding(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache = torch.cat([cache, new], 1)
    return attend(q, cache), cache[:, -65:]


KINDS: dict[Step, str] = {
    fixed: "static",
    written_out: "static",
    tokens_first: "static",
    a_window: "static",
    growing: "growing",
    sliding: "growing",
}


def steps(step: Any, cache: Tensor) -> tuple[list[Tensor], Tensor]:
    """The outputs of a chunk of three tokens and of two single tokens, and the cache after them."""
    generator, outs, first = torch.Generator().manual_seed(1), [], 30
    for n in (3, 1, 1):
        q = torch.randn(BATCH, NUM_HEADS, n, HEAD_DIM, generator=generator)
        new = torch.randn(BATCH, n, RANK, generator=generator)
        result = step(q, new, cache, torch.arange(n) + first)
        out, cache = result if isinstance(result, tuple) else (result, cache)
        outs.append(out)
        first += n
    return outs, cache


def compiled(step: Step, on_unsupported: str = "error") -> Any:
    torch._dynamo.reset()
    options = {"policy": "int8_per_token_head", "on_unsupported": on_unsupported}
    return torch.compile(step, backend="kvquant", options=options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", KINDS, ids=lambda step: step.__name__)
def test_latents_of_three_dimensions_are_packed_and_dequantized_for_the_projection(step: Step) -> None:
    plain = torch.randn((MAX_LEN, BATCH, RANK) if step is tokens_first else (BATCH, MAX_LEN, RANK))
    layout = PackedLayout("int8_per_token_head", "key", RANK)
    axes = "tbd" if step is tokens_first else "btd"
    packed = PackedTensor.from_dense(plain, layout, axes, growing=KINDS[step] == "growing")
    expected, eager = steps(step, packed)
    outs, cache = steps(compiled(step), plain)
    torch.testing.assert_close(outs, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(cache, PackedTensor)
    assert cache.shape == eager.shape
    assert torch.equal(cache.dequantize(), eager.dequantize())
    (site,) = last_report().sites
    assert site.attention.endswith("computed from latents")
    assert [(summary.role, summary.kind) for summary in site.caches] == [("key", KINDS[step])]


def also_summed_up(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    return fixed(q, new, cache, positions) + cache.sum()


def scaled_and_not_projected(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    cache.index_copy_(1, positions, new)
    key = cache[:, None, :, :HEAD_DIM].expand(-1, NUM_HEADS, -1, -1) * 2
    return F.scaled_dot_product_attention(q, key, key)


def a_token_in_front(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    tokens = torch.cat([cache, new], 1)
    return attend(tokens[:, None, :, :HEAD_DIM].expand(-1, NUM_HEADS, -1, -1), tokens), tokens


def padding_of_an_encoder_made_zero(q: Tensor, new: Tensor, cache: Tensor, positions: Tensor) -> Any:
    return attend(q, cache.masked_fill(torch.arange(MAX_LEN)[:, None] > 50, 0.0))


REFUSED: dict[Step, str] = {
    also_summed_up: "used_elsewhere",
    scaled_and_not_projected: "computed_from_cache",
    a_token_in_front: "no_cache",
    padding_of_an_encoder_made_zero: "no_cache",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_refused_latents_have_a_reason_and_are_computed_as_the_model_wrote_them(step: Step) -> None:
    given = [torch.randn(BATCH, NUM_HEADS, 2, HEAD_DIM), torch.randn(BATCH, 2, RANK), torch.randn(BATCH, MAX_LEN, RANK)]
    cache = given[2].clone()
    out = compiled(step, "ignore")(*given[:2], cache, torch.arange(2))
    torch.testing.assert_close(out, step(*given, torch.arange(2)))
    torch.testing.assert_close(cache, given[2], rtol=0, atol=0)
    assert [site.reason_code for site in last_report().sites] == [REFUSED[step]]
