"""Keys and values in one tensor that grows by ``cat``: graphs return and take a stack of packed caches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_caches import INT8, quantized, values
from stack_forms import BATCH, HEAD_DIM, NUM_KV_HEADS, assert_close, compiled, index_copy, inputs, packed_parts, plain
from torch import Tensor
from torch._dynamo.utils import counters

from kvcompile import last_report
from kvcompile.packed.stack import PackedStack, unstacked
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")

Step = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def attend(q: Tensor, keys: Tensor, values: Tensor, pos: Tensor, **kwargs: float) -> Tensor:
    mask = torch.arange(keys.shape[2]) <= pos[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True, **kwargs)


def roles_first(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    kv = torch.cat([kv, torch.stack([k, v])], dim=-2)
    return attend(q, kv[0], kv[1], pos), kv


def sequences_first(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    kv = torch.cat([kv, torch.stack([k, v], 1)], dim=3)
    keys, values = kv.unbind(1)
    return attend(q, keys, values, pos), kv


def roles_within_tokens(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    kv = torch.cat([kv, torch.stack([k, v], 3).transpose(1, 2)], dim=1)
    return attend(q, kv[:, :, :, 0].transpose(1, 2), kv[:, :, :, 1].transpose(1, 2), pos), kv


def beside_another_part(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    kv = torch.cat([kv, torch.stack([k, v, k + v])], dim=-2)
    return attend(q, kv[0], kv[1], pos), kv


FORMS: dict[Step, tuple[int, str]] = {
    roles_first: (0, "bhtd"),
    sequences_first: (1, "bhtd"),
    roles_within_tokens: (3, "bthd"),
    beside_another_part: (0, "bhtd"),
}
"""The stacked dimension, and the order of a part's dimensions."""


def stack_of(fn: Step, tokens: int) -> Tensor:
    dim, axes = FORMS[fn]
    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": tokens, "d": HEAD_DIM}
    size = [sizes[axis] for axis in axes]
    size.insert(dim, 3 if fn is beside_another_part else 2)
    return torch.randn(size)


def packed(fn: Step, kv: Tensor) -> PackedStack:
    """A growing stack of packed caches with the values of ``kv``."""
    dim, axes = FORMS[fn]
    layouts = [layout for layout, _ in packed_parts(index_copy).values()]
    parts = [
        PackedTensor.from_dense(part, layouts[role], axes, growing=True) if role < 2 else part
        for role, part in enumerate(unstacked(kv, (dim,)))
    ]
    return PackedStack.of_parts(parts, [len(parts)], (dim,))


def decode(fn: Step, step: Step, begin: int, lengths: tuple[int, ...]) -> Tensor:
    """Run compiled ``step`` beside eager ``fn`` on packed caches; returns the stack after the last step."""
    kv = stack_of(fn, begin)
    reference: Tensor = packed(fn, kv)
    for n in lengths:
        args = inputs(n, begin)
        (out, kv), (expected, reference) = step(kv, *args), fn(reference, *args)
        begin += n
        assert kv.shape == reference.shape
        assert_close(out, expected)
        assert_close(plain(kv), plain(reference))
    return kv


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", FORMS, ids=lambda fn: fn.__name__)
def test_a_stack_that_grows_is_packed_part_by_part_and_equals_eager_packed_caches(fn: Step) -> None:
    kv = decode(fn, compiled(fn), 20, (5, 1, 1))
    assert isinstance(kv, PackedStack)
    assert [isinstance(part, PackedTensor) for part in kv.parts][:2] == [True, True]
    assert {cache.kind for site in last_report().sites for cache in site.caches} == {"growing"}


@pytest.mark.usefixtures("without_code_generation")
def test_a_growing_stack_compiles_once_for_all_lengths() -> None:
    counters.clear()
    decode(roles_first, compiled(roles_first), 50, (1,) * 20)
    assert counters["stats"]["unique_graphs"] == 2  # one graph takes a plain tensor


