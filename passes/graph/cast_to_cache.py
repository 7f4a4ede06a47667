"""What is assigned to a cache is converted to its dtype first, as to that of a plain one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.inline import inline


def converted(graph: Graph, value: Node, cache: Node) -> Node:
    """``value`` in the dtype of ``cache`` and on its device, inserted at the graph's insertion point if it is not yet.

    Compilers may drop a cast to a narrow dtype and back, and Inductor does, as codes are computed in float32. It keeps
    a cast whose bits are asked for.
    """
    held, given = cache.meta["val"], value.meta["val"]
    if (held.dtype, held.device) == (given.dtype, given.device):
        return value

    def convert(x: Tensor) -> Tensor:
        x = x.to(held.device, held.dtype)
        return x.view(torch.int16).view(held.dtype) if held.dtype.itemsize == 2 else x

    result: Node = inline(graph, convert, value)
    return result
