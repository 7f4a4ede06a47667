"""The module and the layer that a node was traced in."""

from __future__ import annotations

import re

from torch.fx import Node


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
