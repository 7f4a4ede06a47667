"""Faults of the analysis: checks that are dropped, and writes that are read wrongly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fuzz.fault import Fault, Faulty, collecting, nothing
from kvcompile.passes.canonical import drop_whole_copies, grow_whole_caches, join_equal_writes, read_written_tokens
from kvcompile.passes.prove import find, indexed_axes, moves, reads, settle, uses, writes
from kvcompile.passes.stacks import analyse

aten = torch.ops.aten

ANALYSIS: list[Fault] = []
fault = collecting(ANALYSIS)


# Checks of the analysis that are dropped


@fault(uses.UseChecker, "check_earlier_states")
def uses_of_a_cache_before_its_writes_are_not_checked(original: Faulty) -> Faulty:
    return nothing(original)


@fault(uses.UseChecker, "check_reads")
def uses_of_a_cache_after_its_writes_are_not_checked(original: Faulty) -> Faulty:
    return nothing(original)


@fault(uses.UseChecker, "_other_use")
def views_of_a_cache_are_understood_without_a_look_at_their_users(original: Faulty) -> Faulty:
    def faulty(self: Any, cache: Any, node: Any, user: Any, understood: Any) -> Any:
        return None if user.target in find.VIEW_OPS else original(self, cache, node, user, understood)

    return faulty


@fault(uses, "share_memory")
def the_alias_check_of_outputs_is_dropped(original: Faulty) -> Faulty:
    return lambda one, other: False


@fault(find, "_check_heads")
def the_shapes_of_query_and_caches_are_not_checked(original: Faulty) -> Faulty:
    return nothing(original)


@fault(find.CacheFinder, "_cache")
def a_cache_may_serve_in_both_roles(original: Faulty) -> Faulty:
    def faulty(self: Any, read: Any, role: Any) -> Any:
        known = self.caches.get(read.root)
        return known if known is not None else original(self, read, role)

    return faulty


@fault(find, "_find_write_back")
def a_cache_counts_as_written_back_if_anything_is_copied_into_it(original: Faulty) -> Faulty:
    def faulty(node: Any, base: Any, axes: str, axes_of_base: str) -> Any:
        copies = (user for user in base.users if user.target is aten.copy_.default and user.args[0] is base)
        return next(copies, None)

    return faulty


@fault(find, "_is_zeros")
def any_buffer_of_the_graph_counts_as_zeros(original: Faulty) -> Faulty:
    return lambda node: node.op == "call_function"


@fault(reads, "_check_slices")
def slices_of_channels_are_not_checked(original: Faulty) -> Faulty:
    return nothing(original)


@fault(reads, "_check_cast")
def casts_to_integers_are_ignored(original: Faulty) -> Faulty:
    return nothing(original)


@fault(reads, "_are")
def steps_within_a_dimension_are_ignored(original: Faulty) -> Faulty:
    def faulty(dim: Any, axis: int, index_map: Any, *, repeated: bool = False) -> bool:
        return bool(original([factor._replace(step=1) for factor in dim], axis, index_map, repeated=repeated))

    return faulty


@fault(settle, "_refuse_partners")
def sites_that_share_a_refused_cache_are_accepted(original: Faulty) -> Faulty:
    return lambda candidates: False


@fault(drop_whole_copies, "_made_from")
def copies_between_inputs_are_dropped(original: Faulty) -> Faulty:
    return lambda node: SimpleNamespace(op="call_function")


@fault(join_equal_writes, "may_leave")
def equal_caches_of_the_caller_become_one(original: Faulty) -> Faulty:
    return lambda node: False


@fault(join_equal_writes, "computed_alike")
def writes_of_other_vectors_count_as_equal(original: Faulty) -> Faulty:
    return lambda one, other: True


@fault(read_written_tokens, "_writes")
def joined_tokens_need_not_be_the_written_ones(original: Faulty) -> Faulty:
    return lambda write, new: True


@fault(grow_whole_caches, "may_leave")
def parts_of_the_caller_become_views_of_the_joined_cache(original: Faulty) -> Faulty:
    return lambda node: False


@fault(grow_whole_caches, "_selected")
def parts_are_joined_in_any_order(original: Faulty) -> Faulty:
    def faulty(node: Any, dim: int, start: int, *, drops: bool) -> Any:
        base = node.all_input_nodes[0] if node.all_input_nodes else None
        return (base, 1) if drops and base is not None else original(node, dim, start, drops=drops)

    return faulty


@fault(find, "is_growing")
def any_changes_make_a_growing_cache(original: Faulty) -> Faulty:
    return lambda changes: True


@fault(find, "is_shifting")
def a_window_may_drop_more_tokens_than_it_appends(original: Faulty) -> Faulty:
    return lambda changes, base, axes: True


@fault(analyse, "_is_input")
def parts_of_a_stack_may_become_views_of_inputs(original: Faulty) -> Faulty:
    return lambda stack, value: False


# Writes that are read wrongly


@fault(writes._MATCHERS, aten.index_put.default)
def accumulation_is_ignored(original: Faulty) -> Faulty:
    def faulty(node: Any, axes: str, role: str) -> Any:
        given, node.args = node.args, node.args[:3]
        try:
            return original(node, axes, role)
        finally:
            node.args = given

    return faulty


@fault(indexed_axes, "is_arange")
def any_index_of_sequences_or_heads_counts_as_all_of_them(original: Faulty) -> Faulty:
    return lambda node, size: True


@fault(indexed_axes, "_places_of_aranges")
def positions_of_indexed_heads_may_differ_between_heads(original: Faulty) -> Faulty:
    def faulty(base: Any, axes: str, given: dict[str, Any]) -> Any:
        return original(base, axes, {axis: index for axis, index in given.items() if axis != "t"} or given)

    return faulty


@fault(writes, "_has_size_1")
def masks_and_indices_may_differ_between_heads_and_channels(original: Faulty) -> Faulty:
    return lambda shape, axes: True


@fault(indexed_axes, "wrapped")
def negative_positions_do_not_count_from_the_end(original: Faulty) -> Faulty:
    return lambda positions, num_tokens: positions.long()


@fault(indexed_axes, "wrapped")
def positions_are_off_by_one(original: Faulty) -> Faulty:
    return lambda positions, num_tokens: original((positions + 1) % num_tokens, num_tokens)


@fault(writes, "first_of_slice")
def slices_begin_at_the_first_index(original: Faulty) -> Faulty:
    return lambda start, size: 0


@fault(writes._MATCHERS, aten.slice_scatter.default)
def the_step_of_a_written_slice_is_ignored(original: Faulty) -> Faulty:
    def faulty(node: Any, axes: str, role: str) -> Any:
        given, node.args = node.args, node.args[:5]
        try:
            return original(node, axes, role)
        finally:
            node.args = given

    return faulty


@fault(writes, "_is_put_back")
def a_slice_may_be_put_back_in_another_place(original: Faulty) -> Faulty:
    return lambda scatter, part: True


@fault(writes, "_checked_sequence")
def writes_of_some_sequences_begin_with_the_first_sequence(original: Faulty) -> Faulty:
    def faulty(*args: Any) -> int:
        original(*args)
        return 0

    return faulty


@fault(writes._MATCHERS, aten.cat.default)
def the_order_of_concatenated_tensors_is_ignored(original: Faulty) -> Faulty:
    def faulty(node: Any, axes: str, role: str) -> Any:
        tensors, *others = node.args
        given, node.args = node.args, (list(tensors)[::-1], *others)
        try:
            return original(node, axes, role) or original(node, axes, role)
        finally:
            node.args = given

    return faulty


@fault(writes, "_write")
def new_tokens_are_stored_in_reverse(original: Faulty) -> Faulty:
    def faulty(node: Any, base: Any, form: str, axes: str, fn: Faulty, *args: Any, **kwargs: Any) -> Any:
        def reverse(*values: Any) -> Any:
            x, positions, valid = fn(*values)
            return x, positions.flip(-1), valid

        return original(node, base, form, axes, reverse, *args, **kwargs)

    return faulty


@fault(indexed_axes, "_stored")
def heads_and_tokens_of_new_vectors_are_exchanged(original: Faulty) -> Faulty:
    def faulty(x: Tensor, names: str) -> Tensor:
        y = original(x, names)
        return y.transpose(1, 2).reshape(y.shape)

    return faulty


@fault(indexed_axes, "_stored")
def the_sequences_of_new_vectors_are_reversed(original: Faulty) -> Faulty:
    return lambda x, names: original(x, names).flip(0)


@fault(writes, "shift_of_tokens")
def a_shift_of_tokens_is_read_as_new_tokens(original: Faulty) -> Faulty:
    return nothing(original)


@fault(moves, "_move")
def tokens_move_one_place_too_far(original: Faulty) -> Faulty:
    def faulty(node: Any, base: Any, form: str, axes: str, source: Faulty, *args: Any, **kwargs: Any) -> Any:
        return original(node, base, form, axes, lambda *values: source(*values).roll(1, 0), *args, **kwargs)

    return faulty


@fault(writes, "converted")
def new_tokens_keep_their_own_dtype(original: Faulty) -> Faulty:
    return lambda graph, value, cache: value
