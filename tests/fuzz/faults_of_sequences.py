"""Faults of masked writes, and of sequences that are reordered or repeated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import ops
from torch.fx import Node

from fuzz.fault import Fault, Faulty, collecting
from kvcompile.passes.graph.permutations import REPETITIONS
from kvcompile.passes.prove import find, masked, reorders, writes
from kvcompile.passes.rewrite import caches
from kvcompile.passes.stacks import rules
from kvcompile.passes.stacks.values import Made

aten = ops.aten

SEQUENCES: list[Fault] = []
fault = collecting(SEQUENCES)


# Masked writes


@fault(masked, "_is_identity")
def kept_vectors_may_come_from_another_place(original: Faulty) -> Faulty:
    return lambda index_map: True


@fault(masked.Masked, "is_of_tokens")
def masks_of_new_vectors_may_differ_between_heads(original: Faulty) -> Faulty:
    return lambda self, fn, args: True


@fault(masked.Masked, "masks")
def masks_show_the_tokens_that_they_hide(original: Faulty) -> Faulty:
    def faulty(self: Any, graph: Any) -> Any:
        masks, takes_new = original(self, graph)
        return masks, [not takes for takes in takes_new]

    return faulty


@fault(writes, "chosen_write")
def a_choice_of_the_written_cache_writes_all_tokens(original: Faulty) -> Faulty:
    return lambda *args: replace(original(*args), normalise=args[2].normalise)


# Sequences


@fault(caches, "insert_reorder")
def sequences_stay_in_their_order(original: Faulty) -> Faulty:
    return lambda graph, data, sequences: data


@fault(reorders._MATCHERS, aten.gather.default)
def sequences_of_gathered_vectors_may_differ_between_heads(original: Faulty) -> Faulty:
    return lambda node, axes: node.args[2] if axes[node.args[1]] == "b" else None


@fault(find, "_repeats")
def an_expansion_to_the_same_size_repeats_the_first_sequence(original: Faulty) -> Faulty:
    def faulty(state: Node) -> bool:
        return state.target in REPETITIONS

    return faulty


@fault(find, "is_written_before")
def sequences_that_are_selected_may_be_repeated(original: Faulty) -> Faulty:
    return lambda repetition: False


@fault(rules, "_is_taken")
def sequences_of_a_stack_may_be_put_back_in_another_place(original: Faulty) -> Faulty:
    def faulty(new: Any, target: Any, value: Any, place: Any) -> bool:
        return isinstance(new, Made) and new.target is target and new.args[0] == value

    return faulty
