"""A model may grow the parts of a cache and join them, or grow a view of it: the cache grows as a whole.

A lossless policy packs the caches, so compiled steps equal eager code. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kvcompile

BATCH, HEADS, HEAD_DIM, PAST = 2, 3, 32, 62
LOSSLESS = {"default": {"dtype": "float32"}}

Step = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

pytestmark = pytest.mark.usefixtures("fresh_compiler", "seed_without_grad")

node_by_node = pytest.mark.usefixtures("without_code_generation")


def gpt2(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    """openai/gpt-2 in PyTorch: keys and values are stacked again in every layer."""
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v])


def gpt2_transposed(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    """graykode/gpt-2-Pytorch: attention reads keys with the tokens last."""
    k = torch.cat([past[0].transpose(-2, -1), k.transpose(-2, -1)], -1)
    v = torch.cat([past[1], v], -2)
    weights = torch.softmax(q @ k / HEAD_DIM**0.5, -1)
    return weights @ v, torch.stack([k.transpose(-2, -1), v])


def stacked_after_the_batch(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    old_k, old_v = past.unbind(1)
    k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v], 1)


def neox(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    """GPT-NeoX: [tokens, batch, heads, head_dim]."""
    past_k, past_v = past
    k, v = (torch.cat([old, x.permute(2, 0, 1, 3)], 0) for old, x in ((past_k, k), (past_v, v)))
    out = F.scaled_dot_product_attention(q, k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3))
    return out, torch.stack((k, v))


def wenet(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    """WeNet: keys and values share the last dimension."""
    old_k, old_v = torch.split(past, past.size(-1) // 2, -1)
    k, v = torch.cat([old_k, k], 2), torch.cat([old_v, v], 2)
    weights = torch.softmax(q @ k.transpose(-2, -1) / HEAD_DIM**0.5, -1)
    return weights @ v, torch.cat((k, v), -1)


STACK = (2, BATCH, HEADS, PAST, HEAD_DIM)
PARTS: dict[str, tuple[Step, tuple[int, ...]]] = {
    "GPT-2": (gpt2, STACK),
    "GPT-2, keys transposed": (gpt2_transposed, STACK),
    "a stack after the batch": (stacked_after_the_batch, (BATCH, 2, HEADS, PAST, HEAD_DIM)),
    "GPT-NeoX": (neox, (2, PAST, BATCH, HEADS, HEAD_DIM)),
    "WeNet": (wenet, (BATCH, HEADS, PAST, 2 * HEAD_DIM)),
}


def fairseq(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor) -> tuple[Tensor, ...]:
    """fairseq: the cache is viewed with batch and heads in one dimension, where it grows, and viewed back."""
    merged = BATCH * HEADS
    q, k, v = (x.reshape(merged, -1, HEAD_DIM) for x in (q * HEAD_DIM**-0.5, k, v))
    k = torch.cat([past_k.view(merged, -1, HEAD_DIM), k], 1)
    v = torch.cat([past_v.view(merged, -1, HEAD_DIM), v], 1)
    weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)), -1)
    out = torch.bmm(weights, v).view(BATCH, HEADS, -1, HEAD_DIM)
    return out, k.view(BATCH, HEADS, -1, HEAD_DIM), v.view(BATCH, HEADS, -1, HEAD_DIM)


def compiled(step: Any, **options: Any) -> Any:
    packing = {"policy": LOSSLESS, "on_unsupported": "error", **options.pop("options", {})}
    return torch.compile(step, backend="kvquant", options=packing, **options)


def rows(n: int = 1) -> list[Tensor]:
    return list(torch.randn(3, BATCH, HEADS, n, HEAD_DIM))


def check_steps(step: Any, run: Any, caches: list[Tensor], lengths: tuple[int, ...] = (1, 1, 1)) -> None:
    held = [cache.clone() for cache in caches]
    for n in lengths:
        new = rows(n)
        out, *held = run(*new, *held)
        expected, *caches = step(*new, *caches)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert all(type(cache) is not Tensor for cache in held), "the caches are packed"
        for cache, other in zip(held, caches, strict=True):
            torch.testing.assert_close(cache.clone() * 1, other, rtol=0, atol=0)


@pytest.mark.sampled(2)
@node_by_node
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "dynamic"])
@pytest.mark.parametrize(("step", "shape"), PARTS.values(), ids=PARTS.keys())
def test_parts_that_grow_alone_are_packed(step: Step, shape: tuple[int, ...], dynamic: bool | None) -> None:
    check_steps(step, compiled(step, dynamic=dynamic), [torch.randn(shape)])


@node_by_node
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "dynamic"])
def test_a_view_that_grows_is_packed(dynamic: bool | None) -> None:
    caches = [torch.randn(BATCH, HEADS, PAST, HEAD_DIM) for _ in range(2)]
    check_steps(fairseq, compiled(fairseq, dynamic=dynamic), caches, (1, 1, 3))


def test_generated_code_of_a_dynamic_step_knows_the_number_of_tokens() -> None:
    """Keys and values have a symbol each for their tokens, and only one symbol is an input of the graph."""
    caches = [torch.randn(BATCH, HEADS, PAST, HEAD_DIM) for _ in range(2)]
    check_steps(fairseq, compiled(fairseq), caches)


def returns_a_part(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v]), k


def exchanges_parts(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([v, k])


def computes_values_from_the_new_keys(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    k = torch.cat([past[0], k], 2)
    v = torch.cat([past[1], v + k.mean(2, keepdim=True)], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v])


def drops_a_part(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v])


def divides_new_tokens(q: Tensor, k: Tensor, v: Tensor, past: Tensor) -> tuple[Tensor, ...]:
    k = torch.cat([past[0], k[:, :, :1], k[:, :, 1:]], 2)
    v = torch.cat([past[1], v[:, :, :2], v[:, :, 2:]], 2)
    return F.scaled_dot_product_attention(q, k, v), torch.stack([k, v])


OTHERS = [
    returns_a_part,
    exchanges_parts,
    computes_values_from_the_new_keys,
    drops_a_part,
    divides_new_tokens,
]


@node_by_node
@pytest.mark.parametrize("step", OTHERS, ids=lambda step: step.__name__)
def test_other_joins_stay_as_the_model_computes_them(step: Step) -> None:
    num_parts = 3 if step is drops_a_part else 2
    past, new = torch.randn(num_parts, BATCH, HEADS, PAST, HEAD_DIM), rows(3)
    results = compiled(step, options={"on_unsupported": "ignore"})(*new, past.clone())
    expected = step(*new, past)
    for result in (*results[2:], *expected[2:]):
        result.zero_()  # the joined cache is another tensor
    torch.testing.assert_close([x * 1 for x in results], [x * 1 for x in expected], rtol=1e-4, atol=1e-5)


@node_by_node
def test_a_part_that_is_read_by_its_place_in_memory_stays_a_tensor_of_its_own() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, past: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        out, other = gpt2(q, k, v, other)
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return out, other, torch.stack([k, v]), v.as_strided((2, 5), (5, 1), 7) * 1

    pasts, new = torch.randn(2, *STACK), rows()
    results = compiled(step)(*new, *pasts.clone())
    torch.testing.assert_close([x * 1 for x in results], list(step(*new, *pasts)), rtol=1e-4, atol=1e-5)


@node_by_node
def test_the_report_counts_the_parts_as_one_growing_cache() -> None:
    compiled(gpt2)(*rows(), torch.randn(STACK))
    (site,) = kvcompile.last_report().sites
    assert site.rewritten
