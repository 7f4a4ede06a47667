"""Let a CUDA graph record a rewritten graph once and replay it with any caches.

A CUDA graph replays fixed addresses. Inductor copies inputs to fixed addresses, except static inputs, and it does not
record graphs that mutate other inputs. After this pass only the weights of a decode step have to be static:

- A packed cache is passed *by reference* (:mod:`kvcompile.kernels.layout.references`). Kernels find its address in
  device memory at every replay. Stores into it mutate the reference in the graph. They are not functional, because
  Inductor would copy the data of a functional store that it cannot reinplace, and nothing may copy a reference.
- Another input that the graph mutates, such as a cache's number of tokens, is passed in a buffer at a fixed address.
  The graph mutates the buffer, and the caller of the graph copies it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import auto_functionalized_v2
from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.layout.references import reference_strides
from kvcompile.passes.calling import Rewritten

SMALL_NBYTES = 4096
"""Static inputs up to this size in bytes are buffered, too: a copy costs less than another recording."""

copy_ = torch.ops.aten.copy_.default

_TAKE_REFERENCES = (
    torch.ops.kvcompile.attention.default,
    torch.ops.kvcompile.attention_part.default,
    torch.ops.kvcompile.gather.default,
    copy_,
)


def can_replay(gm: GraphModule, rewritten: Rewritten) -> bool:
    """Whether a recording of the graph would serve more than one call.

    Growing caches have another length at every step. Caches that the graph makes would lie in the recording's memory,
    and the next replay would overwrite them. Only kvcompile's operators take references, and only to whole caches. A
    graph that moves packed tokens, as a full sliding window does, or that uses some sequences of a cache needs the
    data.
    """
    if rewritten.outputs or any(action.kind == "growing" for action in rewritten.inputs):
        return False
    placeholders = gm.graph.find_nodes(op="placeholder")
    states = [placeholders[action.index] for action in rewritten.inputs]
    for state in states:  # the list grows
        for user in state.users:
            if user.target is auto_functionalized_v2 and not _views_bases(user):
                states += user.users
            elif user.target not in _TAKE_REFERENCES:
                return False
    return True


def _views_bases(call: Node) -> bool:
    """Whether an op takes slices of its bases."""
    return any(name.endswith("_slice_dim") for name in call.kwargs)


def make_replayable(gm: GraphModule, rewritten: Rewritten, static_inputs: Sequence[int]) -> Rewritten:
    """Pass caches by reference and other mutated inputs in buffers, in a graph that :func:`can_replay`.

    Args:
        gm: the rewritten graph; changed in place.
        rewritten: its caller's duties.
        static_inputs: positions of the inputs whose address is the same at every call.

    Returns:
        The caller's new duties: caches are passed by reference, and ``buffered_inputs`` in buffers.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    caches = {action.index for action in rewritten.inputs}
    examples = list(rewritten.example_inputs)
    store_in_place(gm, {placeholders[index] for index in caches})
    for index in caches:
        examples[index] = _refer(placeholders[index])
    mutated = {node.args[0] for node in gm.graph.find_nodes(op="call_function", target=copy_)}
    buffered = tuple(
        index
        for index, node in enumerate(placeholders)
        if node in mutated and index not in caches and (index not in static_inputs or _is_small(node))
    )
    gm.graph.lint()
    gm.recompile()
    return replace(rewritten, example_inputs=examples, by_reference=True, buffered_inputs=buffered)


def store_in_place(gm: GraphModule, caches: set[Node]) -> None:
    """Replace functional stores into caches, and the final copies into caches, by stores that mutate them.

    The graph keeps its order. The rewrite has put attention after the stores whose result it reads, and nothing reads
    the state of a cache before a store.
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


def _is_small(node: Node) -> bool:
    value: Any = node.meta["val"]
    return isinstance(value, torch.Tensor) and statically_known_true(value.nbytes <= SMALL_NBYTES)
