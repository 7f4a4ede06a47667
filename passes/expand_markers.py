"""Stage B: give markers that stayed back to Inductor."""

from __future__ import annotations

from torch.fx import Graph

from kvcompile.passes.marker import Marker, markers_of, replace_marker


def expand_markers(graph: Graph) -> None:
    """Put the computation that the model wrote in the place of every marker that is left."""
    for marker in markers_of(graph):
        replace_marker(graph, marker, Marker.of(marker).original)
