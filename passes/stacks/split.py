"""Split a graph input that holds several caches into one input for each cache.

Models keep one tensor for keys and values (``kv[0]``, ``kv[1]``) or one for all layers (``cache[layer, 0]``). If a
graph uses such a *stack* only by its *parts* (:mod:`kvcompile.passes.stacks.analyse`), each part becomes an input.
Compilers call this scalar replacement of aggregates. A write of all parts becomes one write of each part. A stack that
grows by ``cat`` and is returned becomes one output for each part. Later passes know no stacks: they prove and pack a
part like a cache that is an input, or leave it a plain tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kvcompile.compat.pytree import tree_map_only
from kvcompile.kernels.layout.axes import PartIndex
from kvcompile.passes.calling import JoinedOutput, Rewritten, SplitStack, StackInput
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import insert_call, size_node
from kvcompile.passes.graph.refused_inputs import note_refusal
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.stacks.analyse import Stack, analyse_stack
from kvcompile.passes.stacks.rules import NotAStack
from kvcompile.passes.stacks.values import Initial, Made, State, Value

aten = torch.ops.aten


def split_stacks(
    gm: GraphModule,
    example_inputs: list[Any],
    packed_stacks: Mapping[int, StackInput],
    ranges: Collection[Node],
) -> tuple[SplitStack, ...]:
    """Split the stacks among the inputs of ``gm`` that hold keys or values of attention; changes ``gm`` in place.

    Args:
        gm: functional ATen graph with markers.
        example_inputs: its fake inputs; changed in place like the inputs of ``gm``.
        packed_stacks: the inputs that arrive as packed stacks.
        ranges: the inputs whose ranges of channels have been divided.
    """
    calls = [Marker.of(node) for node in markers_of(gm.graph)]
    attended = {first_state(operand): operand for call in calls for operand in (call.key, call.value)}
    placeholders = gm.graph.find_nodes(op="placeholder")
    split = []
    for index, placeholder in enumerate(placeholders):
        try:
            has_ranges = placeholder in ranges
            operand = attended.get(placeholder)
            stack = None if operand is None else analyse_stack(placeholder, operand, has_ranges=has_ranges)
        except NotAStack as refusal:
            note_refusal(placeholder, refusal)  # for the sites that read it
            continue
        if stack is None or not stack.used:
            continue
        num_ranges = int(shape_of(placeholder)[-2]) if has_ranges else 0
        known = packed_stacks.get(index)
        if known is None or (known.dims, known.num_ranges) == (stack.dims, num_ranges):
            split.append(_Splitter(gm, stack, index, example_inputs, num_ranges).split())
    return tuple(split)


def contiguous_parts(gm: GraphModule, rewritten: Rewritten, packed_stacks: Collection[int]) -> None:
    """Give plain parts of partly packed stacks their strides at run time; changes ``rewritten`` in place.

    A part of a plain stack is a view of it. When the caller packs a stack, it copies each plain part, which is then
    contiguous.

    Args:
        gm: the rewritten graph.
        rewritten: the caller's duties for ``gm``, stacks included.
        packed_stacks: the inputs that arrive as packed stacks.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    packed = {action.index: action for action in rewritten.inputs}
    for stack in rewritten.stacks:
        adopted = any(not packed[place].makes_cache for place in stack.places.values() if place in packed)
        for place in stack.places.values() if adopted or stack.index in packed_stacks else ():
            if place not in packed:
                fake = rewritten.example_inputs[place]
                with fake.fake_mode:
                    fake = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
                placeholders[place].meta["val"] = rewritten.example_inputs[place] = fake


