"""Matrices that a graph computes from indices alone and multiplies, such as the rotations of formats.

A format computes its rotation at every use: in two stores and on two sides of attention in every layer. In code for a
CPU each use would be a separate kernel and buffer, so a graph computes every such matrix once
(:mod:`kvcompile.passes.graph.inline`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


def constant_matrices(traced: Graph) -> list[Node]:
    """The operands of matrix products in ``traced`` that depend on no input, in the order of the graph."""
    products = traced.find_nodes(op="call_function", target=aten.mm.default)
    if not products:
        return []
    constant: set[Node] = set()
    for node in traced.nodes:
        if node.op == "call_function" and constant.issuperset(node.all_input_nodes):
            constant.add(node)
    operands = {operand for product in products for operand in product.all_input_nodes}
    return [node for node in traced.nodes if node in operands and node in constant and node not in products]


def steps_to(result: Node) -> list[Node]:
    """The nodes that compute ``result``, in the order of the graph; the last is ``result`` itself."""
    steps, pending = {result}, [result]
    while pending:
        inputs = [node for node in pending.pop().all_input_nodes if node not in steps]
        steps.update(inputs)
        pending += inputs
    return [node for node in result.graph.nodes if node in steps]


def formula_of(result: Node) -> str:
    """A text that is equal for nodes that depend on no input and are computed in the same way."""
    places: dict[Node, str] = {}
    lines = []
    for node in steps_to(result):
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: places[operand])
        lines.append(f"{node.target}{args}{kwargs}")
        places[node] = f"%{len(places)}"
    return "\n".join(lines)


def needed_only_for(results: Iterable[Node]) -> set[Node]:
    """The nodes that only help to compute ``results``, and ``results`` themselves."""
    unneeded = set(results)
    behind = {step for result in unneeded for step in steps_to(result)}
    for node in reversed(next(iter(unneeded)).graph.nodes if unneeded else ()):
        if node in behind and unneeded.issuperset(node.users):
            unneeded.add(node)
    return unneeded
