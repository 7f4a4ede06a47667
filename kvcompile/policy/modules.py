"""Lookup of an attention module in a file of calibrated numbers."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.passes.graph.modules import layer_index


def module_in(known: Sequence[str], module: str, layer: int | None) -> str | None:
    """The name in ``known`` of the module that calls attention; None if no module or several modules match.

    The name of a module depends on which module of a model was compiled. An unknown name is therefore matched by its
    layer index, if exactly one known module has that index.
    """
    if module in known:
        return module
    same_layer = [name for name in known if layer is not None and layer_index(name) == layer]
    return same_layer[0] if len(same_layer) == 1 else None
