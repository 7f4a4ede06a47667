"""Recognise the ways in which a full window moves the tokens of its cache, instead of writing new ones.

- ``roll`` along the tokens, or ``cache[:, :, index]`` with as many tokens as before, is
  ``index(cache, [None, None, source])``.
- ``cache[:, :, :-n] = cache[:, :, n:].clone()`` is a ``slice_scatter`` of a slice of the same cache.
- ``cache[:, :, a:b]`` of a growing cache, before or after the ``cat``, is ``slice(cache, ...)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import arguments, same_sizes, shape_of, sliced_by
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.prove.cache_write import CacheWrite, Normalised, materialise
from kvcompile.passes.prove.positions import first_of_slice, num_tokens_of, wrapped

aten = torch.ops.aten


def _move(
    node: Node, base: Node, form: str, axes: str, source: Callable[..., Tensor], *args: Any, own: tuple[Node, ...] = ()
) -> CacheWrite:
    """The move whose source positions ``source`` computes from ``args``."""

    def normalise(graph: Graph) -> Normalised:
        return None, inline(graph, source, *materialise(graph, args)), None

    return CacheWrite(node, base, form, axes, own, normalise, moves=True)


def shift_of_tokens(node: Node, axes: str, value: Node, read: tuple[Node, ...]) -> CacheWrite | None:
    """Neighbouring tokens of a cache that are copied to another place in it; None for another write.

    Args:
        node: a ``slice_scatter``.
        axes: the order of the dimensions of the cache.
        value: the written value.
        read: the nodes through which it reads the shape of the cache.
    """
    base, first = _sliced(value, axes)
    if base is not node.args[0] or not same_sizes(shape_of(value), shape_of(node.args[1])):
        return None
    num_tokens, n = num_tokens_of(base, axes), num_tokens_of(value, axes)
    to = first_of_slice(arguments(node)[3], num_tokens)
    device = node.meta["val"].device

    def source(first: Any, to: Any, n: Any) -> Tensor:
        copied, place = (wrapped(torch.arange(n, device=device) + begin, num_tokens) for begin in (first, to))
        return torch.arange(num_tokens, device=device).index_put([place], copied)

    return _move(node, base, "shift", axes, source, first, to, n, own=(*sliced_by(value), *read))


def index_of_tokens(node: Node, axes: str) -> CacheWrite | None:
    """Tokens of a cache in another order, with as many tokens as before; None for another index."""
    base, indices = node.args
    token_axis = axes.index("t")
    index = indices[token_axis] if len(indices) > token_axis else None
    if index is None or len(shape_of(node)) != len(axes) or any(i is not None and i is not index for i in indices):
        return None
    num_tokens = num_tokens_of(base, axes)
    is_vector = index.meta["val"].dim() == 1 and index.meta["val"].dtype != torch.bool
    if not is_vector or not statically_known_true(num_tokens_of(node, axes) == num_tokens):
        return None
    return _move(node, base, "index", axes, lambda source: wrapped(source, num_tokens), index)


def _sliced(node: Node, axes: str) -> tuple[Node | None, Any]:
    """(tensor, first token) if ``node`` is a slice of neighbouring tokens or a copy of one; else (None, None)."""
    chain = sliced_by(node)
    if chain and len(shape_of(node)) == len(axes):
        base, axis, start, _, step = arguments(chain[-1])
        if axes[axis] == "t" and step == 1:
            return base, first_of_slice(start, num_tokens_of(base, axes))
    return None, None


def slice_of_tokens(node: Node, axes: str) -> CacheWrite | None:
    """Neighbouring tokens, which move to the first positions; None if ``node`` is not a slice of tokens."""
    base, first = _sliced(node, axes)
    if base is None:
        return None
    num_tokens, n = num_tokens_of(base, axes), num_tokens_of(node, axes)
    device = node.meta["val"].device

    def source(first: Any, n: Any) -> Tensor:
        return wrapped(torch.arange(n, device=device) + first, num_tokens)

    return _move(node, base, "slice", axes, source, first, n, own=sliced_by(node)[1:])
