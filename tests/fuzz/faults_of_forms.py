"""Faults of forms: merged heads, transposed keys, read-only caches, zeroed weights, masks, sinks, sizes from data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.fx import Node

from fuzz.fault import Fault, Faulty, collecting
from kvcompile.call import adoption
from kvcompile.packed import tensor
from kvcompile.passes import pipeline
from kvcompile.passes.canonical import divide_heads, divide_last
from kvcompile.passes.graph import inline, regions
from kvcompile.passes.mark import read_attention, read_scores
from kvcompile.passes.prove import find, formats, indexed_axes, writes

FORMS: list[Fault] = []
fault = collecting(FORMS)


# Merged heads


@fault(divide_heads, "other_copy")
def heads_are_divided_though_other_values_are_copied_into_the_cache(original: Faulty) -> Faulty:
    return lambda states: None


@fault(pipeline, "merge_last")
def plain_caches_get_their_merged_heads_back_in_reverse(original: Faulty) -> Faulty:
    def faulty(graph: Any, divided: Any) -> None:
        with mock.patch.object(divide_last, "_merged", lambda x: x.flip(-2).flatten(-2)):
            original(graph, divided)

    return faulty


@fault(divide_heads, "merged_axes")
def sequences_and_tokens_of_merged_heads_are_exchanged_for_the_caller(original: Faulty) -> Faulty:
    return lambda axes: original(axes[1] + axes[0] + axes[2:])


@fault(formats, "_layout")
def packed_caches_are_read_in_any_order_and_width(original: Faulty) -> Faulty:
    return lambda cache, chosen, packed: original(cache, chosen, None) if packed is None else packed.layout


# Transposed keys


@fault(indexed_axes, "_stored")
def new_tokens_of_transposed_caches_stay_transposed(original: Faulty) -> Faulty:
    def faulty(x: Tensor, names: str) -> Tensor:
        y = original(x, names)
        return y.mT.reshape(y.shape) if names.endswith("t") else y

    return faulty


@fault(find, "trace_read")
def transposed_keys_are_taken_for_plain_ones(original: Faulty) -> Faulty:
    def faulty(*args: Any) -> Any:
        read = original(*args)
        return replace(read, axes=read.axes.replace("dt", "td"))

    return faulty


@fault(tensor, "in_stored_order")
def transposed_caches_are_packed_as_they_lie(original: Faulty) -> Faulty:
    def faulty(x: Tensor, axes: str, head_dim: int) -> Tensor:
        y = original(x, axes, head_dim)
        return y.mT.reshape(y.shape) if axes.endswith("t") else y

    return faulty


# Caches that steps only read


@fault(adoption, "packed_of")
def the_tokens_of_an_adopted_cache_move_by_one(original: Faulty) -> Faulty:
    return lambda plain, layout, axes, **options: original(plain.roll(1, axes.index("t")), layout, axes, **options)


# Zeroed weights


@fault(read_attention, "_with_zeros")
def weights_that_any_mask_sets_to_zero_count_as_hidden_keys(original: Faulty) -> Faulty:
    return lambda call, weights, context: replace(weights, hidden_rows_are_zero=True)


@fault(read_attention, "_are_hidden")
def rows_of_any_scores_count_as_rows_without_a_visible_key(original: Faulty) -> Faulty:
    return lambda rows, where, weights: True


# Masks of zeros and ones


@fault(read_scores, "are_zeros_and_ones")
def any_factor_of_scores_counts_as_a_mask_of_zeros_and_ones(original: Faulty) -> Faulty:
    return lambda node, is_changed: True


# Sinks


@fault(read_attention, "_are_shifted_alike")
def sinks_and_scores_may_be_shifted_by_different_numbers(original: Faulty) -> Faulty:
    return lambda total, sink: True


# Positions and sizes from data


@fault(writes, "has_unread_size")
def written_sizes_that_only_data_determine_count_as_known(original: Faulty) -> Faulty:
    return lambda nodes: False


@fault(find, "has_size_from_data")
def caches_may_get_a_size_that_only_data_determine(original: Faulty) -> Faulty:
    return lambda node: False


@fault(writes, "first_of_slice")
def slices_begin_one_token_after_a_position_from_data(original: Faulty) -> Faulty:
    def faulty(start: Any, size: Any) -> Any:
        if not isinstance(start, Node):
            return original(start, size)
        with start.graph.inserting_after(start):
            return inline.insert_call(start.graph, torch.sym_max, start, 1)

    return faulty


# Regions


@fault(inline, "_key_of")
def calls_with_other_constants_share_a_trace(original: Faulty) -> Faulty:
    def faulty(fn: Any, args: tuple[Any, ...]) -> Any:
        return original(fn, tuple(arg for arg in args if isinstance(arg, Node)))

    return faulty


@fault(regions, "_add_region")
def tensors_of_one_shape_are_exchanged_in_a_region(original: Faulty) -> Faulty:
    def faulty(owner: Any, *args: Any) -> str:
        region: str = original(owner, *args)
        module = getattr(owner, region)
        inputs = module.graph.find_nodes(op="placeholder")
        for place, one in enumerate(inputs):
            for other in inputs[place + 1 :]:
                if one.meta["val"].shape == other.meta["val"].shape:
                    _exchange(one, other)
        module.recompile()
        return region

    return faulty


def _exchange(one: Node, other: Node) -> None:
    users = [(user, node) for node in (one, other) for user in node.users]
    for user, node in users:
        user.replace_input_with(node, other if node is one else one)