class _Splitter:
    """Replaces one stack by its parts."""

    def __init__(self, gm: GraphModule, stack: Stack, index: int, example_inputs: list[Any], num_ranges: int) -> None:
        """``index``: position of the stack among ``example_inputs``; ``num_ranges`` as in :class:`SplitStack`."""
        self._graph = gm.graph
        self._stack = stack
        self._index = index
        self._example_inputs = example_inputs
        self._num_ranges = num_ranges
        self._places: dict[PartIndex, int] = {}
        self._inputs: dict[PartIndex, Node] = {}
        self._made: dict[Made, Node] = {}

    def split(self) -> SplitStack:
        for part in self._stack.used:
            self._add_input(part)
        returned = tuple(self._return(place, state) for place, state in self._stack.returned.items())
        self._replace_uses()
        return SplitStack(self._index, self._stack.dims, self._places, returned, self._num_ranges)

    def _add_input(self, part: PartIndex) -> None:
        stack, first = self._stack.node, not self._places
        whole = stack.meta["val"]
        kept = [dim for dim in range(whole.dim()) if dim not in self._stack.dims]
        size, stride = ([of[dim] for dim in kept] for of in (whole.shape, whole.stride()))
        with whole.fake_mode:
            fake = torch.empty_strided(size, stride, dtype=whole.dtype, device=whole.device)
        last = self._graph.find_nodes(op="placeholder")[-1]
        with self._graph.inserting_before(stack) if first else self._graph.inserting_after(last):
            node = self._graph.placeholder("_".join([stack.name, *map(str, part)]))
        node.meta["val"] = fake
        self._inputs[part] = node
        self._places[part] = self._index if first else len(self._example_inputs)
        if first:
            self._example_inputs[self._index] = fake
        else:
            self._example_inputs.append(fake)

    def _return(self, place: int, state: State) -> JoinedOutput:
        output = self._graph.output_node()
        outputs = list(output.args[0])
        places: dict[PartIndex, int] = {}
        order = sorted(range(len(state.dims)), key=state.dims.__getitem__)
        by_dims = {tuple(part[at] for at in order): value for part, value in state.values.items()}
        for part in sorted(by_dims):
            places[part] = len(outputs) if places else place
            outputs += [None] if len(places) > 1 else []
            outputs[places[part]] = self._node_of(by_dims[part])
        output.args = (tuple(outputs),)
        # Inductor keeps the strides of the outputs in this list. The caller joins the parts to a new tensor instead.
        visible = output.meta.get("user_visible_output_idxs", ())
        output.meta["user_visible_output_idxs"] = [index for index in visible if index != place]
        return JoinedOutput(place, tuple(sorted(state.dims)), places, self._num_ranges)

    def _replace_uses(self) -> None:
        """Let the graph use the parts, and erase the stack and all nodes that hold several parts."""
        stack, graph = self._stack, self._graph
        sources: set[Node] = set()
        gone = {stack.node, *stack.states, *stack.lists, *stack.parts, *stack.sizes}
        if stack.write_back is not None:
            gone.add(stack.write_back)
            # All values are made before the first input is overwritten, as they were for the single tensor.
            written = {part: self._node_of(value) for part, value in stack.written.items()}
            with graph.inserting_before(stack.write_back):
                for part, value in written.items():
                    copy = graph.call_function(aten.copy_.default, (self._inputs[part], value))
                    copy.meta["val"] = self._inputs[part].meta["val"]
        for node, value in stack.parts.items():
            node.replace_all_uses_with(self._node_of(value))
        for node in stack.sizes:
            with graph.inserting_before(node):
                node.replace_all_uses_with(size_node(graph, node.meta["val"]))
        for node in reversed(graph.nodes):
            # Tensors that were stacked for a write of all parts are unused now, and must not count as uses of a part.
            unused = node in sources and not node.users and not node.is_impure()
            if node in gone or unused:
                sources.update(operand for operand in node.all_input_nodes if operand.op == "call_function")
                graph.erase_node(node)

    def _node_of(self, value: Value) -> Node:
        if isinstance(value, Initial):
            return self._inputs[value.part]
        if isinstance(value, Node):
            return self._node_of(self._stack.parts[value]) if value in self._stack.parts else value
        if value not in self._made:
            self._made[value] = self._make(value)
        return self._made[value]

    def _make(self, value: Made) -> Node:
        args = tree_map_only((Initial, Made, Node), self._node_of, value.args)
        with self._graph.inserting_before(value.at):
            return insert_call(self._graph, value.target, *args, **value.kwargs)
