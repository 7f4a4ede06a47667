"""Convert new tokens to the dtype of the cache before they are quantized, as an assignment to a plain cache does."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import CASTS, VIEW_OPS
from kvcompile.passes.graph.inline import inline


def converted(graph: Graph, value: Node, cache: Node) -> Node:
    """``value`` in the dtype of ``cache`` and on its device. Nodes that convert it go to the graph's insertion point.

    Inductor may compute values of a narrow dtype in float32, and drop a cast to that dtype and back. Codes are computed
    in float32, so they would encode numbers that were never rounded. A view of the bits as integers forces the
    rounding. The view is needed where Inductor compiles the quantization together with the model. On CUDA a store is an
    operator, and its operands lie in memory in their own dtype.
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
