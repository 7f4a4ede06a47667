"""Copy views of inputs that the graph returns as new tensors.

Since PyTorch 2.15 Inductor drops ``keys * 1`` and ``keys + 0`` before the backend sees the graph, even if the result is
returned. The graph then returns an input where the model returns a new tensor, and a cache that begins with these rows
looks like a cache that is only read.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aliases import viewed_by
from kvcompile.passes.graph.inline import behind_placeholders, insert_call

aten = torch.ops.aten


def copy_returned_views(graph: Graph, own_outputs: Collection[int]) -> None:
    """Return a copy of each input, or view of an input, that the model returns as a new tensor.

    Attention and other operations use the copy, too, if the graph does not write the input.

    Args:
        graph: functional ATen graph that returns no copy back into an input.
        own_outputs: the outputs that share no memory with an input in the model, by position.
    """
    output = graph.output_node()
    written = {copy.args[0] for copy in graph.find_nodes(op="call_function", target=aten.copy_.default)}
    returned = list(output.args[0])
    copies: dict[Node, Node] = {}
    for place in sorted(own_outputs):
        node = returned[place]
        if not isinstance(node, Node) or not isinstance(node.meta["val"], torch.Tensor):
            continue
        viewed = viewed_by(node)
        if viewed.op == "placeholder":
            if node not in copies:
                copies[node] = _copy(node, used_by_others=viewed not in written)
            returned[place] = copies[node]
    output.args = (tuple(returned),)


def _copy(node: Node, used_by_others: bool) -> Node:
    """Insert a copy of ``node``. If ``used_by_others``, all operations use the copy in place of ``node``."""
    with node.graph.inserting_before(behind_placeholders(node)):
        copy = insert_call(node.graph, aten.clone.default, node)
    if used_by_others:
        node.replace_all_uses_with(copy, lambda user: user is not copy and user.op != "output")
    return copy
