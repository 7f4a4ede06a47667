"""Drop outputs that are the copy back into an input.

``self.cache = self.cache.to(x)`` makes Dynamo return the cache where nothing is cast. The graph then returns the node
of the copy into that input. AOTAutograd ignores this output and returns the caller's own tensor. Without the output,
the cache looks like any cache that is copied back and not returned.
"""

from __future__ import annotations

import torch
from torch.fx import Graph


def drop_returned_inputs(graph: Graph) -> None:
    """Return None in the place of copies back into inputs. No other copies are outputs."""
    output = graph.output_node()
    copies = set(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default))
    places = {index for index, node in enumerate(output.args[0]) if node in copies}
    output.args = (tuple(None if index in places else node for index, node in enumerate(output.args[0])),)
    # Inductor keeps the strides of the outputs in this list, and None has no strides.
    visible = output.meta.get("user_visible_output_idxs", ())
    output.meta["user_visible_output_idxs"] = [index for index in visible if index not in places]
