"""Analyse how a graph uses a *stack*: an input that has the dimensions of a cache and further dimensions.

The further dimensions are the *stacked* dimensions. Constants index them: ``kv[0]``, ``cache[layer, 1]``, ``kv[:, 0]``,
``unbind``. The tensor at each of their indices is a *part*. For every node that holds parts, the analysis finds the
value of each part.

The parts have separate values if the graph uses the stack in these ways only: it selects and writes parts, it does the
same to all parts (such as one write of keys and values, :mod:`kvcompile.passes.stacks.rules`), and it copies the last
state back or returns it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.layout.axes import CACHE_RANK, PartIndex
from kvcompile.passes.graph.aten import LIST_OPS, SELECTIONS, SIZE_OPS, VIEW_OPS, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.states import states_of
from kvcompile.passes.stacks.rules import RULES, NotAStack
from kvcompile.passes.stacks.values import Initial, Made, State, Value, selected

aten = torch.ops.aten


_VIEWS_AND_COPIES = VIEW_OPS | SELECTIONS | {aten.copy.default}


@dataclass
class Stack:
    """How a graph uses a stack.

    Attributes:
        node: its placeholder.
        dims: its stacked dimensions, in ascending order.
        states: the nodes that hold several parts, with the values of the parts.
        lists: the nodes that divide a tensor with several parts, with the values of these parts.
        parts: the nodes that hold a single part, with its value.
        sizes: the nodes that ask for a size of one of ``states``.
        write_back: the ``copy_`` into ``node`` at the end of the graph, if the stack is written.
        last: the state that ``write_back`` copies. The graph may have made it from other tensors.
        returned: the outputs of the graph that hold several parts, by position.
    """

    node: Node
    dims: tuple[int, ...]
    states: dict[Node, State] = field(default_factory=dict)
    lists: dict[Node, State] = field(default_factory=dict)
    parts: dict[Node, Value] = field(default_factory=dict)
    sizes: list[Node] = field(default_factory=list)
    write_back: Node | None = None
    last: State | None = None
    returned: dict[int, State] = field(default_factory=dict)

    @property
    def written(self) -> dict[PartIndex, Value]:
        """The last values of the parts that the graph changes."""
        last = self.last.values if self.last is not None else {}
        return {part: value for part, value in last.items() if value != Initial(part)}

    @property
    def used(self) -> list[PartIndex]:
        """The parts that the graph changes, and the parts whose first value it reads."""
        pending: list[Value] = [*self.parts.values(), *self.written.values()]
        pending += [value for state in self.returned.values() for value in state.values.values()]
        seen: set[Value] = set()
        while pending:
            value = pending.pop()
            if value not in seen:
                seen.add(value)
                pending += value.operands() if isinstance(value, Made) else ()
        return sorted({value.part for value in seen if isinstance(value, Initial)} | self.written.keys())

    def find(self, operand: Node) -> State | None:
        return self.states.get(operand)

    def state(self, operand: Node, user: Node) -> State:
        state = self.states.get(operand) or self.lists.get(operand)
        if state is None:
            raise NotAStack(user)
        return state

    def part(self, user: Node, operand: Node, dims: tuple[int, ...], part: PartIndex, rank: int) -> Value:
        state = self.states.get(operand)
        if state is None:
            return selected(user, operand, dims, part, rank)
        if state.dims != dims or len(shape_of(operand)) != rank or part not in state.values:
            raise NotAStack(user)
        return state.values[part]


def analyse_stack(node: Node, operand: Node, *, has_ranges: bool = False) -> Stack | None:
    """Analyse how the graph of input ``node`` uses it.

    Args:
        node: a placeholder.
        operand: keys or values of attention that are selected from ``node``. Their selection tells the stacked
            dimensions.
        has_ranges: whether the dimension before the last counts ranges of channels, so that it is stacked.

    Returns:
        The stack; None if ``node`` has no more dimensions than a cache.

    Raises:
        NotAStack: the graph uses the further dimensions in another way.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or (value.dim() <= CACHE_RANK and not has_ranges):
        return None
    stack = Stack(node, _stacked_dims(node, operand, has_ranges))
    # The number of layers is a constant of the model. Where sizes are symbols, int() guards on it, which is intended.
    sizes = [int(shape_of(node)[dim]) for dim in stack.dims]
    parts = itertools.product(*map(range, sizes))
    stack.states[node] = State(stack.dims, {part: Initial(part) for part in parts})
    copied = [user.args[1] for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
    for user in node.graph.nodes:
        if not (stack.states.keys() | stack.lists.keys()).isdisjoint(user.all_input_nodes):
            _read_use(stack, user)
        if user in copied and user not in stack.states:
            _analyse_stacked(stack, user)
    if stack.write_back is not None and any(_is_input(stack, value) for value in stack.written.values()):
        raise NotAStack(stack.write_back)
    return stack


def _analyse_stacked(stack: Stack, node: Node) -> None:
    """Note the parts of ``node``, the last state of the stack, if the graph stacked it from new values of the parts."""
    rank, first = len(shape_of(node)), stack.states[stack.node]
    state = first.map(lambda part, value: selected(node, node, stack.dims, part, rank))
    if not any(isinstance(value, Made) and value.at is node for value in state.values.values()):
        stack.states[node] = state


def _read_use(stack: Stack, user: Node) -> None:
    """Note how ``user`` uses a node that holds several parts; raises NotAStack."""
    if user.op == "output":
        _read_output(stack, user)
    elif user.target in SIZE_OPS:
        stack.sizes.append(user)
    elif user.target is aten.copy_.default and user.args[0] is stack.node:
        stack.write_back, stack.last = user, stack.state(user.args[1], user)
        if stack.last.dims != stack.dims or stack.last.values.keys() != stack.states[stack.node].values.keys():
            raise NotAStack(user)
    elif user.target in RULES:
        held = RULES[user.target](stack, user)
        if user.target in LIST_OPS:
            stack.lists[user] = held
        elif held.dims:
            stack.states[user] = held
        else:
            stack.parts[user] = held.values[()]
    else:
        raise NotAStack(user)


def _read_output(stack: Stack, output: Node) -> None:
    """Note the outputs that are states of the stack; a growing stack is returned. Raises NotAStack.

    Each of their parts must be a new value, which the caller sees nowhere else.
    """
    for place, node in enumerate(output.args[0]):
        state = stack.states.get(node)
        if state is None:
            continue
        if stack.write_back is not None or any(_is_input(stack, value) for value in state.values.values()):
            raise NotAStack(output)
        stack.returned[place] = state


def _is_input(stack: Stack, value: Value) -> bool:
    """Whether a last value is the first value of an input, or a view of it.

    The value must be read before that input is overwritten. A single copy of the whole stack guarantees this order. If
    there are copies into several inputs, Inductor may let a later copy read an input that an earlier copy has
    overwritten: two inputs that swap their values would end up equal.
    """
    while isinstance(value, Made) or (isinstance(value, Node) and value.op == "call_function"):
        if value.target not in _VIEWS_AND_COPIES:
            return False
        source = value.args[1] if value.target is aten.copy.default else value.args[0]
        value = stack.parts.get(source, source)
    return isinstance(value, Initial) or value.op == "placeholder"


def _stacked_dims(node: Node, operand: Node, has_ranges: bool) -> tuple[int, ...]:
    """The dimensions of input ``node`` that constants index on the way to ``operand``; else its first dimensions."""
    index_map = IndexMap.identity(shape_of(node))
    rank = len(index_map.base)
    for user in states_of(operand)[1:]:
        viewed = follow(index_map, user)
        keeps_dims = viewed is not None or len(shape_of(user)) == len(index_map.dims)
        if user.target not in RULES or not keeps_dims:
            break
        index_map = viewed or index_map
        selected = tuple(axis for axis in range(rank) if not index_map.factors(axis))
        is_part = len(index_map.dims) <= CACHE_RANK and rank - 2 in selected
        if is_part if has_ranges else len(index_map.dims) == CACHE_RANK:
            return selected
    return (rank - 2,) if has_ranges else tuple(range(rank - CACHE_RANK))
