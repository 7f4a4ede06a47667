"""Stage B, analysis: what is said of attention whose key or value is no cache of its own, or of more than attention."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from kvcompile.kernels.layout import Role
from kvcompile.passes.cache import Cache
from kvcompile.passes.first_state import first_state
from kvcompile.passes.marker import is_marker
from kvcompile.passes.match_write import WRITE_OPS, shape_of
from kvcompile.passes.part_rules import UsedAsWholeError
from kvcompile.passes.read_pool import read_pool
from kvcompile.passes.read_stack import read_stack
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten


def check_whole(root: Node, role: Role) -> None:
    """Raise Refusal if attention reads one layer or role of a larger tensor, or tokens that an index gathers."""
    first = first_state(root)
    if root.target not in (aten.select.int, operator.getitem, aten.index.Tensor) or first.op != "placeholder":
        return
    if root.target is not aten.index.Tensor:
        raise Refusal(Reason.part_of_tensor, role=role, source=first.name, detail=_why_whole(first, root))
    if len(shape_of(root)) != 4 or shape_of(root) != shape_of(root.args[0]):
        raise Refusal(Reason.gathered, role=role, source=first.name, detail=_why_no_pool(first))


def _why_no_pool(node: Node) -> str:
    """Why input ``node``, of which an index gathers tokens for attention, was not taken for a pool."""
    try:
        read_pool(node)
    except UsedAsWholeError as error:
        return f"which is also used by {error}"
    return "which is not a tensor of slots or blocks of its own"


def _why_whole(node: Node, part: Node) -> str:
    """Why input ``node``, of which attention reads ``part``, was not split into its parts."""
    try:
        read_stack(node, part)
    except UsedAsWholeError as error:
        return f"which is also used by {error}"
    return "which is not made of caches [batch, heads, tokens, head_dim]"


def no_cache(root: Node, role: Role) -> Refusal:
    """Why ``root`` is no cache: it is made in this graph from new rows alone, or from a cache among other things.

    Attention of earlier layers is no part of how it is made: what a model computes from that is new.
    """
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        if node.target in WRITE_OPS and len(shape_of(node)) == 4 and first_state(node).op == "placeholder":
            return Refusal(Reason.computed_from_cache, role=role)
        operands = [] if is_marker(node) else [operand for operand in node.all_input_nodes if operand not in seen]
        seen.update(operands)
        pending.extend(operands)
    return Refusal(Reason.no_cache, role=role)


def used_elsewhere(cache: Cache, state: Node, user: Node) -> Refusal:
    """``user`` uses ``state`` of a cache in a way of its own."""
    return Refusal(Reason.used_elsewhere, role=cache.role, source=state.name, user=name_of(user))


def name_of(user: Node) -> str:
    """What the reader of a reason is told of a node."""
    return "the caller" if user.op == "output" else user.format_node() or user.name
