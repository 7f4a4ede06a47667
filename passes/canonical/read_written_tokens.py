"""Let attention read the tokens of a cache and new tokens as a slice of the cache after the write of the new ones.

A model may join the old tokens and the new ones for attention, and write the new ones into its cache besides::

    keys = torch.cat([cache[:, :, :start], k], 2)
    cache[:, :, start:end] = k

The joined tokens are ``cache[:, :, :end]`` after the write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from kvcompile.passes.graph.aten import arguments, computed_alike, same_sizes, shape_of
from kvcompile.passes.graph.inline import insert_call, size_node
from kvcompile.passes.graph.sizes_from_data import has_size_from_data

aten = torch.ops.aten


class _Joined(NamedTuple):
    """The first tokens of ``base``, up to ``end`` along ``dim``, followed by ``new``."""

    base: Node
    dim: int
    end: Any
    new: Node


def read_written_tokens(graph: Graph) -> None:
    """Replace each such concatenation. The write moves before it."""
    changed = False
    for cat in list(graph.find_nodes(op="call_function", target=aten.cat.default)):
        joined = _joined(cat)
        if joined is None:
            continue
        writes = graph.find_nodes(op="call_function", target=aten.slice_scatter.default)
        fitting = (write for write in writes if _is_behind(write, joined) and _writes(write, joined.new))
        write = next(fitting, None)
        if write is None or has_size_from_data(cat) or has_size_from_data(write):
            continue
        end = arguments(write)[4]
        with graph.inserting_before(cat):
            end = size_node(graph, end.meta["val"]) if isinstance(end, Node) else end
            written = joined.base
            if written is not write:  # the write may come later in the graph
                base, dim, start, new = joined
                written = insert_call(graph, aten.slice_scatter.default, base, new, dim, start, end)
                write.replace_all_uses_with(written)
            cat.replace_all_uses_with(insert_call(graph, aten.slice.Tensor, written, joined.dim, 0, end))
        changed = True
    if changed:
        graph.eliminate_dead_code()


def _joined(cat: Node) -> _Joined | None:
    tensors, dim = arguments(cat)
    if len(tensors) != 2 or tensors[0].target is not aten.slice.Tensor:
        return None
    old, new = tensors
    base, sliced, start, end, step = arguments(old)
    begins = start in (None, 0) and end is not None and step == 1 and sliced == dim
    return _Joined(base, dim, end, new) if begins and old.meta["val"].dtype == new.meta["val"].dtype else None


def _is_behind(write: Node, joined: _Joined) -> bool:
    """Whether ``write`` begins behind the old tokens, in the same cache. ``base`` may be the cache after the write."""
    base, _, dim, start, _, step = arguments(write)
    return (
        (joined.base is write or computed_alike(base, joined.base))
        and (dim, step) == (joined.dim, 1)
        and computed_alike(0 if start is None else start, joined.end)
    )


def _writes(write: Node, new: Node) -> bool:
    """Whether ``write`` writes the tokens ``new``, and no broadcast of them."""
    value = write.args[1]
    written = value.args[1] if value.target is aten.copy.default else value
    return computed_alike(written, new) and same_sizes(shape_of(value), shape_of(new))
