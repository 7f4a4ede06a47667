"""Make a rewritten graph one that a CUDA graph can record once and replay with any caches.

A CUDA graph replays fixed addresses. Inductor copies inputs to addresses of its own, except those that it takes for
static; it does not record graphs that mutate the others. Here no input of a decode step has to be static but weights:

- A packed cache is passed *by reference* (see :mod:`kvcompile.kernels.layout.references`): kernels find its address in
device
  memory at every replay. Stores into it stand in the graph as they are: no pass of Inductor may copy a reference, which
  is what it does with a functional store that it cannot reinplace.
- What else the graph mutates (the number of tokens that a cache holds, say) is passed by value: its new value becomes
  an output, which the caller of the graph copies back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.layout.references import reference_strides
from kvcompile.passes.calling import Rewritten

SMALL_NBYTES = 4096
"""Static inputs up to this size are passed by value, too: one copy costs less than recording a graph anew."""

copy_ = torch.ops.aten.copy_.default

_TAKE_REFERENCES = (torch.ops.kvcompile.attention.default, torch.ops.kvcompile.gather.default, copy_)


def can_replay(gm: GraphModule, rewritten: Rewritten) -> bool:
    """Whether a recording of a graph would serve more than one call.

    Growing caches have another length at every step. Caches that the graph makes would lie in memory that belongs to
    the recording, and the next replay would overwrite them. And only our operators take references, to whole caches: a
    graph that moves packed tokens about, as a full sliding window does, or uses some sequences, needs the data.
    """
    if rewritten.outputs or any(action.kind == "growing" for action in rewritten.inputs):
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    states = [placeholders[action.index] for action in rewritten.inputs]
    for state in states:  # grows
        for user in state.users:
            if user.target is auto_functionalized_v2 and not _views_bases(user):
                states += user.users
            elif user.target not in _TAKE_REFERENCES:
                return False
    return True


def _views_bases(call: Node) -> bool:
    """Whether an op is given parts of its bases."""
    return any(name.endswith("_slice_dim") for name in call.kwargs)


def make_replayable(gm: GraphModule, rewritten: Rewritten, static_inputs: Sequence[int]) -> Rewritten:
    """Change ``gm``, a graph that :func:`can_replay`, as described above.

    Args:
        gm: the rewritten graph.
        rewritten: its caller's duties.
        static_inputs: positions of the inputs whose address stays the same from call to call.

    Returns:
        The caller's new duties: the outputs of the graph are followed by the new values of ``returned_inputs``, and its
        caches are passed by reference.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    caches = {action.index for action in rewritten.inputs}
    examples = list(rewritten.example_inputs)
    _store_in_place(gm, {placeholders[index] for index in caches})
    for index in caches:
        examples[index] = _refer(placeholders[index])
    by_value = {
        node: index
        for index, node in enumerate(placeholders)
        if index not in caches and (index not in static_inputs or _is_small(node))
    }
    returned = _return_new_values(gm, by_value)
    gm.graph.lint()
    gm.recompile()
    return replace(rewritten, example_inputs=examples, by_reference=True, returned_inputs=returned)


def _store_in_place(gm: GraphModule, caches: set[Node]) -> None:
    """Replace functional stores into caches, and the final copies into these, by stores that mutate them.

    The graph keeps its order, in which attention comes after the stores whose result it reads, and nothing reads a
    cache as it was before: the rewrite made it so.
    """
    for call in gm.graph.find_nodes(op="call_function", target=auto_functionalized_v2):
        bases = call.kwargs["_all_bases"]
        if not caches.issuperset(bases):
            continue
        arguments = {name: value for name, value in call.kwargs.items() if not name.startswith("_")}
        with gm.graph.inserting_before(call):
            gm.graph.call_function(call.args[0], tuple(bases), arguments).meta["val"] = None
        for state in list(call.users):
            state.replace_all_uses_with(bases[state.args[1] - 1])
            gm.graph.erase_node(state)
        gm.graph.erase_node(call)
    for copy in gm.graph.find_nodes(op="call_function", target=copy_):
        if copy.args[0] in caches:
            gm.graph.erase_node(copy)


def _refer(placeholder: Node) -> torch.Tensor:
    """Make a placeholder of packed data a reference; returns its fake value."""
    data = placeholder.meta["val"]
    with data.fake_mode:
        reference = torch.empty_strided(data.shape, reference_strides(data), dtype=data.dtype, device=data.device)
    placeholder.meta["val"] = reference
    return reference


def _return_new_values(gm: GraphModule, by_value: dict[Node, int]) -> tuple[int, ...]:
    """Replace the final copies into inputs ``by_value`` by outputs; returns the positions of these inputs."""
    output = gm.graph.output_node()
    values, returned = list(output.args[0]), []
    for node in gm.graph.find_nodes(op="call_function", target=copy_):
        index = by_value.get(node.args[0])
        if index is None:
            continue
        # AOTAutograd's graph is functional but for these copies at its end: nobody reads the input after them, or what
        # they return, except as an output.
        values.append(node.args[1])
        returned.append(index)
        node.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(node)
    output.args = (tuple(values),)
    return tuple(returned)


def _is_small(node: Node) -> bool:
    value: Any = node.meta["val"]
    return isinstance(value, torch.Tensor) and statically_known_true(value.nbytes <= SMALL_NBYTES)
