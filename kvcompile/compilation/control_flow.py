"""A check of control flow operators (``torch.cond`` and others), which PyTorch cannot trace with packed caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from kvcompile.compat.operators import HigherOrderOperator
from kvcompile.errors import KVCompileError
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.graph.names import input_name, with_line

_CONTROL_FLOW = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


def check_control_flow(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Check that no control flow operator of Dynamo's graph takes a packed cache.

    Raises:
        KVCompileError: an operator takes a packed cache. PyTorch could not trace the operator, and would not name the
            cache.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    packed = {
        node for node, value in zip(placeholders, example_inputs, strict=True) if isinstance(value, PackedSubclass)
    }
    if not packed:
        return
    for node in gm.graph.nodes:
        if not isinstance(node.target, HigherOrderOperator) or node.target.name() not in _CONTROL_FLOW:
            continue
        cache = next((operand for operand in node.all_input_nodes if operand in packed), None)
        if cache is not None:
            operator = with_line(node.target.name(), node)
            raise KVCompileError(
                f"{operator} takes the packed cache {input_name(cache)}, which PyTorch cannot trace; move attention "
                "out of the branches or the loop, or give it `dtype: auto` in the policy"
            )
