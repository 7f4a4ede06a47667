"""Stage A, on Dynamo's graph: replace every scaled-dot-product attention by one opaque marker op.

AOTAutograd would turn attention into a backend-specific op or decompose it; the marker ``kvcompile::sdpa`` keeps it
whole. It also carries the qualified name of the module that called attention, which only Dynamo's graph knows.
Leaves alone everything else.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile

_PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


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
        arguments = _arguments(node)
        with gm.graph.inserting_before(node):
            marker = gm.graph.call_function(
                torch.ops.kvcompile.sdpa.default,
                (*(arguments[name] for name in _PARAMETERS), module_name(node)),
            )
        marker.meta = dict(node.meta)
        node.replace_all_uses_with(marker)
        gm.graph.erase_node(node)
    if calls:
        gm.graph.lint()
        gm.recompile()
    return len(calls)


def _arguments(node: Node) -> dict[str, Any]:
    return {**_DEFAULTS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}


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
