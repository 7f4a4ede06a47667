"""Insert what attention reads of a packed pool: tokens, gathered into a packed cache of the sequences it attends to.

Models bring what they gather to [batch, heads, tokens, head_dim] by all kinds of views. What they do to the gathered
vectors, they do to the slots that these come from: the same views of the slots are the slots of the operand's tokens.

On CUDA the gather is the op ``kvcompile::gather``, a Triton kernel; elsewhere Inductor generates the code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kvcompile.kernels.gather import gather_tokens
from kvcompile.kernels.layout import PackedLayout
from kvcompile.passes.inline import inline
from kvcompile.passes.insert_ops import call_op, uses_kernels
from kvcompile.passes.match_write import shape_of, wrapped
from kvcompile.passes.trace_read import CASTS, RESHAPES, SAME_OPS, Read


def insert_gather(graph: Graph, data: Node, layout: PackedLayout, read: Read) -> Node:
    """Insert packed data of the tokens that an attention operand reads of the packed pool ``data``.

    ``read.chain`` is known to keep every vector whole, and to repeat heads alike for all slots.
    """
    gather, *views = read.chain
    _, slots = gather.args
    _, num_slots, *vector_shape = shape_of(read.root)
    views = [view for view in views if view.target not in (*SAME_OPS, *CASTS)]
    symbols = list(dict.fromkeys(node for view in views for node in view.all_input_nodes[1:]))

    def slots_of_operand(slots: Tensor, *values: Any) -> Tensor:
        known = dict(zip(symbols, values, strict=True))
        x = slots.unsqueeze(-1).unsqueeze(-1).expand(*slots.shape, *vector_shape)
        for view in views:
            arguments = torch.fx.node.map_arg(view.args[1:], known.__getitem__)
            x = x.reshape(arguments[0]) if view.target in RESHAPES else view.target(x, *arguments, **view.kwargs)
        return wrapped(x.select(3, 0).select(1, 0), num_slots)

    slots = inline(graph, slots_of_operand, slots, *symbols)
    if uses_kernels(data):
        arguments = (data, slots, layout.spec, layout.role, layout.head_dim)
        return call_op(graph, torch.ops.kvcompile.gather.default, arguments)
    packed: Node = inline(graph, lambda data, slots: gather_tokens(data, layout, slots), data, slots)
    return packed
