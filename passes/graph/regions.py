"""Regions: operations that stand in a graph once, as a subgraph, although several layers call them.

Inductor generates the code of a subgraph once. The layers of a model store and attend in the same way, and the code for
it takes most of the time of a compilation on a CPU.

A region is called by the higher-order operator ``invoke_subgraph``, with tensors only. It neither changes its inputs
nor returns one of them. Matrices that depend on no input are inputs of the region, so that a graph computes them once
and not at each call. Graphs with symbolic sizes, and code that cannot call a subgraph, have the operations in place of
the calls (:func:`expand_regions`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.compat.inductor import fx_graph_cse
from kvcompile.compat.operators import invoke_subgraph
from kvcompile.passes.graph.inline import (
    fake_mode_of,
    inline,
    insert_operations,
    shared_matrices,
    symbol_nodes,
    traced_once,
)

_PREFIX = "kvquant_"

_NAMES: WeakKeyDictionary[Graph, str] = WeakKeyDictionary()
"""The names of the regions, by the graphs from which they were made."""


def insert_region(graph: Graph, name: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Insert a call of the region that computes ``fn(*args)`` at the graph's insertion point.

    Args:
        graph: a functional ATen graph whose nodes carry fake values in ``meta["val"]``.
        name: a word for the operations, which becomes part of the names of the region and of its calls.
        fn: functional PyTorch code that captures nothing and returns new tensors. It is traced with Inductor's
            decompositions, once for equal arguments.
        args: nodes of tensors, and constants.

    Returns:
        The result of ``fn``, a tensor or a tuple of tensors, with nodes in place of tensors.
    """
    owner = graph.owning_module
    if owner is None or symbol_nodes(graph):
        return inline(graph, fn, *args)
    traced, _ = traced_once(graph, fn, args)
    result = traced.output_node().args[0]
    outputs = result if isinstance(result, (tuple, list)) else (result,)
    matrices = shared_matrices(graph, traced)
    if traced not in _NAMES:
        _NAMES[traced] = _add_region(owner, name, traced, matrices)
    region = _NAMES[traced]
    operands = [*(arg for arg in args if isinstance(arg, Node)), *dict.fromkeys(matrices.values())]
    call = graph.create_node(
        "call_function", invoke_subgraph, (graph.get_attr(region), region, *operands), name=_PREFIX + name
    )
    with fake_mode_of(graph):
        call.meta["val"] = tuple(_like(output.meta["val"]) for output in outputs)
    nodes = tuple(graph.call_function(operator.getitem, (call, place)) for place in range(len(outputs)))
    for node, value in zip(nodes, call.meta["val"], strict=True):
        node.meta["val"] = value
    return nodes if isinstance(result, (tuple, list)) else nodes[0]


def _add_region(owner: GraphModule, name: str, traced: Graph, matrices: dict[Node, Node]) -> str:
    """Add ``traced`` to ``owner`` as a submodule that returns a tuple; returns the name of the submodule.

    Nodes of the caller that compute ``matrices`` of ``traced`` are further inputs of the submodule, each once.
    """
    copied = Graph()
    placeholders = [copied.node_copy(node) for node in traced.find_nodes(op="placeholder")]
    inputs = {}
    for matrix, node in matrices.items():
        if node not in inputs:
            inputs[node] = copied.placeholder(f"{matrix.name}_matrix")
            inputs[node].meta["val"] = matrix.meta["val"]
    known = {matrix: inputs[node] for matrix, node in matrices.items()}
    result = insert_operations(copied, traced, placeholders, new_values=False, known=known)
    copied.output(tuple(result) if isinstance(result, (tuple, list)) else (result,))
    number = 0
    while hasattr(owner, region := f"{_PREFIX}{name}_{number}"):
        number += 1
    owner.add_submodule(region, GraphModule({}, copied))
    return region


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def is_region_call(node: Node) -> bool:
    """Whether ``node`` calls a region that :func:`insert_region` has made."""
    return node.target is invoke_subgraph and str(node.args[1]).startswith(_PREFIX)


def expand_regions(gm: GraphModule) -> None:
    """Replace every call of a region by its operations, and compute equal values once.

    A graph without a region stays unchanged.
    """
    calls = [call for call in gm.graph.find_nodes(op="call_function", target=invoke_subgraph) if is_region_call(call)]
    if not calls:
        return
    for call in calls:
        with gm.graph.inserting_before(call):
            outputs = insert_operations(gm.graph, getattr(gm, call.args[1]).graph, call.args[2:], new_values=True)
        for result in list(call.users):
            result.replace_all_uses_with(outputs[result.args[1]])
            gm.graph.erase_node(result)
        gm.graph.erase_node(call)
    gm.graph.eliminate_dead_code()
    gm.delete_all_unused_submodules()
    gm.graph = fx_graph_cse(gm.graph)
