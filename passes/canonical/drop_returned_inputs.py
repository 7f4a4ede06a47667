"""Stage B, before analysis: an output that is an input, written by the graph, is none of the graph's.

``self.cache = self.cache.to(x)``, where nothing is cast, lets Dynamo return the cache. AOTAutograd then hands the
caller's own tensor back, whatever the graph returns there, and the graph returns the copy into that input. Without it
a cache is seen by its write-back alone, as one that is not returned.
"""

from __future__ import annotations

import torch
from torch.fx import Graph


def drop_returned_inputs(graph: Graph) -> None:
    """Return None in the place of inputs that the graph has written; their copies are outputs in no other case."""
    output = graph.output_node()
    copies = set(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    places = {index for index, node in enumerate(output.args[0]) if node in copies}
    output.args = (tuple(None if index in places else node for index, node in enumerate(output.args[0])),)
    # Inductor keeps the strides of these outputs; None has none.
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = [index for index in visible if index not in places]
