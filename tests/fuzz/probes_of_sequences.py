"""Probes of faults of masked writes, and of sequences that are reordered or repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fuzz.probe import B, D, H, Probe, S, caches, collecting, sdpa, tokens

SEQUENCES: list[Probe] = []
shows = collecting(SEQUENCES)


# Masked writes


@shows("kept vectors may come from another place")
def the_old_tokens_of_the_other_sequence_are_put_back(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, mask):
        kc[:, :, pos] = torch.where(mask, k, kc[:, :, pos].transpose(0, 1))
        vc[:, :, pos] = torch.where(mask, v, vc[:, :, pos].transpose(0, 1))
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), new(B, 1, 1, 1) > 0), kc, vc


@shows("masks of new vectors may differ between heads")
def a_mask_hides_a_head(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, mask):
        kc[:, :, pos] = torch.where(mask, k, kc[:, :, pos])
        vc[:, :, pos] = torch.where(mask, v, vc[:, :, pos])
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), (new.range(0, H) > 0)[:, None, None]), kc, vc


@shows("masks show the tokens that they hide")
def a_mask_hides_tokens(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, mask):
        kc[:, :, pos] = torch.where(mask, k, kc[:, :, pos])
        vc[:, :, pos] = torch.where(~mask, vc[:, :, pos], v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6), (new.range(0, 3) > 0)[:, None]), kc, vc


@shows("a choice of the written cache writes all tokens")
def a_mask_chooses_between_states_of_a_cache(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, mask):
        kc.copy_(torch.where(mask, kc.index_copy(2, pos, k), kc))
        vc.copy_(torch.where(mask, vc.index_copy(2, pos, v), vc))
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    mask = (new.range(0, B) > 0)[:, None, None, None]
    yield run(*tokens(new), kc, vc, new.range(3, 4), mask), kc, vc


# Sequences


@shows("sequences stay in their order")
def the_sequences_are_exchanged(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, beams):
        kc.copy_(kc[beams]), vc.copy_(vc[beams])
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), new.range(0, B).flip(0)), kc, vc


@shows("sequences of gathered vectors may differ between heads")
def each_head_is_gathered_from_another_sequence(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, beams):
        kc.copy_(kc.gather(0, beams.expand(kc.shape))), vc.copy_(vc.gather(0, beams.expand(vc.shape)))
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    beams = (new.range(0, B)[:, None] + new.range(0, H)) % B
    yield run(*tokens(new), kc, vc, new.range(3, 4), beams[:, :, None, None]), kc, vc


@shows("an expansion to the same size repeats the first sequence")
def grown_caches_are_expanded_to_their_own_size(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        kc, vc = (torch.cat([x, y], 2) for x, y in ((kc, k), (vc, v)))
        kc, vc = (torch.take_along_dim(x, torch.arange(B, device=x.device)[:, None, None, None], 0) for x in (kc, vc))
        return sdpa(q, kc, vc), kc, vc

    run, (kc, vc) = compile(step), caches(new, tokens=3)
    yield run(*tokens(new), kc, vc)


@shows("sequences that are selected may be repeated")
def the_second_sequence_is_repeated(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, second):
        kc, vc = (x[second].expand(B, -1, -1, -1).index_copy(2, pos, y) for x, y in ((kc, k), (vc, v)))
        return sdpa(q, kc, vc), kc, vc

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), new.range(1, 2))


@shows("sequences of a stack may be put back in another place")
def the_last_sequence_of_a_stack_replaces_the_first(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kv, pos):
        kv.copy_(torch.slice_scatter(kv, kv[:, 1:], 1, 0, 1))
        kv[0].index_copy_(2, pos, k), kv[1].index_copy_(2, pos, v)
        return sdpa(q, kv[0], kv[1])

    run, kv = compile(step), new(2, B, H, S, D)
    yield run(*tokens(new), kv, new.range(3, 4)), kv
