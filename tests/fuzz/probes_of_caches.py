"""Probes of faults of reads, writes, stacks and calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuzz.probe import B, D, H, Probe, S, caches, collecting, sdpa, tokens

CACHES: list[Probe] = []
shows = collecting(CACHES)


# Reads


@shows("joined tokens need not be the written ones")
def attention_reads_other_tokens_than_the_written_ones(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        keys, values = torch.cat([kc[:, :, :3], 2 * k], 2), torch.cat([vc[:, :, :3], v], 2)
        kc[:, :, 3:4], vc[:, :, 3:4] = k, v
        return sdpa(q, keys, values)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc), kc, vc


@shows("the shapes of query and caches are not checked")
def queries_of_one_sequence_read_all_sequences(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    q, k, v = tokens(new)
    yield run(q[:1], k, v, kc, vc, new.range(3, 4)), kc, vc


@shows("a cache may serve in both roles")
def a_cache_of_keys_and_values_serves_as_values_elsewhere(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, both, pos):
        kc.index_copy_(2, pos, k), both.index_copy_(2, pos, v)
        return sdpa(q, both, both) + sdpa(q, kc, both)

    run, (kc, both) = compile(step), caches(new)
    yield run(*tokens(new), kc, both, new.range(3, 4)), kc, both


@shows("the items of a list of views all begin at 0")
def the_second_item_of_a_split_of_sequences_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q[1:], kc.split(1, 0)[1], vc.split(1, 0)[1])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("attention of some sequences reads the first ones")
def the_second_sequence_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q[1:], kc[1:], vc[1:])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("a range of heads begins with the first head")
def the_second_head_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q[:, 1:], kc[:, 1:], vc[:, 1:])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("reordered heads take the wrong stride")
def three_query_heads_take_two_heads_in_turn(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc.repeat(1, 3, 1, 1), vc.repeat(1, 3, 1, 1))

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, heads=3 * H), kc, vc, new.range(3, 4)), kc, vc


@shows("the mask of another row is taken")
def each_query_has_a_mask_of_its_own(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc, torch.arange(kc.shape[2], device=q.device) <= pos[:, None])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("the scale is dropped")
def attention_has_a_scale_of_its_own(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc, scale=0.7)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("the causal mask is dropped")
def attention_is_causal(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc, is_causal=True)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6)), kc, vc


@shows("the softcap is dropped")
def scores_are_capped(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return torch.softmax(torch.tanh(q @ kc.transpose(2, 3) / 2) * 2, -1) @ vc

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("a scale after a bias leaves the bias")
def scores_with_a_bias_are_scaled(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, bias):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return torch.softmax((q @ kc.transpose(2, 3) + bias) * 0.3, -1) @ vc

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), 3 * new(B, 1, 1, S)), kc, vc


@shows("rows without a visible key are zero")
def a_mask_of_minus_infinity_hides_every_key(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, visible):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        scores = (q @ kc.transpose(2, 3)).masked_fill(~visible, float("-inf"))
        return torch.softmax(scores, -1) @ vc

    run, (kc, vc) = compile(step), caches(new)
    visible = new.range(0, S)[None] < new.range(0, 3)[:, None]
    yield run(*tokens(new, 3), kc, vc, new.range(3, 6), visible), kc, vc


@shows("steps within a dimension are ignored")
def every_second_token_is_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc[:, :, ::2], vc[:, :, ::2])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


# Writes


@shows("new tokens are stored in reverse")
def three_tokens_are_written(compile: Any, new: Any) -> Iterator[Any]:
    yield from each_query_has_a_mask_of_its_own(compile, new)


@shows("heads and tokens of new vectors are exchanged")
def three_tokens_of_two_heads_are_written(compile: Any, new: Any) -> Iterator[Any]:
    yield from each_query_has_a_mask_of_its_own(compile, new)


@shows("negative positions do not count from the end")
def a_position_counts_from_the_end(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc[:, :, pos], vc[:, :, pos] = k, v
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(-2, -1)), kc, vc


@shows("stores to other positions are merged")
def keys_and_values_are_written_to_different_positions(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos, other):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, other, v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4), new.range(5, 6)), kc, vc


@shows("any index of sequences or heads counts as all of them")
def sequences_are_written_in_another_order(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, rows, pos):
        kc[rows, :, pos], vc[rows, :, pos] = k[:, :, 0], v[:, :, 0]
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(0, 2).flip(0), new.range(3, 5)), kc, vc


@shows("positions of indexed heads may differ between heads")
def each_head_is_written_at_its_own_position(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        heads = torch.arange(H, device=q.device)
        kc[:, heads, pos], vc[:, heads, pos] = k[:, :, 0], v[:, :, 0]
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 3 + H)), kc, vc


@shows("the first sequence of a store is dropped")
def the_second_sequence_is_written(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc[1:].index_copy_(2, pos, k[1:]), vc[1:].index_copy_(2, pos, v[1:])
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("a slice may be put back in another place")
def a_written_sequence_is_copied_over_another(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc[1:] = kc[:1].index_copy(2, pos, k[:1])
        vc[1:] = vc[:1].index_copy(2, pos, v[:1])
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("stores ignore which positions are valid")
def tokens_are_written_where_a_mask_says(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        here = (torch.arange(kc.shape[2], device=q.device) == pos)[None, None, :, None]
        kc.copy_(torch.where(here, k, kc)), vc.copy_(torch.where(here, v, vc))
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc


@shows("new tokens keep their own dtype", policy="int8_per_token_head", dtype="bfloat16")
def new_tokens_have_more_bits_than_the_cache(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        kc[:, :, 3:6], vc[:, :, 3:6] = k, v
        return sdpa(q, kc, vc)

    run = compile(step)
    kc, vc = new.cache("key", "bhtd", B, H, S, D), new.cache("value", "bhtd", B, H, S, D)
    q, k, v = tokens(new, 3)
    yield run(q, k.float() / 3, v.float() / 3, kc, vc), kc, vc


# Caches that the graph makes, that grow, or that are windows


@shows("the alias check of outputs is dropped")
def a_returned_view_shares_memory_with_a_returned_cache(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v):
        keys, values = k * 2, v * 2
        return sdpa(q, keys, values), keys, values, keys[:, :, :1]

    out, keys, values, first = compile(step)(*tokens(new, 3))
    keys.zero_()
    yield out, keys, values, first


@shows("any buffer of the graph counts as zeros")
def a_cache_is_made_of_ones(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v):
        keys, values = k.new_full((B, H, S, D), 0.5), v.new_full((B, H, S, D), 0.5)
        keys[:, :, :1], values[:, :, :1] = k, v
        return sdpa(q, keys, values), keys, values

    yield compile(step)(*tokens(new))


@shows("a cache that drops tokens takes the outputs of grown caches")
def a_growing_cache_stands_beside_a_window(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, k0, v0, k1, v1):
        k0, v0 = torch.cat([k0, k], 2), torch.cat([v0, v], 2)
        out = sdpa(q, k0, v0)
        k1, v1 = torch.cat([k1, k], 2)[:, :, -6:], torch.cat([v1, v], 2)[:, :, -6:]
        return out + sdpa(q, k1, v1), k0, v0, k1, v1

    run = compile(step)
    held = [*caches(new, tokens=4), *caches(new, tokens=6)]
    for _ in range(2):
        out, *held = run(*tokens(new), *held)
        yield out, *held


# Stacks, partners, copies


@shows("sites that share a refused cache are accepted")
def two_layers_share_keys_and_one_reads_its_values_elsewhere(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, other, pos):
        for cache, x in ((kc, k), (vc, v), (other, v)):
            cache.index_copy_(2, pos, x)
        return sdpa(q, kc, vc) + sdpa(q, kc, other), other.sum()

    run, held = compile(step), caches(new, 3)
    yield *run(*tokens(new), *held, new.range(3, 4)), *held


@shows("copies between inputs are dropped")
def an_input_is_copied_and_then_changed(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, source, copied, pos):
        total = source.sum()
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        copied.copy_(source[:, :, 2:])
        source.add_(1)
        return sdpa(q, kc, vc), total

    run, (kc, vc, copied), source = compile(step), caches(new, 3), new(B, H, S + 2, D)
    yield *run(*tokens(new), kc, vc, source, copied, new.range(3, 4)), kc, vc, source, copied


@shows("equal caches of the caller become one")
def two_equal_caches_are_returned_and_one_is_changed(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        out = sdpa(q, torch.cat([kc, k], 2), torch.cat([vc, v], 2))
        return out, *(torch.cat([x, y], 2) for x, y in ((kc, k), (vc, v)) for _ in range(2))

    run, (kc, vc) = compile(step), caches(new)
    out, keys, equal_keys, values, equal_values = run(*tokens(new), kc, vc)
    keys.zero_(), values.zero_()
    yield out, keys, equal_keys, values, equal_values


@shows("writes of other vectors count as equal")
def attention_reads_other_vectors_than_the_returned_cache(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc):
        out = sdpa(q, torch.cat([kc, k * 2], 2), torch.cat([vc, v], 2))
        return out, torch.cat([kc, k], 2), torch.cat([vc, v], 2)

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc)


@shows("parts of the caller become views of the joined cache")
def a_part_is_returned_and_the_joined_cache_is_changed(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, past):
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return sdpa(q, k, v), torch.stack([k, v]), k

    run, (kc, vc) = compile(step), caches(new)
    out, joined, part = run(*tokens(new), torch.stack([kc, vc]))
    joined.zero_()
    yield out, joined, part


@shows("parts are joined in any order")
def keys_and_values_are_exchanged_in_every_step(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, past):
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        return sdpa(q, k, v), torch.stack([v, k])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), torch.stack([kc, vc]))


@shows("parts of a stack may become views of inputs")
def parts_of_a_stack_are_copies_of_inputs_that_change(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, a, b, kc, vc, kv, pos):
        total = a.sum() + b.sum()
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        out = sdpa(q, kc, vc) + sdpa(q, kv[0], kv[1])
        kv.copy_(torch.stack((a, b)))
        a.add_(1), b.add_(1)
        return out, total

    run, kv, (kc, vc) = compile(step), new(2, B, H, S, D), caches(new)
    a, b = caches(new)
    yield *run(*tokens(new), a, b, kc, vc, kv, new.range(3, 4)), a, b, kv, kc, vc


# Calls


@shows("caches with aliases are adopted")
def a_view_of_a_cache_is_kept(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc)

    run, (kc, vc) = compile(step), caches(new)
    kept = kc.data[:, :, 2:6]  # holds no reference to the cache itself
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kept, kc, vc
    yield run(*tokens(new), kc, vc, new.range(4, 5)), kept, kc, vc


@shows("packed inputs may share memory")
def a_view_of_a_packed_cache_is_passed_beside_it(compile: Any, new: Any) -> Iterator[Any]:
    def step(q, k, v, kc, vc, view, pos):
        before = view.sum()
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc), before, view * 2

    run, (kc, vc), other = compile(step), caches(new), new(B, H, S, D)
    yield *run(*tokens(new), kc, vc, other, new.range(3, 4)), kc, vc
    yield *run(*tokens(new), kc, vc, kc[:, :, :8], new.range(4, 5)), kc, vc


@shows("any changes make a growing cache", dtype="float32", policy="float32")
def a_growing_cache_is_also_overwritten(compile: Any, new: Any) -> Iterator[Any]:
    def step(c: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat([c["k"], k], 2), torch.cat([c["v"], v], 2)
        values.select(2, 0).copy_(v[:, :, 0])  # another vector in each step: the previous cache keeps its own
        out = sdpa(q, keys, values)
        c["k"], c["v"] = keys, values
        return out

    run = compile(step)
    c = {"k": new(B, H, 3, D), "v": new(B, H, 3, D)}
    for _ in range(2):
        before = c["v"]
        yield run(c, *tokens(new)), c["k"], c["v"], before


@shows("a functional cache is written in place", starts_packed=True)
def a_cache_that_is_written_out_of_place_keeps_its_tokens(compile: Any, new: Any) -> Iterator[Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        kc, vc = kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)
        return sdpa(q, kc, vc), kc, vc

    run = compile(step)
    kc, vc = new.cache("key", "bhtd", B, H, S, D), new.cache("value", "bhtd", B, H, S, D)
    for position in (3, 4):
        before = kc, vc
        out, kc, vc = run(*tokens(new), kc, vc, new.range(position, position + 1))
        yield out, kc, vc, *before


@shows("slices of channels are not checked")
def the_last_channels_of_values_are_read(compile: Any, new: Any) -> Iterator[Any]:
    def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
        kc.index_copy_(2, pos, k), vc.index_copy_(2, pos, v)
        return sdpa(q, kc, vc[..., D // 2 :])

    run, (kc, vc) = compile(step), caches(new)
    yield run(*tokens(new), kc, vc, new.range(3, 4)), kc, vc
