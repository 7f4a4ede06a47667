"""Stage B, before analysis: a graph input that holds several caches becomes one input for every cache.

Models keep one tensor for keys and values (``kv[0]``, ``kv[1]``) or one for all layers (``cache[layer, 0]``). If such a
*stack* is used in no other way than by its *parts* (:mod:`kvcompile.passes.read_stack`), these are values of their own,
and become inputs of their own: scalar replacement of aggregates, to a compiler. The passes behind this one know no
stacks. A part is proven, given a format and rewritten as a cache that came by itself, or stays a plain tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvcompile.passes.find_caches import first_state
from kvcompile.passes.inline import size_node
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.read_stack import CACHE_RANK, PartIndex, Stack, UsedAsWholeError, Value, read_stack

aten = torch.ops.aten


@dataclass(frozen=True)
class SplitStack:
    """An input that became several.

    Attributes:
        index: its position among the inputs before.
        places: positions of the parts that the graph uses among the inputs after: the first part takes the place of
            the stack, the others come behind all inputs that were there.
    """

    index: int
    places: Mapping[PartIndex, int]


def split_stacks(gm: GraphModule, example_inputs: list[Any]) -> tuple[SplitStack, ...]:
    """Split the stacks among the inputs of ``gm`` that hold keys or values of attention; changes ``gm`` in place.

    Args:
        gm: functional ATen graph with markers.
        example_inputs: its fake inputs; those of parts take the place of those of stacks.
    """
    calls = [Marker.of(node) for node in markers_of(gm.graph)]
    attended = {first_state(operand) for call in calls for operand in (call.key, call.value)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    split = []
    for index, placeholder in enumerate(placeholders):
        try:
            stack = read_stack(placeholder) if placeholder in attended else None
        except UsedAsWholeError:
            continue  # the sites that read it are refused, and say so
        if stack is not None and stack.used:
            split.append(SplitStack(index, _replace_input(gm, stack, index, example_inputs)))
    return tuple(split)


def places_of(inputs: Collection[int], stacks: Sequence[SplitStack]) -> list[int]:
    """Positions of inputs, of which some are stacks, after these were split."""
    return sorted({*inputs, *(place for stack in stacks if stack.index in inputs for place in stack.places.values())})


def names_of_parts(names: Mapping[int, str], stacks: Sequence[SplitStack]) -> dict[int, str]:
    """What the user calls each input, after stacks were split: ``kv[0]``."""
    return {
        **names,
        **{place: names[stack.index] + str(list(part)) for stack in stacks for part, place in stack.places.items()},
    }


def _replace_input(gm: GraphModule, stack: Stack, index: int, example_inputs: list[Any]) -> dict[PartIndex, int]:
    """Put inputs for the parts in the place of a stack; returns where they are among the inputs."""
    places: dict[PartIndex, int] = {}
    inputs: dict[PartIndex, Node] = {}
    for part in stack.used:
        last = gm.graph.find_nodes(op="placeholder")[-1]
        with gm.graph.inserting_after(last) if places else gm.graph.inserting_before(stack.node):
            inputs[part] = gm.graph.placeholder("_".join([stack.node.name, *map(str, part)]))
        inputs[part].meta["val"] = fake = _fake_part(stack)
        if places:
            places[part] = len(example_inputs)
            example_inputs.append(fake)
        else:
            places[part] = index
            example_inputs[index] = fake
    _replace_uses(gm, stack, inputs)
    return places


def _fake_part(stack: Stack) -> torch.Tensor:
    whole = stack.node.meta["val"]
    size, stride = whole.shape[-CACHE_RANK:], whole.stride()[-CACHE_RANK:]
    with whole.fake_mode:
        return torch.empty_strided(size, stride, dtype=whole.dtype, device=whole.device)


def _replace_uses(gm: GraphModule, stack: Stack, inputs: Mapping[PartIndex, Node]) -> None:
    """Let the graph use parts instead of the stack, which is then gone."""

    def node_of(value: Value) -> Node:
        return inputs[value] if isinstance(value, tuple) else value

    gone = {stack.node, *stack.states, *stack.parts, *stack.sizes}
    if stack.write_back is not None:
        gone.add(stack.write_back)
        with gm.graph.inserting_before(stack.write_back):
            for part, value in stack.written.items():
                copy = gm.graph.call_function(aten.copy_.default, (inputs[part], node_of(value)))
                copy.meta["val"] = inputs[part].meta["val"]
    for node, value in stack.parts.items():
        node.replace_all_uses_with(node_of(value))
    for node in stack.sizes:
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(size_node(gm.graph, node.meta["val"]))
    for node in reversed(gm.graph.nodes):
        if node in gone:
            gm.graph.erase_node(node)
