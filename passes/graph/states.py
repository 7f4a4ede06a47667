"""The earlier states of a value, before writes and views."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvcompile.passes.graph.aten import SELECTIONS, VIEW_OPS, WRITE_OPS
from kvcompile.passes.graph.pool_ops import POOL_VIEW

aten = torch.ops.aten


def states_of(node: Node) -> list[Node]:
    """The nodes from the first state of ``node`` to ``node``; each writes, views or selects from the one before it."""
    states = [node]
    while node.op == "call_function" and node.target in WRITE_OPS | VIEW_OPS | SELECTIONS | {POOL_VIEW}:
        operand = node.args[2] if node.target is aten.where.self else node.args[0]
        node = operand[0] if node.target is aten.cat.default else operand
        states.insert(0, node)
    return states


def first_state(node: Node) -> Node:
    return states_of(node)[0]
