"""Graphs that only resemble a paged cache are refused with a reason, and the result is plain Inductor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_steps import (
    BLOCK_SIZE,
    NUM_KV_HEADS,
    Step,
    assert_close,
    attend,
    blocks_and_offsets,
    compiled,
    heads_before_tokens,
    index_copy_and_index,
    inputs,
    plain_pools,
    reference_pools,
    slots_of,
)
from torch import Tensor

import kvcompile
from kvcompile.packed.pool import PackedPool

pytestmark = pytest.mark.usefixtures("seed_without_grad")


def pool_returned_from_a_gather(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    gathered = keys[slots_of(table)].transpose(1, 2)
    return attend(q, gathered, values[slots_of(table)].transpose(1, 2), mask), gathered


def pool_summed_up(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return index_copy_and_index(q, k, v, keys, values, slots, table, mask), keys.sum()


def pool_gathered_besides(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return index_copy_and_index(q, k, v, keys, values, slots, table, mask), keys[slots].mean()


def pool_read_before_its_write(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    before = [x[slots_of(table)].transpose(1, 2) for x in (keys, values)]
    keys[slots], values[slots] = k, v
    return attend(q, *before, mask)


def pool_only_read(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_updated_out_of_place(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys, values = (x.index_put((slots,), new) for x, new in ((keys, k), (values, v)))
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask), keys, values


def pool_that_sums_up_its_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys.index_put_((slots,), k, accumulate=True)
    values[slots] = v
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_with_other_slots_for_every_head(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    heads = torch.arange(keys.shape[1])
    keys[slots[..., None] - heads, heads] = k
    values[slots] = v
    return attend(q, *(x[slots_of(table)].transpose(1, 2) for x in (keys, values)), mask)


def pool_whose_heads_are_gathered_as_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    k, v = (x[table[:, :NUM_KV_HEADS]] for x in (keys, values))
    return attend(q, k, v, mask[..., :NUM_KV_HEADS])


def pool_scaled(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots], values[slots] = k, v
    return attend(q, keys[slots_of(table)].transpose(1, 2) * 2, values[slots_of(table)].transpose(1, 2), mask)


def pool_for_keys_and_values(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots] = k
    return attend(q, *(keys[slots_of(table)].transpose(1, 2) for _ in range(2)), mask)


def heads_returned_from_a_gather(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    out = heads_before_tokens(q, k, v, keys, values, slots, table, mask)
    return out, keys[table]


def heads_read_as_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    heads_before_tokens(q, k, v, keys, values, slots, table, mask)
    k, v = (x[table].flatten(1, 2).transpose(1, 2)[:, :NUM_KV_HEADS] for x in (keys, values))
    return attend(q, k, v, mask[..., : k.shape[2]])


def heads_written_as_tokens(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots // BLOCK_SIZE, slots % NUM_KV_HEADS] = k.flatten(2).repeat(1, 1, 8).unflatten(2, (BLOCK_SIZE, -1))
    return heads_before_tokens(q, k, v, keys, values, slots, table, mask)


def one_head_written(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, table: Tensor, mask: Tensor
) -> Any:
    keys[slots // BLOCK_SIZE, 1, slots % BLOCK_SIZE] = k[:, :, 1]
    return heads_before_tokens(q, k, v, keys, values, slots, table, mask)


REFUSED: dict[Step, tuple[str, str]] = {
    pool_returned_from_a_gather: ("escaping_view", "the caller"),
    pool_summed_up: ("gathered", "aten.sum"),
    pool_gathered_besides: ("used_elsewhere", "an index that gathers tokens"),
    pool_read_before_its_write: ("read_before_write", "cache keys is read"),
    pool_only_read: ("plain_read_only", "not written in this graph"),
    pool_updated_out_of_place: ("gathered", "the caller"),
    pool_that_sums_up_its_tokens: ("gathered", "index_put"),
    pool_with_other_slots_for_every_head: ("gathered", "index_put"),
    pool_whose_heads_are_gathered_as_tokens: ("unknown_read", "an index that gathers tokens"),
    pool_scaled: ("computed_from_cache", "not a view"),
    pool_for_keys_and_values: ("shared_key_value", "sequences share it"),
    heads_returned_from_a_gather: ("used_elsewhere", "an index that gathers tokens"),
    heads_read_as_tokens: ("unknown_read", "aten.view"),
    heads_written_as_tokens: ("gathered", "index_put"),
    one_head_written: ("gathered", "aten.select"),
}
WITH_HEADS_FIRST = (
    heads_returned_from_a_gather,
    heads_read_as_tokens,
    heads_written_as_tokens,
    one_head_written,
)


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_graphs_that_only_resemble_a_paged_cache_are_refused_with_a_reason(fn: Step) -> None:
    new, places = inputs(1, 3)
    pools = plain_pools(heads_before_tokens if fn in WITH_HEADS_FIRST else index_copy_and_index)
    expected_pools = [pool.clone() for pool in pools]
    out = compiled(fn, on_unsupported="ignore")(*new, *pools, *places)
    torch.testing.assert_close(out, fn(*new, *expected_pools, *places), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(list(pools), expected_pools, rtol=0, atol=0)
    code, detail = REFUSED[fn]
    reasons = {site.reason_code: str(site.reason) for site in kvcompile.last_report().sites}
    assert code in reasons
    assert detail in reasons[code]
    assert None not in reasons


@pytest.mark.usefixtures("without_code_generation")
def test_a_refused_pool_stays_plain_beside_packed_ones() -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, *pools_and_places: Tensor) -> Any:
        *pools, slots, table, mask = pools_and_places
        out = blocks_and_offsets(q, k, v, *pools[:2], slots, table, mask)
        return out, blocks_and_offsets(q, k, v, *pools[2:], slots, table, mask), pools[2][table].sum()

    new, places = inputs(1, 3)
    pools = [*plain_pools(blocks_and_offsets), *plain_pools(blocks_and_offsets)]
    expected_pools = [*reference_pools(tuple(pools[:2])), pools[2].clone(), pools[3].clone()]
    out = compiled(step, on_unsupported="ignore")(*new, *pools, *places)
    for actual, expected in zip(out, step(*new, *expected_pools, *places), strict=True):
        assert_close(actual, expected)
    assert [type(pool) for pool in pools] == [PackedPool, PackedPool, Tensor, Tensor]
    assert torch.equal(pools[2], expected_pools[2])
    assert torch.equal(pools[3], expected_pools[3])


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("fn", [blocks_and_offsets, heads_before_tokens])
def test_pools_that_are_skipped_in_a_stack_are_indexed_as_in_the_model(fn: Step) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, *places: Tensor) -> Tensor:
        return fn(q, k, v, kv[:, 0], kv[:, 1], *places)

    new, places = inputs(1, 3)
    kv = torch.stack(plain_pools(fn), 1)
    expected_kv = kv.clone()
    policy = {"version": 1, "default": {"dtype": "auto"}}
    out = compiled(step, policy)(*new, kv, *places)
    assert_close(out, step(*new, expected_kv, *places))
    assert type(kv) is Tensor
    assert torch.equal(kv, expected_kv)


@pytest.mark.usefixtures("without_code_generation")
def test_a_format_that_scales_tokens_together_is_refused() -> None:
    pools = plain_pools(index_copy_and_index)
    new, places = inputs(1, 3)
    compiled(index_copy_and_index, "int4", on_unsupported="ignore")(*new, *pools, *places)
    (site,) = kvcompile.last_report().sites
    assert site.reason_code == "unsupported_format"
    assert "neighbouring slots" in str(site.reason)
    assert type(pools[0]) is Tensor
