"""Compute the slots of a pool that an attention operand reads.

Models bring gathered vectors to [batch, heads, tokens, head_dim] by many kinds of views. The same views, applied to the
slots of the vectors, give the slots of the operand's tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kvcompile.passes.graph.aten import CASTS, RESHAPES, SAME_OPS, shape_of
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.prove.positions import wrapped
from kvcompile.passes.prove.reads import Read


def insert_operand_slots(graph: Graph, read: Read) -> Node:
    """Insert the slots that an operand reads, int64 [batch, kv_len].

    A slot outside the pool becomes a slot behind its data. ``read`` reads a pool. Its proof guarantees that its views
    keep every vector whole, and repeat heads in the same way for all slots.
    """
    gather, *views = read.chain
    _, num_slots, *vector_shape = shape_of(read.root)
    views = [view for view in views if view.target not in (*SAME_OPS, *CASTS)]
    symbols = list(dict.fromkeys(node for view in views for node in view.all_input_nodes[1:]))

    def of_operand(slots: Tensor, *values: Any) -> Tensor:
        known = dict(zip(symbols, values, strict=True))
        x = slots.unsqueeze(-1).unsqueeze(-1).expand(*slots.shape, *vector_shape)
        for view in views:
            arguments = map_arg(view.args[1:], known.__getitem__)
            x = x.reshape(arguments[0]) if view.target in RESHAPES else view.target(x, *arguments, **view.kwargs)
        return wrapped(x.select(3, 0).select(1, 0), num_slots)

    slots: Node = inline(graph, of_operand, gather.args[1], *symbols)
    return slots
