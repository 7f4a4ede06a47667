"""Values after the written tokens of a plain cache do not change which tokens are kept in full precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import in_turn
from torch import Tensor

import kvcompile
from kvcompile import PackedTensor
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.residual import header_of
from kvcompile.packed import tokens
from kvcompile.packed.stack import PackedStack

ROOM, HEADS, HEAD_DIM = 192, 2, 64

Step = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _node_by_node(without_code_generation: None) -> None:
    pass


def apart(q: Tensor, new: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
    for cache, x in zip(caches, new, strict=True):
        cache[:, :, at] = x
    return F.scaled_dot_product_attention(q, *caches, attn_mask=torch.arange(ROOM)[None] <= at[:, None])


def in_one_tensor(q: Tensor, new: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
    (kv,) = caches
    kv[0, :, :, at] = new[0]
    kv[1, :, :, at] = new[1]
    return F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=torch.arange(ROOM)[None] <= at[:, None])


def of_two_lengths(q: Tensor, new: Tensor, caches: list[Tensor], at: Tensor) -> Tensor:
    """The second sequence is 70 tokens shorter than the first."""
    at = at - torch.tensor([[0], [70]])
    for cache, x in zip(caches, new, strict=True):
        cache.scatter_(2, at[:, None, :, None].expand_as(x), x)
    visible = torch.arange(ROOM) <= at[:, :, None]
    return F.scaled_dot_product_attention(q, *caches, attn_mask=visible[:, None])


def outputs(step: Step, policy: str, behind: float) -> Tensor:
    """Eager code fills 100 tokens of caches; all later tokens are noise times ``behind``. Then steps are compiled."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 2, HEADS, ROOM, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    kv = noise * behind
    lengths = (100, 30) if step is of_two_lengths else (100, 100)
    prompt = torch.randn(2, 2, HEADS, 100, HEAD_DIM, generator=generator)
    for sequence, length in enumerate(lengths):
        kv[:, sequence, :, :length] = prompt[:, sequence, :, :length]
    caches = [kv] if step is in_one_tensor else [kv[0].clone(), kv[1].clone()]
    del kv
    compiled = torch.compile(step, backend="kvquant", options={"policy": policy, "on_unsupported": "error"})
    result = []
    for position in range(100, 103):
        q, new = (torch.randn(*n, 2, HEADS, 1, HEAD_DIM, generator=generator) for n in ((), (2,)))
        result.append(compiled(q, new, caches, torch.tensor([position])))
    assert all(isinstance(cache, (PackedTensor, PackedStack)) for cache in caches)
    assert kvcompile.last_report().totals.plain_calls == 0
    return torch.cat(result, 2)


@pytest.mark.parametrize(
    ("step", "policy"),
    in_turn([apart, in_one_tensor, of_two_lengths], ["int4", "turboquant_4bit_r128"]),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_values_behind_the_written_tokens_change_nothing(step: Step, policy: str) -> None:
    expected = outputs(step, policy, behind=0.0)
    torch.testing.assert_close(outputs(step, policy, behind=1e4), expected)


@pytest.mark.parametrize("step", [apart, in_one_tensor], ids=lambda step: step.__name__)
def test_the_header_of_a_cache_is_computed_once(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def recorded(layout: PackedLayout, x: Tensor, num_written: Tensor | None = None) -> Tensor:
        computed.append(num_written)
        return header_of(layout, x, num_written)

    monkeypatch.setattr(tokens, "header_of", recorded)
    outputs(step, "turboquant_4bit_r128", behind=1.0)
    assert computed == [torch.tensor(100)] * 2, "one header of keys and one of values"


def returned(q: Tensor, new: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = keys.index_copy(2, at, new[0]), values.index_copy(2, at, new[1])
    mask = torch.arange(ROOM)[None] <= at[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask), keys, values


def outputs_of_returned(policy: str, behind: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, 2, HEADS, ROOM, HEAD_DIM, generator=generator)
    kv[..., 100:, :] *= behind
    compiled = torch.compile(returned, backend="kvquant", options={"policy": policy, "on_unsupported": "error"})
    caches, result = list(kv), []
    for position in range(100, 103):
        q, new = (torch.randn(*n, 2, HEADS, 1, HEAD_DIM, generator=generator) for n in ((), (2,)))
        out, *caches = compiled(q, new, *caches, torch.tensor([position]))
        result.append(out)
    assert all(isinstance(cache, PackedTensor) for cache in caches)
    return torch.cat(result, 2)


@pytest.mark.parametrize("policy", ["int4", "turboquant_4bit_r128"])
def test_values_behind_the_tokens_of_a_cache_that_is_returned_change_nothing(policy: str) -> None:
    expected = outputs_of_returned(policy, behind=0.0)
    torch.testing.assert_close(outputs_of_returned(policy, behind=1e4), expected)