@pytest.mark.slow
def test_a_growing_stack_runs_as_compiled_code() -> None:
    decode(sequences_first, compiled(sequences_first, dynamic=True), 63, (3, 1))


@pytest.mark.usefixtures("without_code_generation")
def test_a_shorter_stack_keeps_its_tokens_when_two_continue_it() -> None:
    step = compiled(roles_first)
    first, second, third = inputs(4, 20), inputs(1, 24), inputs(1, 24)
    kv = step(stack_of(roles_first, 20), *first)[1]
    before = plain(kv).clone()
    one, other = step(kv, *second)[1], step(kv, *third)[1]
    assert torch.equal(plain(kv), before)
    for longer, (_, k, v, _) in ((one, second), (other, third)):
        assert torch.equal(plain(longer)[:, :, :, :24], before)
        assert_close(plain(longer), plain(torch.cat([kv, torch.stack([k, v])], -2)))


def refused_beside_packed(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    """Two layers; the attention of one of them cannot be packed."""
    first = torch.cat([kv[0], torch.stack([k, v])], dim=-2)
    second = torch.cat([kv[1], torch.stack([k, v])], dim=-2)
    weights = torch.softmax(q @ first[0].repeat_interleave(2, 1).transpose(2, 3), -1)
    out = weights @ first[1].repeat_interleave(2, 1)
    return out + attend(q, second[0], second[1], pos), first, second, weights


@pytest.mark.usefixtures("without_code_generation")
def test_a_growing_stack_without_packed_parts_is_returned_as_a_plain_tensor() -> None:
    def fn(one: Tensor, other: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        return refused_beside_packed((one, other), q, k, v, pos)  # type: ignore[arg-type]

    one, other = stack_of(roles_first, 20), stack_of(roles_first, 20)
    args = inputs(2, 20)
    out, first, second, _ = compiled(fn, on_unsupported="ignore")(one, other, *args)
    expected, first_expected, second_expected, _ = fn(one, packed(roles_first, other), *args)
    assert type(first) is Tensor
    assert torch.equal(first, first_expected)
    assert first.is_contiguous()
    assert isinstance(second, PackedStack)
    assert_close(second.dequantize(), plain(second_expected))
    assert_close(out, expected)


def also_summed_up(kv: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    out, kv = roles_first(kv, *rest)
    return out, kv, kv.sum()


def also_written(kv: Tensor, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
    out, grown = roles_first(kv, q, k, v, pos)
    kv[0] = 0
    return out, grown


def unchanged_beside_it(kv: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    out, grown = roles_first(kv, *rest)
    return out, grown, kv.clone()


REFUSED: dict[Step, str] = {also_summed_up: "aten.sum", also_written: "the caller", unchanged_beside_it: "the caller"}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_a_growing_stack_with_other_uses_is_refused_with_its_reason(fn: Step) -> None:
    kv, args = stack_of(roles_first, 20), inputs(2, 20)
    kv_expected = kv.clone()
    for out, expected in zip(compiled(fn, on_unsupported="ignore")(kv, *args), fn(kv_expected, *args), strict=True):
        torch.testing.assert_close(out, expected)
        assert type(out) is Tensor
    assert torch.equal(kv, kv_expected)
    (site,) = last_report().sites
    assert site.reason_code == "part_of_tensor"
    assert REFUSED[fn] in str(site.reason)


def test_eager_code_appends_to_every_part() -> None:
    x, new = values(2, 1, 2, 70, INT8.head_dim), values(2, 1, 2, 3, INT8.head_dim)
    stack = PackedStack.from_dense(x, {(1,): (INT8, "bhtd")})
    longer = torch.cat([stack, new, new], -2)
    expected = torch.cat([x, new, new], -2)
    assert isinstance(longer, PackedStack)
    assert torch.equal(longer.dequantize()[0], expected[0])
    assert torch.equal(longer.dequantize()[1], quantized(expected[1], INT8))
