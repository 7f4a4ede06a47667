"""Insert operations into Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from kvcompile.compat.pytree import tree_map_only
from kvcompile.compat.tracing import FakeTensor, FakeTensorMode
from kvcompile.passes.mark.calls import value_of
from kvcompile.passes.mark.values import NotUnderstood
from kvcompile.passes.marker import Marker


@dataclass
class GraphWriter:
    """Inserts operations at the graph's insertion point, each with its fake value and the metadata of ``like``."""

    graph: Graph
    like: Node
    inserted: list[Node] = field(default_factory=list)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call of a function, or of a method by name."""
        create = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        return self.adopt(create(target, args, kwargs))

    def adopt(self, node: Node) -> Node:
        """Give a node that was just inserted its fake value and metadata.

        Raises:
            NotUnderstood: PyTorch rejects the operation for these sizes.
        """
        self.inserted.append(node)
        args, kwargs = tree_map_only(Node, value_of, (node.args, node.kwargs))
        target = getattr(torch.Tensor, node.target) if node.op == "call_method" else node.target
        try:
            with _fake_mode_of(value_of(self.like)), torch.no_grad():
                value = target(*args, **kwargs)
        except (IndexError, RuntimeError, ValueError, ZeroDivisionError) as error:
            name = getattr(node.target, "__name__", node.target)
            raise NotUnderstood(f"{name} rejects its sizes: {str(error).splitlines()[0]}") from error
        return self._described(node, value)

    def insert(self, marker: Marker) -> Node:
        """Insert a marker; it has the value of its original."""
        node = marker.insert(self.graph)
        self.inserted.append(node)
        return self._described(node, value_of(marker.original))

    def undo(self) -> None:
        """Remove everything that was inserted."""
        for node in reversed(self.inserted):
            self.graph.erase_node(node)
        self.inserted.clear()

    def _described(self, node: Node, value: Any) -> Node:
        node.meta = {**self.like.meta, "example_value": value}
        return node


def _fake_mode_of(value: Any) -> FakeTensorMode:
    """The fake mode of a fake tensor, or of the fake tensors inside another tensor subclass."""
    while not isinstance(value, FakeTensor):
        value = getattr(value, value.__tensor_flatten__()[0][0])
    return value.fake_mode


def insert_in_place_of(node: Node, write: Callable[[GraphWriter], Node]) -> None:
    """Let ``write`` insert operations behind ``node``, and let the users of ``node`` use its result instead."""
    users = list(node.users)
    with node.graph.inserting_before(node.next):
        result = write(GraphWriter(node.graph, node))
    for user in users:
        user.replace_input_with(node, result)
