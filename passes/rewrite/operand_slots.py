"""Which slots of a pool an attention operand reads.

Models bring what they gather to [batch, heads, tokens, head_dim] by all kinds of views. What they do to the gathered
vectors, they do to the slots that these come from: the same views of the slots are the slots of the operand's tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kvcompile.passes.graph.aten import CASTS, RESHAPES, SAME_OPS, shape_of
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.prove.reads import Read
from kvcompile.passes.prove.writes import wrapped


def insert_operand_slots(graph: Graph, read: Read) -> Node:
    """Insert the slots that an operand reads, int64 [batch, kv_len]; those outside the pool lie behind its packed data.

    ``read`` gathers; its chain is known to keep every vector whole, and to repeat heads alike for all slots.
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
