"""The module and the layer that a node was traced in, and the attention sites of a graph."""

from __future__ import annotations

import re

from torch.fx import GraphModule, Node

from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.site import Site


def module_name(node: Node) -> str:
    """The qualified name of the innermost module that ``node`` was traced in, e.g. ``model.layers.0.self_attn``."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part and part not in ("_modules", "_orig_mod", "__dict__")]
    if parts[:1] in (["L"], ["G"]):  # a local or global variable of the compiled frame, then its name
        is_argument = parts[1:2] == ["args"] and parts[2:3] != [] and parts[2].isdigit()  # of a decorator's *args
        parts = parts[3:] if is_argument else parts[2:]
    return ".".join(parts)


def layer_index(module: str) -> int | None:
    """The first number in a qualified module name; in every common model, this is the index of the layer."""
    match = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return int(match.group(1)) if match else None


def sites_of(gm: GraphModule) -> list[Site]:
    """An undecided Site for every marker of a graph.

    If no module name has a number, the layers of several markers are numbered in their order. A single marker may then
    be a layer of a model whose layers are compiled one by one, so its layer is unknown.
    """
    markers = [Marker.of(node) for node in markers_of(gm.graph)]
    modules = [marker.module for marker in markers]
    layers = [layer_index(module) for module in modules]
    if len(markers) > 1 and all(layer is None for layer in layers):
        layers = list(range(len(markers)))
    return [
        Site(module, layer, marker.describe()) for module, layer, marker in zip(modules, layers, markers, strict=True)
    ]
