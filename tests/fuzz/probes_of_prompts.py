"""Probes of faults of exact attention to new tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fuzz.probe import Probe, S, caches, collecting, sdpa, tokens

PROMPTS: list[Probe] = []
shows = collecting(PROMPTS, exact_prompts=True)


@shows("the tokens of the first write are read for the last")
def a_prompt_is_written_twice(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        kc.index_copy_(2, pos, k * 2), vc.index_copy_(2, pos, v * 2)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("new tokens of all sequences are read by some")
def the_second_sequence_of_a_prompt_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q[1:], kc[1:], vc[1:])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("the new tokens of a range of heads begin with the first head")
def the_second_head_of_a_prompt_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q[:, 1:], kc[:, 1:], vc[:, 1:])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("new tokens that were not written are read")
def a_mask_leaves_some_tokens_of_a_prompt_out(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, written):
        for cache, x in ((kc, k), (vc, v)):
            cache.copy_(torch.where(written[None, None, :, None], x, cache))
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, S), kc, vc, new.range(0, S) % 2 == 0), kc, vc


@shows("new tokens keep their slots when a window drops tokens")
def a_prompt_enters_a_window(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        kc, vc = torch.cat((kc, k), 2)[:, :, 2:], torch.cat((vc, v), 2)[:, :, 2:]
        return sdpa(q, kc, vc), kc, vc

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc)
