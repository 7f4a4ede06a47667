"""The earlier states of a value, before writes and views."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.graph.aten import SELECTIONS, VIEW_OPS, WRITE_OPS
from kvcompile.passes.graph.pool_ops import POOL_VIEW

aten = torch.ops.aten


def states_of(node: Node) -> list[Node]:
    """The nodes from the first state of ``node`` to ``node``; each writes, views or selects from the node before it."""
    return list(_states_of(node, {}))


def first_state(node: Node) -> Node:
    """The value that ``node`` is a view or a later state of; ``node`` itself if there is none."""
    return states_of(node)[0]


def kept_arm(choice: Node) -> Node:
    """The operand of ``choice``, a ``where``, that is the earlier state. The other operand has the write of a mask.

    If both operands are states of one value, the earlier state has fewer writes. Otherwise, the earlier state is an
    input of the shape of ``choice``, or a later state of such an input. If this holds for neither or for both operands,
    the result is the last operand.
    """
    return _kept_arm(choice, {})


def is_later_state(node: Node, state: Node) -> bool:
    """Whether ``node`` and ``state`` are states of one value, and ``node`` has more writes."""
    return _num_writes_more(states_of(node), states_of(state)) > 0


_Known = dict[Node, list[Node]]


def _states_of(node: Node, known: _Known) -> list[Node]:
    states: list[Node] = []
    while node not in known and node.op == "call_function" and node.target in _STEPS:
        states.insert(0, node)
        operand = _kept_arm(node, known) if node.target is aten.where.self else node.args[0]
        node = operand[0] if node.target is aten.cat.default else operand
    result = [*known.get(node, [node]), *states]
    if states:
        known[states[-1]] = result
    return result


def _kept_arm(choice: Node, known: _Known) -> Node:
    one, other = choice.args[1:]
    if not isinstance(one, Node) or not isinstance(other, Node):
        return other
    of_one, of_other = _states_of(one, known), _states_of(other, known)
    more = _num_writes_more(of_other, of_one)
    if more:
        return one if more > 0 else other
    may_be_one, may_be_other = (
        states[0].op == "placeholder" and arm.meta["val"].shape == choice.meta["val"].shape
        for states, arm in ((of_one, one), (of_other, other))
    )
    return one if may_be_one and not may_be_other else other


def _num_writes_more(states: list[Node], others: list[Node]) -> int:
    """The number of writes that ``states`` have and ``others`` lack; 0 if they do not begin with the same value."""
    if states[0] is not others[0]:
        return 0
    more, fewer = (sum(state.target in WRITE_OPS for state in each) for each in (states, others))
    return more - fewer


_STEPS = WRITE_OPS | VIEW_OPS | SELECTIONS | {POOL_VIEW}
