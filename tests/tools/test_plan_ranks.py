"""A plan for several GPUs counts what one of them holds, reads and receives."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from model_configs import DEEPSEEK_V3, GEMMA_2_9B, GIB, LLAMA_3_1_8B, error_of, plan_of

from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.planning.devices import Bandwidth
from kvcompile.planning.plan import Plan
from kvcompile.planning.ranks import Ranks

LAYERS, KV_HEADS, HEAD_DIM, HIDDEN, HEADS = 32, 8, 128, 4096, 32
BANDWIDTH = Bandwidth(3 * 10**12, "as given")


def llama(
    ranks: Ranks, contexts: tuple[int, ...] = (1024,), policy: str = "int4_per_token_head", **request: Any
) -> Plan:
    return plan_of(LLAMA_3_1_8B, policy, contexts=contexts, ranks=ranks, kv_budget=GIB, **request)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_tensor_parallel_divides_the_heads_so_that_more_users_fit(size: int) -> None:
    (one,), (of_rank,) = llama(Ranks()).policies, llama(Ranks(tensor_parallel=size)).policies
    assert {cache.cache.num_kv_heads for cache in of_rank.caches.caches} == {KV_HEADS // size}
    alone, shared = one.capacity["allocated"], of_rank.capacity["allocated"]
    assert shared.bytes_per_user[1024] * size == alone.bytes_per_user[1024]


@pytest.mark.parametrize("size", [2, 3])
def test_context_parallel_counts_the_blocks_of_the_rank_that_has_most(size: int) -> None:
    contexts = (1, 63, 64, 65, 128, 129, 1000, 64 * size, 64 * size + 1)
    (policy,) = llama(Ranks(context_parallel=size), contexts).policies
    for context, nbytes in policy.capacity["allocated"].bytes_per_user.items():
        room = ContextShard(0, size, "").num_tokens(context)
        layouts = [PackedLayout("int4_per_token_head", role, HEAD_DIM) for role in ("key", "value")]
        per_head = sum(layout.blocks(room) * layout.block_bytes for layout in layouts)
        assert nbytes == LAYERS * KV_HEADS * per_head


def test_tensor_and_context_parallel_ranks_divide_a_cache_together() -> None:
    (one,) = llama(Ranks(), (8192,)).policies
    (both,) = llama(Ranks(tensor_parallel=4, context_parallel=2), (8192,)).policies
    assert one.capacity["allocated"].bytes_per_user[8192] == 8 * both.capacity["allocated"].bytes_per_user[8192]


@pytest.mark.parametrize(("policy", "whole"), [("bf16", 32), ("int4", 32), ("int8_per_token_head", 0)])
def test_a_cache_that_context_parallel_does_not_divide_stays_whole_with_a_note(policy: str, whole: int) -> None:
    plan = llama(Ranks(context_parallel=2), policy=policy)
    notes = [note for note in plan.notes if "every rank keeps all tokens" in note]
    assert bool(notes) == bool(whole)
    assert sum(one.cache.shards == 1 for one in plan.policies[0].caches.caches) == whole


def test_windows_and_latents_stay_whole() -> None:
    ranks = Ranks(context_parallel=2)
    windows = plan_of(GEMMA_2_9B, "int8_per_token_head", contexts=(1024,), ranks=ranks, kv_budget=GIB)
    kinds = {(one.cache.kind, one.cache.shards) for one in windows.policies[0].caches.caches}
    assert kinds == {("full", 2), ("sliding", 1)}
    tensor = Ranks(tensor_parallel=2)
    latents = plan_of(DEEPSEEK_V3, "bf16", contexts=(1024,), ranks=tensor, kv_budget=GIB)
    assert {one.cache.num_kv_heads for one in latents.policies[0].caches.caches} == {1}


def test_ranks_divide_linear_layers_and_the_head_and_keep_embeddings_and_norms() -> None:
    def weights(size: int) -> int:
        plan = plan_of(LLAMA_3_1_8B, "bf16", memory=80 * GIB, contexts=(1024,), ranks=Ranks(tensor_parallel=size))
        assert plan.weights is not None
        return plan.weights.nbytes

    embedding, norms = 128256 * HIDDEN, (2 * LAYERS + 1) * HIDDEN
    assert 2 * weights(2) - weights(1) == 2 * (embedding + norms)
    given = plan_of(
        LLAMA_3_1_8B, "bf16", memory=80 * GIB, weights="7GiB", contexts=(1024,), ranks=Ranks(tensor_parallel=2)
    ).weights
    assert given is not None
    assert given.nbytes == 7 * GIB // 2


def test_a_step_of_a_rank_reads_its_share_and_waits_for_every_collective() -> None:
    users, link, latency = 4, 10**11, Fraction(20, 10**6)
    ranks = Ranks(tensor_parallel=2, context_parallel=3, link=link, latency=latency)
    (policy,) = llama(ranks, (6144,), bandwidth=BANDWIDTH, users=users).policies
    sums, outputs = policy.collectives
    assert (sums.count, sums.nbytes) == (2 * LAYERS, users * HIDDEN * 2)  # of a ring of two, half in each direction
    assert (outputs.count, outputs.nbytes) == (LAYERS, 2 * users * HEADS // 2 * (HEAD_DIM + 1) * 4)
    seconds = sum(one.count * (latency + Fraction(one.nbytes, link)) for one in policy.collectives)
    free = replace(ranks, latency=Fraction(0), link=10**30)
    (without,) = llama(free, (6144,), bandwidth=BANDWIDTH, users=users).policies
    assert policy.seconds[6144] == pytest.approx(without.seconds[6144] + float(seconds), rel=1e-12)
    (alone,) = llama(Ranks(), (6144,), bandwidth=BANDWIDTH, users=users).policies
    assert alone.collectives == ()
    assert without.seconds[6144] < alone.seconds[6144] / 1.7


def test_heads_that_do_not_divide_are_an_error() -> None:
    assert "3 does not divide the 8 KV heads of layer 0" in error_of(llama, Ranks(tensor_parallel=3))
    assert "16 does not divide the 8 KV heads" in error_of(llama, Ranks(tensor_parallel=16))


def test_a_plan_pays_off_later_where_collectives_take_long() -> None:
    def first_context(latency: Fraction) -> int:
        ranks = Ranks(tensor_parallel=2, latency=latency)
        plan = plan_of(
            LLAMA_3_1_8B, "bfloat16", "int4_per_token_head", contexts=(1024,), ranks=ranks, bandwidth=BANDWIDTH
        )
        payoff = plan.policies[1].payoff
        assert payoff is not None
        assert payoff.context is not None
        return payoff.context

    assert first_context(Fraction(1, 10**6)) < first_context(Fraction(100, 10**6))
