"""Faults of views, of the rewrite, of written-out attention, and of calls."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fuzz.fault import Fault, Faulty, collecting, nothing
from kvcompile.call import adoption, packed_call
from kvcompile.passes.graph import index_map
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.mark import read_scores, write_marker, write_mask
from kvcompile.passes.pools import page
from kvcompile.passes.rewrite import caches, heads, merge_stores, new_tokens
from kvcompile.passes.stacks import rules

aten = torch.ops.aten

REWRITE: list[Fault] = []
fault = collecting(REWRITE)


# Reads and views that are read wrongly


@fault(index_map._RULES, operator.getitem)
def the_items_of_a_list_of_views_all_begin_at_0(original: Faulty) -> Faulty:
    def faulty(found: Any, node: Any) -> Any:
        given, node.args = node.args, (node.args[0], 0)
        try:
            return original(found, node)
        finally:
            node.args = given

    return faulty


@fault(index_map._RULES, aten.slice.Tensor)
def slices_of_views_have_no_start(original: Faulty) -> Faulty:
    def faulty(found: Any, node: Any) -> Any:
        viewed = original(found, node)
        return viewed and replace(viewed, starts=found.starts)

    return faulty


@fault(rules, "_view")
def the_parts_of_a_stack_are_counted_from_the_last(original: Faulty) -> Faulty:
    def faulty(reader: Any, user: Any) -> Any:
        state = original(reader, user)
        first = list(state.values)
        return replace(state, values=dict(zip(first, list(state.values.values())[::-1], strict=True)))

    return faulty


@fault(page, "_counted_from_first")
def slots_and_blocks_are_off_by_one(original: Faulty) -> Faulty:
    return lambda index, size: original((index + 1) % size, size)


@fault(caches, "insert_operand_slots")
def gathered_tokens_are_read_in_reverse(original: Faulty) -> Faulty:
    return lambda graph, read: inline(graph, lambda slots: slots.flip(-1), original(graph, read))


# The rewrite


@fault(caches.CacheRewriter, "_write_back")
def the_store_is_not_written_back(original: Faulty) -> Faulty:
    return nothing(original)


@fault(caches.CacheRewriter, "_input_action")
def a_cache_that_drops_tokens_takes_the_outputs_of_grown_caches(original: Faulty) -> Faulty:
    def faulty(self: Any, cache: Any, layout: Any, index: int) -> Any:
        action = original(self, cache, layout, index)
        empty = tuple(place for place, node in enumerate(self.output.args[0]) if node is None)
        return replace(action, outputs=empty) if action.kind == "growing" and cache.drops_tokens else action

    return faulty


@fault(caches.CacheRewriter, "rewrite_attention")
def attention_reads_the_cache_before_its_writes(original: Faulty) -> Faulty:
    def faulty(self: Any, attention: Any, key: Any, value: Any) -> None:
        before = {root: _input_of(data) for root, data in self.packed.items()}
        given, self.packed = self.packed, before
        try:
            original(self, attention, key, value)
        finally:
            self.packed = given

    return faulty


def _input_of(data: Any) -> Any:
    """The packed input that stores changed to ``data``, if it has the same shape."""
    inputs = [node for node in data.graph.find_nodes(op="placeholder") if node.name.endswith("_packed")]
    pending, seen = [data], set()
    while pending:
        node = pending.pop()
        if node in inputs and node.meta["val"].shape == data.meta["val"].shape:
            return node
        new = [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(new)
        pending += new
    return data


@fault(caches.CacheRewriter, "_changed")
def only_the_first_write_of_a_cache_is_stored(original: Faulty) -> Faulty:
    def faulty(self: Any, cache: Any, layout: Any, state: Any, write: Any) -> Any:
        is_first = write is cache.writes[0] or write is cache.kept
        return original(self, cache, layout, state, write) if is_first else state

    return faulty


@fault(caches.CacheRewriter, "_read")
def attention_of_some_sequences_reads_the_first_ones(original: Faulty) -> Faulty:
    def faulty(self: Any, read: Any, layout: Any) -> Any:
        return original(self, read if read.first_sequence is None else replace(read, first_sequence=0), layout)

    return faulty


@fault(caches, "data_of_heads")
def a_range_of_heads_begins_with_the_first_head(original: Faulty) -> Faulty:
    return lambda graph, data, first, num_heads: original(graph, data, 0, num_heads)


@fault(caches, "group_heads")
def query_heads_that_take_kv_heads_in_turn_are_not_reordered(original: Faulty) -> Faulty:
    return lambda graph, marker, num_kv_heads, tiles: marker


@fault(caches, "tile_heads")
def the_heads_of_the_output_are_not_put_back(original: Faulty) -> Faulty:
    return lambda graph, output, num_kv_heads, tiles: output


@fault(heads, "_swap")
def reordered_heads_take_the_wrong_stride(original: Faulty) -> Faulty:
    return lambda x, dim, outer, inner: original(x, dim, inner, outer)


@fault(caches, "insert_nan_in_hidden_rows")
def rows_without_a_visible_key_are_zero(original: Faulty) -> Faulty:
    return lambda graph, out, mask, kv_len: out


def _of_attention(name: str, change: Callable[[Any, Any], Any]) -> Callable[[Faulty], Faulty]:
    """A fault that attends with another value of an attribute of the marker."""

    def make(original: Faulty) -> Faulty:
        def faulty(graph: Any, marker: Any, *args: Any) -> Any:
            value = getattr(marker, name)
            changed = value if value is None else change(graph, value)
            return original(graph, replace(marker, **{name: changed}), *args)

        return faulty

    make.__name__ = ""
    return make


def _attention_fault(title: str, name: str, change: Callable[[Any, Any], Any]) -> None:
    make = _of_attention(name, change)
    make.__name__ = title
    REWRITE.append(Fault(caches, "insert_attention", make))


_attention_fault("the_scale_is_dropped", "scale", lambda graph, scale: None)
_attention_fault("the_causal_mask_is_dropped", "is_causal", lambda graph, is_causal: False)
_attention_fault("the_softcap_is_dropped", "softcap", lambda graph, softcap: 0.0)
_attention_fault("the_mask_is_dropped", "mask", lambda graph, mask: None)
_attention_fault(
    "the_mask_is_off_by_one", "mask", lambda graph, mask: inline(graph, lambda mask: mask.roll(1, -1), mask)
)
_attention_fault(
    "the_mask_of_another_row_is_taken", "mask", lambda graph, mask: inline(graph, lambda mask: mask.flip(-2), mask)
)


@fault(caches, "insert_attention")
def keys_and_values_are_exchanged(original: Faulty) -> Faulty:
    def faulty(graph: Any, marker: Any, k: Any, v: Any, key: Any, value: Any, kv_len: Any, *new: Any) -> Any:
        return original(graph, marker, v, k, value, key, kv_len, *new[::-1])

    return faulty


@fault(caches, "insert_attention")
def the_output_of_another_sequence_is_taken(original: Faulty) -> Faulty:
    return lambda graph, *args: inline(graph, lambda out: out.roll(1, 0), original(graph, *args))


@fault(caches, "insert_store")
def the_first_sequence_of_a_store_is_dropped(original: Faulty) -> Faulty:
    def faulty(graph: Any, data: Any, layout: Any, x: Any, positions: Any, valid: Any, first: Any = None) -> Any:
        return original(graph, data, layout, x, positions, valid, 0 if first is not None else None)

    return faulty


@fault(caches, "insert_store")
def stores_ignore_which_positions_are_valid(original: Faulty) -> Faulty:
    def faulty(graph: Any, data: Any, layout: Any, x: Any, positions: Any, valid: Any, first: Any = None) -> Any:
        return original(graph, data, layout, x, positions, None, first)

    return faulty


@fault(merge_stores, "_merge")
def merged_stores_exchange_keys_and_values(original: Faulty) -> Faulty:
    def faulty(graph: Any, first: Any, second: Any) -> None:
        x, other = first.kwargs["x"], second.kwargs["x"]
        first.kwargs, second.kwargs = {**first.kwargs, "x": other}, {**second.kwargs, "x": x}
        original(graph, first, second)

    return faulty


@fault(merge_stores, "_fit")
def stores_to_other_positions_are_merged(original: Faulty) -> Faulty:
    def faulty(first: Any, second: Any) -> bool:
        positions = first.kwargs["positions"].meta["val"].shape == second.kwargs["positions"].meta["val"].shape
        given, second.kwargs = second.kwargs, {**second.kwargs, "positions": first.kwargs["positions"]}
        try:
            return bool(positions and original(first, second))
        finally:
            second.kwargs = given

    return faulty


# Written-out attention


@fault(write_marker, "write_mask")
def written_out_attention_loses_its_mask(original: Faulty) -> Faulty:
    return nothing(original)


@fault(write_mask, "_bool_mask")
def a_bool_mask_shows_what_it_hides(original: Faulty) -> Faulty:
    def faulty(writer: Any, steps: Any, place: Any) -> Any:
        return original(writer, tuple(replace(step, where=not step.where) for step in steps), place)

    return faulty


@fault(read_scores, "_scale_by")
def a_scale_of_scores_is_dropped(original: Faulty) -> Faulty:
    return lambda call, scores, number: scores


@fault(read_scores, "_scaled")
def a_scale_after_a_bias_leaves_the_bias(original: Faulty) -> Faulty:
    return lambda step, number: step


# Calls


@fault(adoption, "_why_not_plain")
def caches_with_aliases_are_adopted(original: Faulty) -> Faulty:
    return nothing(original)


@fault(packed_call, "check_distinct")
def packed_inputs_may_share_memory(original: Faulty) -> Faulty:
    return nothing(original)


@fault(packed_call, "_new_cache")
def a_growing_cache_loses_its_last_token_before_it_grows(original: Faulty) -> Faulty:
    def faulty(cache: Any, action: Any, *sizes: Any) -> Any:
        t = action.axes.index("t")
        longer = cache.shape[t] > 0
        return original(
            torch.cat([cache.narrow(t, 1, cache.shape[t] - 1), cache.narrow(t, 0, 1)], t) if longer else cache,
            action,
            *sizes,
        )

    return faulty


@fault(packed_call, "_copy_of")
def a_functional_cache_is_written_in_place(original: Faulty) -> Faulty:
    return lambda cache, sequences=None: cache if sequences is None else original(cache, sequences)


@fault(caches, "hide_first_tokens")
def tokens_before_the_first_that_is_read_are_seen(original: Faulty) -> Faulty:
    return lambda graph, marker, first_token, num_tokens: original(graph, marker, 0, first_token + num_tokens)


# Exact attention to new tokens


@fault(caches.CacheRewriter, "_changed")
def the_tokens_of_the_first_write_are_read_for_the_last(original: Faulty) -> Faulty:
    def faulty(self: Any, *args: Any) -> Any:
        first, state = self._last_stored, original(self, *args)
        self._last_stored = first or self._last_stored
        return state

    return faulty


@fault(new_tokens.NewTokens, "after_slice")
def new_tokens_keep_their_slots_when_a_window_drops_tokens(original: Faulty) -> Faulty:
    return lambda self, graph, source: self


@fault(caches, "can_be_exact")
def new_tokens_of_all_sequences_are_read_by_some(original: Faulty) -> Faulty:
    return lambda read, query: original(replace(read, first_sequence=None), query)


@fault(new_tokens.NewTokens, "of_heads")
def the_new_tokens_of_a_range_of_heads_begin_with_the_first_head(original: Faulty) -> Faulty:
    return lambda self, graph, first, num_heads: original(self, graph, 0, num_heads)


@fault(new_tokens, "_slots")
def new_tokens_that_were_not_written_are_read(original: Faulty) -> Faulty:
    return lambda positions, valid: positions.clone()
