"""Stage A, on Dynamo's graph: replace every scaled-dot-product attention by one opaque marker op.

Leaves alone everything else; :mod:`kvcompile.passes.marker` says what a marker is and why.
"""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from kvcompile.passes.marker import Marker

_PARAMETERS = ("query", "key", "value", "mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def is_attention(node: Node) -> bool:
    """Whether ``node`` calls ``F.scaled_dot_product_attention``, under any of its names."""
    return node.op == "call_function" and node.target in (
        F.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention.default,
    )


def mark_attention(gm: GraphModule) -> int:
    """Replace attention calls in place; returns how many."""
    calls = [node for node in gm.graph.nodes if is_attention(node)]
    for node in calls:
        with gm.graph.inserting_before(node):
            marker = _read_call(node).insert(gm.graph)
        marker.meta = dict(node.meta)
        node.replace_all_uses_with(marker)
        gm.graph.erase_node(node)
    if calls:
        gm.graph.lint()
        gm.recompile()
    return len(calls)


def _read_call(node: Node) -> Marker:
    arguments = dict(node.kwargs)
    if "attn_mask" in arguments:
        arguments["mask"] = arguments.pop("attn_mask")
    return Marker(**dict(zip(_PARAMETERS, node.args, strict=False)), **arguments, module=module_name(node))


def module_name(node: Node) -> str:
    """The qualified name of the innermost module that ``node`` was traced in, e.g. ``model.layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in ("_modules", "_orig_mod")]
    if parts[:1] in (["L"], ["G"]):  # a local or global variable of the compiled frame, then its name
        parts = parts[2:]
    return ".".join(parts)


def layer_index(module: str) -> int | None:
    """The first number in a qualified module name, which is the layer in every common model."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return int(match.group(1)) if match else None
