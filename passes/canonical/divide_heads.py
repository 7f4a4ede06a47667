"""Give heads and channels a dimension each, in caches that keep all heads of a token in one dimension.

Whisper keeps caches [batch, tokens, num_heads * head_dim] and divides them into heads for attention. Later passes see
caches [batch, tokens, num_heads, head_dim] instead, with the same writes. Two kinds of caches are divided: inputs with
all writes to them, and new rows that the graph returns.

The caller's tensor keeps its shape. :mod:`~kvcompile.passes.canonical.divide_last` restores this shape for
caches that stay plain, and :func:`with_merged_axes` puts it into the caller's duties for packed caches.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.fx import Graph, Node

from kvcompile.kernels.layout.axes import merged_axes
from kvcompile.passes.calling import Rewritten
from kvcompile.passes.canonical.divide_last import Divided, divide_last, other_copy, outputs_of, states_to_divide
from kvcompile.passes.graph.aten import shape_of, view_chain
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.marker import Marker, markers_of

_RANK = 3
"""The dimensions of a cache with merged heads."""


def divide_heads(graph: Graph) -> Divided:
    """Divide the caches of a functional graph with markers, in place."""
    divided = Divided()
    for first, head_dim in _caches(graph).items():
        if len(shape_of(first)) != _RANK:
            continue  # a state of a cache that has been divided, or not a cache with merged heads
        states = states_to_divide(first)
        is_kept = first.op == "placeholder" or not outputs_of(graph).isdisjoint(states)
        if is_kept and other_copy(states) is None:
            divide_last(graph, first, states, head_dim, divided)
    divided.note_indices(graph)
    return divided


def with_merged_axes(rewritten: Rewritten, divided: Divided) -> Rewritten:
    """The caller's duties, with the order of dimensions that the caller knows."""
    inputs = tuple(
        dataclasses.replace(action, axes=merged_axes(action.axes)) if action.index in divided.indices else action
        for action in rewritten.inputs
    )
    outputs = tuple(
        dataclasses.replace(action, axes=merged_axes(action.axes), shape=_merged_shape(action.shape))
        if action.index in divided.outputs
        else action
        for action in rewritten.outputs
    )
    return dataclasses.replace(rewritten, inputs=inputs, outputs=outputs)


def _merged_shape(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*shape[:-2], shape[-2] * shape[-1])


def _caches(graph: Graph) -> dict[Node, int]:
    """The inputs and returned rows that attention divides into heads, each with its ``head_dim``."""
    found: dict[Node, set[int]] = {}
    stop = frozenset(outputs_of(graph))
    for call in map(Marker.of, markers_of(graph)):
        for operand in (call.key, call.value):
            root, chain = view_chain(operand, stop)
            head_dim = _head_dim(root, chain, operand)
            if head_dim is not None:
                first = first_state(root)
                found.setdefault(first if first.op == "placeholder" else root, set()).add(head_dim)
    return {first: sizes.pop() for first, sizes in found.items() if len(sizes) == 1}


def _head_dim(root: Node, chain: tuple[Node, ...], operand: Node) -> int | None:
    """The channels of a head, if ``operand`` [batch, heads, tokens, channels] divides the last dimension of ``root``.

    None otherwise.
    """
    if root.op == "output" or len(shape_of(root)) != _RANK or len(shape_of(operand)) != 4:
        return None
    index_map = follow(IndexMap.identity(shape_of(root)), *chain)
    if index_map is None or not isinstance(shape_of(root)[-1], int):
        return None
    last = 2
    heads, channels = ([factor for factor in index_map.dims[dim] if factor.axis == last] for dim in (1, 3))
    if len(heads) != 1 or len(channels) != 1 or len(index_map.factors(last)) != 2:
        return None
    size, head_dim = heads[0].size, heads[0].step  # only the first channels of each head may be read
    whole = isinstance(size, int) and isinstance(head_dim, int) and size * head_dim == shape_of(root)[last]
    in_order = channels[0].step == 1 and channels[0].size <= head_dim and index_map.starts[last] == 0
    return int(head_dim) if whole and in_order and size > 1 else None
