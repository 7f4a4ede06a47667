"""What is assigned to a cache is converted to its dtype first, as to that of a plain one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import CASTS, VIEW_OPS
from kvcompile.passes.graph.inline import inline


def converted(graph: Graph, value: Node, cache: Node) -> Node:
    """``value`` in the dtype of ``cache`` and on its device, inserted at the graph's insertion point if it is not yet.

    Compilers may compute in float32 what has a narrow dtype, and drop a cast to that dtype and back. Inductor does
    both, and codes are computed in float32. Numbers whose bits are asked for are rounded. This matters where the code
    that makes codes is compiled together with the model's; on CUDA a store is an operator, and what it is given lies
    in memory in its own dtype.
    """
    held, given = cache.meta["val"], value.meta["val"]
    is_converted = (held.dtype, held.device) == (given.dtype, given.device)
    if is_converted and (held.dtype.itemsize != 2 or held.device.type == "cuda" or _is_in_memory(value)):
        return value

    def convert(x: Tensor) -> Tensor:
        x = x.to(held.device, held.dtype)
        return x.view(torch.int16).view(held.dtype) if held.dtype.itemsize == 2 else x

    result: Node = inline(graph, convert, value)
    return result


def _is_in_memory(value: Node) -> bool:
    """Whether ``value`` is an input of the graph or a view of one."""
    while value.target in VIEW_OPS and value.target not in CASTS:
        value = value.args[0]
    return value.op == "placeholder"
