"""Attention steps that the passes refuse, each with the code of its reason.

A step takes queries, new keys and values, a key cache and a value cache, and the positions of the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

B, H, S, D = 2, 2, 70, 64


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)


def write(cache: Tensor, x: Tensor, pos: Tensor) -> Tensor:
    return cache.index_copy_(2, pos, x)


def cache_summed_up(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc), kc.sum()


def cache_read_before_its_write(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    before = kc.mean(2)
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc), before


def view_escapes(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    repeated = kc.repeat_interleave(2, 1)
    return sdpa(q.repeat_interleave(2, 1), repeated, vc.repeat_interleave(2, 1)), repeated


def out_of_place_write(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    keys, values = kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)
    return sdpa(q, keys, values)


def accumulating_write(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc.index_put_((torch.arange(B)[:, None], torch.zeros(1, dtype=torch.long), pos), k[:, 0], accumulate=True)
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def write_of_some_heads(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc[:, :1, 5:6] = k[:, :1]
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def no_cache_at_all(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    return sdpa(q, k + 1, v + 1)


def plain_cache_only_read(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    return sdpa(q, kc, vc)


def one_tensor_for_keys_of_one_layer_and_values_of_another(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc) + sdpa(q, vc, kc)


def keys_and_values_of_different_tokens_are_read(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc[:, :, 8:], vc[:, :, :-8])


def a_known_and_an_unknown_read(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc) + sdpa(q, kc[:, :, ::2], vc[:, :, ::2])


def dropout(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc, dropout_p=1.0)


def softmax_over_heads(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return (q @ kc.mT).softmax(1) @ vc


def talking_heads(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return torch.einsum("bhqk,hg->bgqk", (q @ kc.mT).softmax(-1), q[0, :, 0, :H]) @ vc


REFUSED: dict[Callable[..., Any], str] = {
    cache_summed_up: "used_elsewhere",
    cache_read_before_its_write: "used_elsewhere",
    view_escapes: "escaping_view",
    out_of_place_write: "not_written_back",
    accumulating_write: "unknown_write",
    write_of_some_heads: "unknown_write",
    softmax_over_heads: "unrecognised",
    talking_heads: "unrecognised",
    no_cache_at_all: "no_cache",
    plain_cache_only_read: "plain_read_only",
    one_tensor_for_keys_of_one_layer_and_values_of_another: "other_role",
    keys_and_values_of_different_tokens_are_read: "unknown_read",
    a_known_and_an_unknown_read: "used_elsewhere",
    dropout: "dropout",
}


def attention_before_the_write(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    before = sdpa(q, kc, vc, torch.arange(S)[None] < pos)
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc, torch.arange(S)[None] <= pos), before


def new_tokens_are_joined_with_the_cache_before_the_write(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    """RecurrentGemma: attention sees one token more than the cache holds."""
    k, v = k * 2, v * 2
    keys, values = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, keys, values)


def new_tokens_are_joined_and_written_out_of_place(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    keys, values = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
    return sdpa(q, keys, values), kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)


def keys_before_the_write_get_rope(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    one, other = kc.chunk(2, -1)
    angles = torch.arange(S)[:, None] * torch.linspace(1, 0.01, D // 2)
    keys = torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, keys, vc)


def write_after_the_read(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    out = sdpa(q, kc, vc)
    write(kc, k * 2, pos + 1)
    return out


def other_keys_are_read(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, k.expand(B, H, S, D), vc)


def old_keys_are_read(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    old = kc.clone()
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, old, vc)


def keys_are_added_up_over_tokens(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.cumsum(2), vc)


def keys_decay(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    kc.mul_(0.9)
    return sdpa(q, kc, vc)


def keys_are_values_elsewhere(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc, vc) + sdpa(q, vc, kc)


def keys_become_integers(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.int().float(), vc)


def keys_become_8_bit_floats(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.to(torch.float8_e5m2).float(), vc)


def write_of_whole_sequences(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc[:1] = k[:1]
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def tokens_of_the_cache_are_written_again(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, kc[:, :, :1], pos), write(vc, v, pos)
    return sdpa(q, kc, vc)


def new_tokens_are_mixed_with_old_ones(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc.index_copy_(2, pos, (k + kc[:, :, pos]) / 2)
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def written_sequences_are_read_before(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    keys = kc[:1]
    before = keys.sum()
    write(keys, k[:1], pos), write(vc, v, pos)
    return sdpa(q, kc, vc) + before


def write_of_some_channels(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc[:, :, 5:6, :32] = k[..., :32]
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def write_that_depends_on_the_channel(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc.copy_(torch.where(torch.arange(D) < 7, k, kc))
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def sequences_in_another_order(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.flip(0), vc.flip(0))


def heads_in_another_order(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc[:, [1, 0]], vc[:, [1, 0]])


def tokens_in_another_order_for_this_attention(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, kc.roll(1, 2), vc.roll(1, 2))


def write_through_a_view_of_the_storage(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    kc.as_strided((B, H, S, D), kc.stride(), 0).index_copy_(2, pos, k)
    write(vc, v, pos)
    return sdpa(q, kc, vc)


def the_graph_depends_on_data_in_between(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    if kc.sum() > 0:
        q = q * 2
    return sdpa(q, kc, vc)


def new_keys_returned_beside_a_view(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    k, v = k * 2, v * 2
    return sdpa(q, k, v), k, v, k.transpose(1, 2)


def new_keys_returned_beside_their_base(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    projected, v = k.flatten(2) * 2, v * 2
    k = projected.view(B, H, 1, D)
    return sdpa(q, k, v), k, v, projected


def new_keys_and_values_are_channels_of_one_returned_tensor(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    rows = torch.cat([k, v], -1) * 2
    return sdpa(q, *rows.split(D, -1)), rows


def two_caches_are_joined(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Any:
    write(kc, k, pos), write(vc, v, pos)
    return sdpa(q, torch.cat([kc, k], 2), torch.cat([vc, v], 2))


def new_rows_of_two_returned_caches_are_joined(
    q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor
) -> Any:
    rows = k * 2, v * 2, k * 3, v * 3
    return sdpa(q, torch.cat([rows[0], rows[2]], 2), torch.cat([rows[1], rows[3]], 2)), *rows


UNSAFE: dict[Callable[..., Any], str] = {
    attention_before_the_write: "used_elsewhere",
    new_tokens_are_joined_with_the_cache_before_the_write: "read_before_write",
    new_tokens_are_joined_and_written_out_of_place: "read_before_write",
    keys_before_the_write_get_rope: "read_before_write",
    write_after_the_read: "written_after_read",
    other_keys_are_read: "unknown_read",
    old_keys_are_read: "read_before_write",
    keys_are_added_up_over_tokens: "computed_from_cache",
    keys_decay: "unknown_write",
    keys_are_values_elsewhere: "other_role",
    keys_become_integers: "unknown_read",
    keys_become_8_bit_floats: "unknown_read",
    write_of_whole_sequences: "unknown_write",
    tokens_of_the_cache_are_written_again: "unknown_write",
    new_tokens_are_mixed_with_old_ones: "unknown_write",
    written_sequences_are_read_before: "used_elsewhere",
    write_of_some_channels: "unknown_write",
    write_that_depends_on_the_channel: "unknown_write",
    sequences_in_another_order: "computed_from_cache",
    heads_in_another_order: "computed_from_cache",
    tokens_in_another_order_for_this_attention: "computed_from_cache",
    write_through_a_view_of_the_storage: "unknown_write",
    the_graph_depends_on_data_in_between: "plain_read_only",
    new_keys_returned_beside_a_view: "escaping_view",
    new_keys_returned_beside_their_base: "escaping_view",
    new_keys_and_values_are_channels_of_one_returned_tensor: "part_of_tensor",
    two_caches_are_joined: "joined",
    new_rows_of_two_returned_caches_are_joined: "joined",
}
"""Graphs that only resemble a cache. Their tests run node by node, without generated code."""
