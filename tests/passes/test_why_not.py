"""Keys that are not a cache have a reason: new rows, codes that the model dequantizes, caches of another device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.canonical.drop_whole_copies import drop_whole_copies
from kvcompile.passes.prove.why_not import no_cache
from kvcompile.passes.refusal import Reason

B, H, S, D = 2, 3, 40, 16


def offloaded(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([past.to("meta"), new], 2)


def written_after_it_was_moved(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    cache = past.to("meta")
    cache[:, :, 3:4] = new
    return cache


def scaled(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([(codes.float() - 3) * new.amax(-1, keepdim=True), new], 2)


def packed_by_two(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    codes = codes.flatten(0, 2)
    values = torch.empty(2 * codes.shape[0], D, device="meta")
    values[: codes.shape[0]] = codes & 15
    values[codes.shape[0] :] = codes >> 4
    return values.view(B, H, -1, D) * new.mean()


def a_projection_by_quantized_weights(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    return new @ weight.float()


def rows_under_a_mask_of_bytes(past: Tensor, new: Tensor, codes: Tensor, weight: Tensor) -> Tensor:
    return new * codes[:, :1, :1, :1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (offloaded, Reason.moved),
        (written_after_it_was_moved, Reason.moved),
        (scaled, Reason.already_quantized),
        (packed_by_two, Reason.already_quantized),
        (a_projection_by_quantized_weights, Reason.no_cache),
        (rows_under_a_mask_of_bytes, Reason.no_cache),
    ],
)
def test_keys_that_are_not_a_cache_have_a_reason(make: Callable[..., Tensor], reason: Reason) -> None:
    past, new = torch.empty(B, H, S, D), torch.empty(B, H, 1, D, device="meta")
    codes = torch.empty(B, H, S, D, dtype=torch.uint8, device="meta")
    graph = make_fx(torch.func.functionalize(make))(past, new, codes, codes[0, 0, :D]).graph
    assert no_cache(graph.output_node().args[0], "key", later_states=()).reason is reason


def summed(cache: Tensor, new: Tensor) -> Tensor:
    hit = (torch.arange(S) == 3)[:, None]
    return cache.copy_(cache * ~hit + new * hit)


def cleared_before_it_is_written(cache: Tensor, new: Tensor) -> Tensor:
    cache.zero_()
    cache[:, :, 3:4] = new
    return cache


def part_of_a_flipped_cache(cache: Tensor, new: Tensor) -> Tensor:
    cache.copy_(cache.flip(0))
    cache[0, :, 3:4] = new[0]
    return cache[0]


def overwritten_with_the_keys(cache: Tensor, new: Tensor) -> Tensor:
    keys = new.expand(cache.shape) * 2
    cache.copy_(keys)
    return keys


def overwritten_in_another_dtype(cache: Tensor, new: Tensor) -> Tensor:
    cache.copy_(new.double() * 2)
    return cache


def rows_that_are_written(cache: Tensor, new: Tensor) -> Tensor:
    keys = new * 2
    cache[:, :, 3:4] = keys
    return keys


def keys_beside_kept_channels(cache: Tensor, new: Tensor) -> Tensor:
    keys, kept = (new.repeat(1, 1, S, 2) * 2).chunk(2, -1)
    cache.copy_(kept)
    return keys


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (summed, Reason.unknown_write),
        (cleared_before_it_is_written, Reason.unknown_write),
        (part_of_a_flipped_cache, Reason.unknown_write),
        (overwritten_with_the_keys, Reason.overwritten),
        (overwritten_in_another_dtype, Reason.overwritten),
        (rows_that_are_written, Reason.no_cache),
        (keys_beside_kept_channels, Reason.no_cache),
    ],
)
def test_keys_that_replace_all_of_an_input_are_a_cache(
    make: Callable[[Tensor, Tensor], Tensor], reason: Reason
) -> None:
    graph = make_fx(torch.func.functionalize(make))(torch.empty(B, H, S, D), torch.empty(B, H, 1, D)).graph
    drop_whole_copies(graph)
    assert no_cache(graph.output_node().args[0], "key", later_states=()).reason is reason


def joined_before_the_write(cache: Tensor, new: Tensor) -> Tensor:
    keys = torch.cat([cache, new], 2)
    cache[:, :, 3:4] = new
    return keys


def joined_and_written_through_a_transpose(cache: Tensor, new: Tensor) -> Tensor:
    view = cache.transpose(1, 2)
    keys = torch.cat([view, new.transpose(1, 2) * 2], 1)
    view[:, 3:4] = new.transpose(1, 2) * 2
    return keys


def changed_and_put_back(cache: Tensor, new: Tensor) -> Tensor:
    keys = cache[:1].index_copy(2, torch.tensor([3]), new[:1])
    cache[:1] = keys
    return keys


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (joined_before_the_write, Reason.read_before_write),
        (joined_and_written_through_a_transpose, Reason.read_before_write),
        (changed_and_put_back, Reason.no_cache),
    ],
)
def test_a_cache_is_read_before_its_write_if_it_is_not_written_with_what_is_read(
    make: Callable[[Tensor, Tensor], Tensor], reason: Reason
) -> None:
    graph = make_fx(torch.func.functionalize(make))(torch.empty(B, H, S, D), torch.empty(B, H, 1, D)).graph
    assert no_cache(graph.output_node().args[0], "key", later_states=()).reason is reason
