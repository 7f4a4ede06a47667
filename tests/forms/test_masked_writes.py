"""A mask excludes some writes, as for finished sequences of a batch: packed caches keep the bytes of these tokens.

Compiled steps equal plain code in a lossless format. In other formats, the bytes equal the bytes that the
specification's ``write_tokens`` writes with ``valid``. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import in_turn
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.axes import heads_first
from kvcompile.kernels.spec.packing import write_tokens
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

BATCH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_LEN, FIRST = 3, 4, 2, 32, 140, 62
LOSSLESS = {"default": {"dtype": "float32"}}
SOME, NONE, ALL = (True, False, True), (False, False, False), (True, True, True)

Write = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
"""Takes a cache, new vectors, their positions, and the active sequences, bool [batch]."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def of_rows(active: Tensor) -> Tensor:
    return active[:, None, None, None]


def copy_of_a_choice(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache.copy_(torch.where(of_rows(active), cache.index_copy(2, pos, x), cache))


def finished_rows_first(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    finished = of_rows(~active)
    cache.copy_(torch.where(finished, cache, cache.index_copy(2, pos, x)))


def written_clone(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    new = cache.clone()
    new[:, :, pos] = x
    cache[:] = torch.where(of_rows(active), new, cache)


def choice_as_a_method(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache.copy_(cache.index_copy(2, pos, x).where(of_rows(active).expand_as(cache), cache))


def choice_of_a_transposed_cache(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    view = cache.transpose(1, 2)
    view.copy_(torch.where(of_rows(active), view.index_copy(1, pos, x.transpose(1, 2)), view))


def choice_of_a_scatter(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    index = pos[None, None, :, None].expand_as(x)
    cache.copy_(torch.where(of_rows(active), cache.scatter(2, index, x), cache))


def choice_of_a_slice(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    new = cache.slice_scatter(x, 2, FIRST, FIRST + x.shape[2])
    cache.copy_(torch.where(of_rows(active), new, cache))


def choice_of_tokens_of_rows(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    here = (torch.arange(cache.shape[2]) < 66)[:, None]
    cache.copy_(torch.where(of_rows(active) & here, cache.index_copy(2, pos, x), cache))


def choice_of_a_choice(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    new = torch.where(of_rows(active), cache.index_copy(2, pos, x), cache)
    cache.copy_(torch.where((pos[:1] != 64)[:, None, None, None], new, cache))


def old_tokens_of_an_index(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(of_rows(active), x, cache[:, :, pos])


def old_tokens_first(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    x = torch.where(of_rows(active).logical_not(), cache.index_select(2, pos), x)
    cache.index_copy_(2, pos, x)


def old_tokens_transposed(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    old = cache.transpose(1, 2)[:, pos]
    cache[:, :, pos] = torch.where(of_rows(active), x.transpose(1, 2), old).transpose(1, 2)


def old_tokens_in_double_precision(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(of_rows(active), x.double(), cache[:, :, pos].double()).float()


def old_tokens_of_each_sequence(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    rows, places = torch.arange(len(cache))[:, None], pos.expand(len(cache), -1)
    old = cache[rows, :, places]
    cache[rows, :, places] = torch.where(of_rows(active), x.transpose(1, 2), old)


def old_tokens_of_a_gather(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    index = pos[None, None, :, None].expand_as(x)
    cache.scatter_(2, index, torch.where(of_rows(active), x, cache.gather(2, index)))


def old_tokens_of_a_slice(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    end = FIRST + x.shape[2]
    cache[:, :, FIRST:end] = torch.where(of_rows(active), x, cache[:, :, FIRST:end])


def old_tokens_of_a_narrowed_cache(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    part = cache.narrow(2, FIRST, x.shape[2])
    part.copy_(torch.where(of_rows(active), x, part))


def old_token_of_a_position(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, FIRST] = torch.where(active[:, None, None], x[:, :, 0], cache[:, :, FIRST])


def old_tokens_of_the_first_rows(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:2, :, pos] = torch.where(of_rows(active)[:2], x[:2], cache[:2, :, pos])


def two_choices_of_new_tokens(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    old = cache[:, :, pos]
    x = torch.where(of_rows(active), x, old)
    cache[:, :, pos] = torch.where((pos != 64)[:, None], x, old)


CHOICES: Sequence[Write] = (
    copy_of_a_choice,
    finished_rows_first,
    written_clone,
    choice_as_a_method,
    choice_of_a_transposed_cache,
    choice_of_a_scatter,
    choice_of_a_slice,
    choice_of_tokens_of_rows,
    choice_of_a_choice,
)
OLD_TOKENS: Sequence[Write] = (
    old_tokens_of_an_index,
    old_tokens_first,
    old_tokens_transposed,
    old_tokens_in_double_precision,
    old_tokens_of_each_sequence,
    old_tokens_of_a_gather,
    old_tokens_of_a_slice,
    old_tokens_of_a_narrowed_cache,
    old_token_of_a_position,
    old_tokens_of_the_first_rows,
    two_choices_of_new_tokens,
)
AT_FIRST = (choice_of_a_slice, old_tokens_of_a_slice, old_tokens_of_a_narrowed_cache, old_token_of_a_position)


def packed(cache: Tensor, role: str, policy: Any, axes: str = "bhtd") -> PackedTensor:
    formats = Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None
    return PackedTensor.from_dense(cache, formats.layout(role, HEAD_DIM, cache.dtype), axes)


def compiled(step: Callable[..., Any], policy: Any, on_unsupported: str = "error") -> Callable[..., Any]:
    options = {"policy": reading_packed(policy), "on_unsupported": on_unsupported}
    run: Callable[..., Any] = torch.compile(step, backend="kvquant", options=options)
    return run


def step_of(write: Write) -> Callable[..., Tensor]:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        write(keys, k, pos, active), write(values, v, pos, active)
        visible = torch.arange(MAX_LEN) <= pos[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

    return step


def rows(n: int) -> list[Tensor]:
    return [torch.randn(BATCH, heads, n, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("write", [*CHOICES, *OLD_TOKENS], ids=lambda write: write.__name__)
def test_rows_that_are_not_active_are_not_written(write: Write) -> None:
    step = step_of(write)
    run = compiled(step, LOSSLESS)
    plain = [torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]
    caches = [packed(x, role, LOSSLESS) for x, role in zip(plain, ("key", "value"), strict=True)]
    for at, active in zip((0, 1, 63, 64, 65, 128), (SOME, ALL, SOME, NONE, SOME, SOME[::-1]), strict=True):
        given = *rows(1), torch.tensor([FIRST if write in AT_FIRST else at]), torch.tensor(active)
        result, expected = run(*given[:3], *caches, *given[3:]), step(*given[:3], *plain, *given[3:])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        for cache, other in zip(caches, plain, strict=True):
            assert torch.equal(cache.dequantize(), other)
    assert all(cache.write_form.startswith("masked") for cache in last_report().sites[0].caches)


@pytest.mark.parametrize(
    "write",
    [
        old_tokens_of_an_index,
        old_tokens_first,
        old_tokens_transposed,
        old_token_of_a_position,
        two_choices_of_new_tokens,
    ],
    ids=lambda write: write.__name__,
)
def test_the_only_sequence_may_be_finished(write: Write) -> None:
    """PyTorch drops its dimension from the written value."""
    step = step_of(write)
    run = compiled(step, LOSSLESS)
    plain = [torch.randn(1, NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]
    caches = [packed(x, role, LOSSLESS) for x, role in zip(plain, ("key", "value"), strict=True)]
    for at, active in ((0, True), (63, False), (64, True), (65, False)):
        given = [x[:1] for x in rows(1)], torch.tensor([FIRST if write in AT_FIRST else at]), torch.tensor([active])
        (q, k, v), pos, mask = given
        torch.testing.assert_close(run(q, k, v, *caches, pos, mask), step(q, k, v, *plain, pos, mask))
        for cache, other in zip(caches, plain, strict=True):
            assert torch.equal(cache.dequantize(), other)


@pytest.mark.parametrize(
    ("policy", "write"),
    in_turn(["int8_per_token_head", "int4", "turboquant_4bit_nc"], [copy_of_a_choice, old_tokens_of_an_index]),
)
@pytest.mark.parametrize("n", [1, 20])
def test_the_bytes_of_rows_that_are_not_active_stay(write: Write, policy: str, n: int) -> None:
    """A residual is compared, too: its exact blocks are written for active rows only."""
    run = compiled(step_of(write), policy)
    roles = "key", "value"
    caches = [packed(torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM), role, policy) for role in roles]
    for start, active in ((50, SOME), (64, NONE), (100, ALL), (63, SOME[1:] + SOME[:1])):
        q, k, v = rows(n)
        pos, valid = torch.arange(start, start + n), torch.tensor(active)
        expected = [
            write_tokens(cache.packed, cache.packed_layout, x, pos.expand(BATCH, -1), valid[:, None].expand(-1, n))
            for cache, x in zip(caches, (k, v), strict=True)
        ]
        run(q, k, v, *caches, pos, valid)
        for cache, data in zip(caches, expected, strict=True):
            assert torch.equal(cache.packed, data)


@pytest.mark.parametrize("axes", ["bthd", "tbhd"])
def test_the_dimensions_of_a_cache_may_have_another_order(axes: str) -> None:
    at, order = axes.index("t"), [axes.index(axis) for axis in "bhtd"]

    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        mask = active.view([-1 if axis == "b" else 1 for axis in axes])
        for cache, x in ((keys, k), (values, v)):
            x = x.permute(["bhtd".index(axis) for axis in axes])
            if cache is keys:
                cache.copy_(torch.where(mask, cache.index_copy(at, pos, x), cache))
            else:
                cache.index_copy_(at, pos, torch.where(mask, x, cache.index_select(at, pos)))
        visible = torch.arange(MAX_LEN) <= pos[:, None]
        keys, values = keys.permute(order), values.permute(order)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

    sizes = {"b": BATCH, "h": NUM_KV_HEADS, "t": MAX_LEN, "d": HEAD_DIM}
    plain = [torch.randn([sizes[axis] for axis in axes]) for _ in range(2)]
    caches = [packed(x, role, LOSSLESS, axes) for x, role in zip(plain, ("key", "value"), strict=True)]
    given = *rows(2), torch.tensor([63, 64]), torch.tensor(SOME)
    result = compiled(step, LOSSLESS)(*given[:3], *caches, *given[3:])
    torch.testing.assert_close(result, step(*given[:3], *plain, *given[3:]), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(cache.dequantize(), x) for cache, x in zip(caches, plain, strict=True))
    assert heads_first(plain[0], axes).shape == (BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM)


def test_a_step_may_return_the_chosen_cache() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, active: Tensor) -> Any:
        new = (cache.index_copy(2, pos, x) for cache, x in ((keys, k), (values, v)))
        keys, values = (torch.where(of_rows(active), x, cache) for x, cache in zip(new, (keys, values), strict=True))
        visible = torch.arange(MAX_LEN) <= pos[:, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        return out, keys, values

    run = compiled(step, LOSSLESS)
    caches = plain = [torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]
    for at, active in ((63, SOME), (64, NONE), (65, SOME)):
        given = *rows(1), torch.tensor([at]), torch.tensor(active)
        before, kept = caches, [torch.as_tensor(x).clone() for x in plain]
        result, *caches = run(*given[:3], *caches, *given[3:])
        expected, *plain = step(*given[:3], *plain, *given[3:])
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        for cache, x, passed, old in zip(caches, plain, before, kept, strict=True):
            assert isinstance(cache, PackedTensor)
            assert torch.equal(cache.dequantize(), x)
            assert torch.equal(passed.dequantize() if isinstance(passed, PackedTensor) else passed, old)


# Values that are not the old tokens at the same positions of the cache


def tokens_of_another_position(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(of_rows(active), x, cache[:, :, pos + 1])


def tokens_of_another_sequence(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(of_rows(active), x, cache[:, :, pos].expand_as(x).flip(0))


def tokens_of_another_slice(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, 1:2] = torch.where(of_rows(active), x, cache[:, :, :1])


def tokens_with_exchanged_heads(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    old = cache[:, :, pos].reshape(BATCH, 1, 2, HEAD_DIM).transpose(1, 2)[:, [1, 0]]
    cache[:, :, pos] = torch.where(of_rows(active), x, old)


def rounded_tokens(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(of_rows(active), x.half(), cache[:, :, pos].half()).float()


def a_mask_of_heads(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache[:, :, pos] = torch.where(torch.tensor([True, False])[:, None, None], x, cache[:, :, pos])


def a_mask_of_channels(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache.copy_(torch.where(torch.arange(HEAD_DIM) < 4, cache.index_copy(2, pos, x), cache))


def a_product_with_the_mask(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    m = of_rows(active).float()
    cache[:, :, pos] = x * m + cache[:, :, pos] * (1 - m)


def a_choice_of_moved_tokens(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    cache.copy_(torch.where(of_rows(active), cache.roll(-1, 2), cache))
    cache[:, :, -1:] = x


def a_choice_behind_two_writes(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    new = cache.index_copy(2, pos, x).index_copy(2, pos + 1, x)
    cache.copy_(torch.where(of_rows(active), new, cache))


def a_choice_of_an_older_state(cache: Tensor, x: Tensor, pos: Tensor, active: Tensor) -> None:
    old = cache.clone()
    cache[:, :, pos + 1] = x
    cache.copy_(torch.where(of_rows(active), cache.index_copy(2, pos, x), old))


OTHERS: Sequence[Write] = (
    tokens_of_another_position,
    tokens_of_another_sequence,
    tokens_of_another_slice,
    tokens_with_exchanged_heads,
    rounded_tokens,
    a_mask_of_heads,
    a_mask_of_channels,
    a_product_with_the_mask,
    a_choice_of_moved_tokens,
    a_choice_behind_two_writes,
    a_choice_of_an_older_state,
)


@pytest.mark.parametrize("write", OTHERS, ids=lambda write: write.__name__)
def test_a_value_that_is_not_the_old_token_in_its_place_is_refused(write: Write) -> None:
    step = step_of(write)
    caches = [torch.randn(BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM) for _ in range(2)]
    plain = [cache.clone() for cache in caches]
    given = *rows(1), torch.tensor([63]), torch.tensor(SOME)
    result = compiled(step, LOSSLESS, "ignore")(*given[:3], *caches, *given[3:])
    torch.testing.assert_close(result, step(*given[:3], *plain, *given[3:]))
    assert all(torch.equal(cache, x) for cache, x in zip(caches, plain, strict=True))
    assert last_report().sites[0].reason_code == "unknown_write"


def test_tokens_of_the_other_cache_are_refused() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, active: Tensor) -> Tensor:
        values[:, :, pos] = v
        keys[:, :, pos] = torch.where(of_rows(active), k, values[:, :, pos])
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

    given = *rows(1), *torch.randn(2, BATCH, NUM_KV_HEADS, MAX_LEN, HEAD_DIM), torch.tensor([63]), torch.tensor(SOME)
    compiled(step, LOSSLESS, "ignore")(*given)
    assert not last_report().sites[0].rewritten
