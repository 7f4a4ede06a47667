"""Read what a graph does with a *stack*: an input whose last four dimensions are those of caches, its *parts*.

The dimensions before them are indexed by constants: ``kv[0]``, ``cache[layer, 1]``, ``keys, values = kv``. For each
node that holds parts, this finds the value that each of them has there. They have values of their own as long as the
graph does nothing else with the stack than to select parts, to put new ones in their place, and to copy the last state
back.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.match_write import shape_of
from kvcompile.passes.trace_read import SAME_OPS, SIZE_OPS, VIEW_OPS

aten = torch.ops.aten

CACHE_RANK = 4

_VIEWS_AND_COPIES = VIEW_OPS | {aten.copy.default, aten.select.int, aten.unbind.int, operator.getitem}

PartIndex = tuple[int, ...]
"""Which part of a stack: an index for each of its dimensions before those of caches."""

Value: TypeAlias = PartIndex | Node
"""The value of a part: that which a part of the stack has when the graph begins, or what a node makes."""

State = Mapping[PartIndex, Value]
"""What a node holds that holds parts: their values, by an index for each of its dimensions before those of caches."""


class UsedAsWholeError(Exception):
    """A tensor is no stack, because of what ``user`` does with it."""

    def __init__(self, user: Node) -> None:
        self.user = user
        super().__init__("the caller" if user.op == "output" else user.format_node() or user.name)


@dataclass
class Stack:
    """What a graph does with a stack.

    Attributes:
        node: its placeholder.
        states: the nodes that hold several parts, as a tensor or as a list, and what they hold.
        parts: the nodes that select a single part, and the value that it has there.
        sizes: the nodes that ask for a size of ``states``.
        write_back: the ``copy_`` into ``node`` at the end of the graph, if it is written.
    """

    node: Node
    states: dict[Node, State]
    parts: dict[Node, Value] = field(default_factory=dict)
    sizes: list[Node] = field(default_factory=list)
    write_back: Node | None = None

    @property
    def written(self) -> dict[PartIndex, Value]:
        """The last values of the parts that the graph changes."""
        last = self.states[self.write_back.args[1]] if self.write_back is not None else {}
        return {part: value for part, value in last.items() if value != part}

    @property
    def used(self) -> list[PartIndex]:
        """The parts whose first value the graph reads, or that it changes."""
        written = self.written
        values = (*self.parts.values(), *written.values(), *written)
        return sorted({value for value in values if isinstance(value, tuple)})


def read_stack(node: Node) -> Stack | None:
    """Read what the graph of input ``node`` does with it, if it is a stack.

    Returns:
        None if it has no more dimensions than a cache.

    Raises:
        UsedAsWholeError: it has, but they are used in another way.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() <= CACHE_RANK:
        return None
    # How many layers a stack has is a constant of the model: guarding on it, where sizes are symbols, is wanted.
    sizes = [int(size) for size in shape_of(node)[:-CACHE_RANK]]
    stack = Stack(node, {node: {part: part for part in itertools.product(*map(range, sizes))}})
    for user in node.graph.nodes:
        if not stack.states.keys().isdisjoint(user.all_input_nodes):
            _read_use(stack, user)
    if stack.write_back is not None and any(_is_input(stack, value) for value in stack.written.values()):
        raise UsedAsWholeError(stack.write_back)
    return stack


def _is_input(stack: Stack, value: Value) -> bool:
    """Whether a last value is what an input was, or a view of it.

    It must be read before that input is overwritten. In one tensor it is; but of copies into several inputs Inductor
    lets a later one read what an earlier one has written (two inputs that swap their values end up equal).
    """
    while isinstance(value, Node) and value.op == "call_function" and value.target in _VIEWS_AND_COPIES:
        source = value.args[1] if value.target is aten.copy.default else value.args[0]
        value = stack.parts.get(source, source)
    return isinstance(value, tuple) or value.op == "placeholder"


def _read_use(stack: Stack, user: Node) -> None:
    """Note what ``user`` does with a node that holds several parts; raises UsedAsWholeError."""
    operand = user.args[0]
    if user.target in SIZE_OPS:
        stack.sizes.append(user)
    elif user.target is aten.copy_.default and operand is stack.node and user.args[1] in stack.states:
        stack.write_back = user
    elif user.target in (*SAME_OPS, aten.unbind.int):
        stack.states[user] = stack.states[operand]
    elif user.target is operator.getitem:
        _read_selection(stack, user, _dim_of(operand), user.args[1])
    elif user.target is aten.select.int:
        _read_selection(stack, user, _dim_of(user), user.args[2])
    elif user.target is aten.select_scatter.default and operand in stack.states:
        _read_write(stack, user)
    else:
        raise UsedAsWholeError(user)


def _dim_of(selection: Node) -> int:
    """The dimension that ``select``, ``select_scatter`` or ``unbind`` goes along, not negative."""
    place = 2 if selection.target is aten.select_scatter.default else 1
    dim = selection.args[place] if len(selection.args) > place else selection.kwargs.get("dim", 0)
    return dim % len(shape_of(selection.args[0]))


def _constant(user: Node, state: State, dim: int, index: Any) -> int:
    """``index``, counted from the first part along ``dim``; raises UsedAsWholeError if it does not choose parts."""
    dims = len(next(iter(state)))
    if dim >= dims or not isinstance(index, int):
        raise UsedAsWholeError(user)
    return index % (1 + max(part[dim] for part in state))


def _read_selection(stack: Stack, user: Node, dim: int, index: Any) -> None:
    state = stack.states[user.args[0]]
    index = _constant(user, state, dim, index)
    selected = {part[:dim] + part[dim + 1 :]: value for part, value in state.items() if part[dim] == index}
    if () in selected:
        stack.parts[user] = selected[()]
    else:
        stack.states[user] = selected


def _read_write(stack: Stack, user: Node) -> None:
    base, source, *_ = user.args
    state, dim = stack.states[base], _dim_of(user)
    index = _constant(user, state, dim, user.args[3])
    if source in stack.states:
        new = stack.states[source]
    elif len(next(iter(state))) == 1:
        new = {(): stack.parts.get(source, source)}
    else:
        raise UsedAsWholeError(user)
    values = {part: new[part[:dim] + part[dim + 1 :]] if part[dim] == index else value for part, value in state.items()}
    stack.states[user] = values
