"""Private attributes of FX graphs and of the graphs that Dynamo makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node

_SOURCE = "_dynamo_source"
_PARAMETERS = "_param_name_to_source"


@contextlib.contextmanager
def calling_for_new_nodes(gm: GraphModule, call: Callable[[Node], None]) -> Iterator[None]:
    """Call a function for each node that is made in the block. There is no fallback: node roles would be missing."""
    gm._register_create_node_hook(call)
    try:
        yield
    finally:
        gm._unregister_create_node_hook(call)


def copy_codegen(graph: Graph, original: Graph) -> None:
    """Give ``graph`` the structure of arguments and results of ``original``. There is no fallback."""
    graph.set_codegen(original._codegen)


def copy_source(node: Node, original: Node) -> None:
    """Copy Dynamo's source of an input to a copy of its node. Releases without this attribute do not need it."""
    if hasattr(original, _SOURCE):
        setattr(node, _SOURCE, getattr(original, _SOURCE))


def copy_parameter_sources(gm: GraphModule, original: GraphModule) -> None:
    """Copy Dynamo's sources of parameters to a copy of its graph.

    Without this attribute AOTAutograd treats the graph as exported: no input is a parameter with a fixed address.
    """
    setattr(gm, _PARAMETERS, getattr(original, _PARAMETERS, {}))


def dynamo_source(placeholder: Node) -> Any:
    """Dynamo's source of an input of its graph or of a copy; None in graphs that Dynamo did not make.

    In ``aot_compile`` the node no longer has the input, but it still has the source.
    """
    return getattr(placeholder.meta.get("grapharg"), "source", None) or getattr(placeholder, _SOURCE, None)


def source_of(placeholder: Node) -> str:
    """Dynamo's name of an input of its graph, such as ``L['cache'].layers[0].keys``; the node's name is the fallback.

    The name is a method of the source in some releases of PyTorch, and an attribute in others.
    """
    source = dynamo_source(placeholder)
    name = getattr(source, "name", None)
    return (name() if callable(name) else name) or placeholder.name


def forget_example(node: Node) -> None:
    """Drop a node's reference to its example input. Any reference, even a weak one, would prevent adoption."""
    node.meta.pop("grapharg", None)


def copied_graph(gm: GraphModule) -> GraphModule:
    """A module with a copy of the graph and the same parameters and constants.

    The copy holds no reference to its example inputs.
    """
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, nodes))
    copy_codegen(graph, gm.graph)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    for node, copy in nodes.items():
        forget_example(copy)
        copy_source(copy, node)
    result = GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    copy_parameter_sources(result, gm)
    return result
