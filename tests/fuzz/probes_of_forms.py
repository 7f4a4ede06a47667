"""Probes of forms: merged heads, transposed keys, read-only caches, zeroed weights, masks, sinks, sizes from data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import kvcompile
from fuzz.probe import B, D, H, Probe, S, caches, collecting, sdpa, tokens

FORMS: list[Probe] = []
shows = collecting(FORMS)

W = H * D
"""The channels of all heads."""


def _divided(x: Tensor) -> Tensor:
    """[batch, tokens, W] -> [batch, heads, tokens, head_dim]."""
    return x.unflatten(-1, (H, D)).transpose(1, 2)


def _merged_tokens(new: Any, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return new(B, H, count, D), new(B, count, W), new(B, count, W)


# Merged heads


@shows("heads are divided though other values are copied into the cache")
def a_cache_beside_packed_ones_is_scaled(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, other, pos):
        for cache, x in ((kc, k), (vc, v), (other, k)):
            cache.index_copy_(1, pos, x)
        out = sdpa(q, _divided(kc), _divided(vc)), sdpa(q, _divided(other), _divided(other))
        other.mul_(0.5)
        return out

    run, held = compile(step), [new(B, S, W) for _ in range(3)]
    yield *run(*_merged_tokens(new), *held, new.range(3, 4)), *held


@shows("plain caches get their merged heads back in reverse")
def a_refused_cache_beside_packed_ones_is_summed_up(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, other, values, pos):
        for cache, x in ((kc, k), (vc, v), (other, k), (values, v)):
            cache.index_copy_(1, pos, x)
        return sdpa(q, _divided(kc), _divided(vc)), sdpa(q, _divided(other), _divided(values)), other.sum((0, 1))

    run, held = compile(step), [new(B, S, W) for _ in range(4)]
    yield *run(*_merged_tokens(new), *held, new.range(3, 4)), *held


@shows("sequences and tokens of merged heads are exchanged for the caller")
def a_cache_with_merged_heads_is_packed(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(1, pos, k), vc.index_copy_(1, pos, v)
        return sdpa(q, _divided(kc), _divided(vc))

    run, (kc, vc) = compile(step), (new(B, S, W), new(B, S, W))
    for position in (3, 4):
        yield run(*_merged_tokens(new), kc, vc, new.range(position, position + 1)), kc, vc


@shows("packed caches are read in any order and width")
def a_packed_square_cache_is_read_transposed(compile: Any, new: Any) -> Iterator[Any]:
    def write(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc)

    def read(q, kc, vc):
        return sdpa(q, kc.mT, vc)

    writes, reads = compile(write), compile(read)
    kc, vc = caches(new, tokens=D)
    yield writes(*tokens(new), kc, vc, new.range(3, 4)), reads(new(B, H, 1, D), kc, vc), kc, vc


# Transposed keys


@shows("new tokens of transposed caches stay transposed")
def three_tokens_of_transposed_keys_are_written(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(3, pos, k.mT), vc.index_copy_(2, pos, v)
        return sdpa(q, kc.mT, vc)

    run, kc, vc = compile(step), new(B, H, D, S), new(B, H, S, D)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("transposed keys are taken for plain ones")
def square_transposed_keys_are_only_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, kc, vc):
        return sdpa(q, kc.mT, vc)

    run, (kc, vc) = compile(step), kvcompile.pack_(caches(new, tokens=D))
    yield run(new(B, H, 1, D), kc, vc), kc, vc


@shows("transposed caches are packed as they lie")
def transposed_keys_are_packed(compile: Any, new: Any) -> Iterator[Any]:
    yield from square_transposed_keys_are_only_read(compile, new)


# Caches that steps only read


@shows("the tokens of an adopted cache move by one")
def keys_and_values_are_only_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, kc, vc):
        return sdpa(q, kc[:, :, :5], vc[:, :, :5])

    run, (kc, vc) = compile(step), kvcompile.pack_(caches(new))
    for _ in range(2):
        yield run(new(B, H, 1, D), kc, vc), kc, vc


# Zeroed weights


@shows("weights that any mask sets to zero count as hidden keys")
def a_mask_of_dropped_keys_sets_weights_to_zero(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, hidden, dropped):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        weights = (q @ kc.mT * 0.25).masked_fill(hidden, -torch.inf).softmax(-1)
        return weights.masked_fill(dropped, 0.0) @ vc

    run, (kc, vc), places = compile(step), caches(new), new.range(0, S)
    yield run(*tokens(new), kc, vc, new.range(3, 4), places > 3, places == 1), kc, vc


@shows("rows of any scores count as rows without a visible key")
def a_row_of_other_scores_sets_weights_to_zero(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, hidden, dropped):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        scores = q @ kc.mT * 0.25
        rows = (scores.masked_fill(dropped, -torch.inf) == -torch.inf).all(-1, keepdim=True)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(rows, 0.0) @ vc

    run, (kc, vc), places = compile(step), caches(new), new.range(0, S)
    yield run(*tokens(new), kc, vc, new.range(3, 4), places > 3, places >= 0), kc, vc


# Masks of zeros and ones


@shows("any factor of scores counts as a mask of zeros and ones")
def a_key_is_hidden_by_a_factor_of_one_half(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, mask):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return (q @ kc.mT * mask - 1e10 * (1 - mask)).softmax(-1) @ vc

    run, (kc, vc), places = compile(step), caches(new), new.range(0, S)
    yield run(*tokens(new), kc, vc, new.range(3, 4), 1 - 0.5 * (places == 1)), kc, vc


# Sinks


@shows("sinks and scores may be shifted by different numbers")
def scores_beside_sinks_are_scaled_after_their_maximum_is_subtracted(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, sinks):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        scores = q @ kc.mT
        top = scores.amax(-1, keepdim=True)
        exponentials = ((scores - top) * 0.5).exp()
        return exponentials / (exponentials.sum(-1, keepdim=True) + (sinks - top).exp()) @ vc

    run, (kc, vc), sinks = compile(step), caches(new), new(H, 1, 1)
    yield run(*tokens(new), kc, vc, new.range(3, 4), sinks), kc, vc


# Positions and sizes from data


@shows("written sizes that only data determine count as known")
def a_slice_that_may_pass_the_end_is_filled(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, kc, vc, pos):
        first = pos[0].item()
        kc[:, :, first : first + 2], vc[:, :, first : first + 2] = 0.5, 0.25
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    for position in (3, S - 1):
        yield run(new(B, H, 1, D), kc, vc, new.range(position, position + 1)), kc, vc


@shows("caches may get a size that only data determine")
def a_cache_is_cut_by_a_number_from_data(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        count = pos[0].item()
        torch._check(count >= 1)
        torch._check(count <= kc.shape[2])
        kc, vc = torch.cat([kc[:, :, :count], k], 2), torch.cat([vc[:, :, :count], v], 2)
        return sdpa(q, kc, vc), kc, vc

    yield compile(step)(*tokens(new), *caches(new), new.range(3, 4))


@shows("slices begin one token after a position from data")
def a_slice_begins_at_a_position_from_data(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        first = pos[0].item()
        kc.narrow(2, first, k.shape[2]).copy_(k), vc.narrow(2, first, v.shape[2]).copy_(v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    for position in (3, 0):
        yield run(*tokens(new), kc, vc, new.range(position, position + 1)), kc, vc


# Regions


@shows("calls with other constants share a trace", operators=False)
def two_layers_have_scales_of_their_own(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, other, values, pos):
        for cache, x in ((kc, k), (vc, v), (other, v), (values, k)):
            cache.index_copy_(2, pos, x)
        return sdpa(q, kc, vc, scale=0.3) + sdpa(q, other, values, scale=0.7)

    run, held = compile(step), caches(new, 4)
    yield run(*tokens(new), *held, new.range(3, 4)), *held


@shows("tensors of one shape are exchanged in a region", operators=False)
def keys_and_values_have_one_shape(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc
