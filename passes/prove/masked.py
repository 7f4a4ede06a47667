"""Find the vectors of a write that the write leaves unchanged, because they were read from the same place of the cache.

To write no tokens for some sequences, such as finished ones, models choose between new vectors and vectors of the
cache: ``k = torch.where(active, k, cache[:, :, pos])`` before the write at ``pos``. The packed cache keeps the bytes of
such tokens. Its vectors are not dequantized and quantized again.

A value is *kept* if it is read from the cache where the write puts it. This is proven by the index map of the views in
between, and by the arguments of read and write, which must be the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.pytree import tree_map_only
from kvcompile.passes.graph.aten import (
    CASTS,
    RESHAPES,
    SAME_OPS,
    VIEW_OPS,
    computed_alike,
    known_size,
    same_sizes,
    shape_of,
)
from kvcompile.passes.graph.cast_to_cache import converted
from kvcompile.passes.graph.constant_dims import first_along_constant, varying_shape
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.inline import fake_mode_of, inline, insert_call, size_node
from kvcompile.passes.graph.permutations import axes_after, unpermuted
from kvcompile.passes.prove.cache_write import CacheWrite, Form, Normalised, materialise

aten = torch.ops.aten

Emit = Callable[..., Any]
"""Calls an operator: it inserts a node, or computes a fake value."""


@dataclass(frozen=True)
class _Choice:
    """A ``where`` between new vectors and kept ones.

    Attributes:
        mask: its condition.
        takes_new: the value of the condition where it takes new vectors.
        shape: its shape.
        views: the views between it and the value that is written. Another choice may be among them, with new vectors of
            its own.
    """

    mask: Node
    takes_new: bool
    shape: Sequence[Any]
    views: tuple[Node, ...]


@dataclass(frozen=True)
class Masked:
    """The value of a write, some vectors of which are kept.

    Attributes:
        new: the new vectors, which broadcast to the shape of the innermost choice.
        choices: the choices, the outermost first. A vector is new if each of them takes it.
        own: the nodes that lead from the cache to the value.
        dtype: the dtype of the innermost choice.
    """

    new: Node
    choices: tuple[_Choice, ...]
    own: tuple[Node, ...]
    dtype: torch.dtype

    def value(self, graph: Graph) -> Node:
        """The value of the write at the graph's insertion point. Kept vectors are replaced by arbitrary vectors."""
        innermost = self.choices[-1]

        def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
            return insert_call(graph, target, *args, **kwargs)

        value = self.new
        if not same_sizes(shape_of(value), innermost.shape):
            value = emit(aten.expand.default, value, [size_node(graph, known_size(size)) for size in innermost.shape])
        if value.meta["val"].dtype != self.dtype:
            value = emit(torch.ops.prims.convert_element_type.default, value, self.dtype)
        return _viewed(emit, value, innermost.views)

    def masks(self, graph: Graph) -> tuple[list[Node], list[bool]]:
        """A bool for every number of the value in each choice, and which value takes the new number."""

        def emit(target: Any, *args: Any, **kwargs: Any) -> Node:
            return insert_call(graph, target, *args, **kwargs)

        masks = []
        for choice in self.choices:
            sizes = [size_node(graph, known_size(size)) for size in choice.shape]
            masks.append(_viewed(emit, emit(aten.expand.default, choice.mask, sizes), choice.views, of_mask=True))
        return masks, [choice.takes_new for choice in self.choices]

    def fake_masks(self) -> list[Tensor]:
        """The fake values of :meth:`masks`, without a change of the graph. Repeated numbers have the stride 0."""

        def emit(target: Any, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = tree_map_only(Node, lambda node: node.meta["val"], (args, kwargs))
            return target(*args, **kwargs)

        with fake_mode_of(self.new.graph):
            return [
                _viewed(emit, _varying(choice.mask).expand(*choice.shape), choice.views, of_mask=True)
                for choice in self.choices
            ]

    def is_of_tokens(self, fn: Form, args: Sequence[Any]) -> bool:
        """Whether all masks are the same for all numbers of a token in the normal form ``fn`` of a write."""
        given = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        masks = self.fake_masks()
        with fake_mode_of(self.new.graph):
            placed = [fn(mask, *given)[0] for mask in masks]
        return all(
            statically_known_true(mask.shape[dim] == 1) or mask.stride(dim) == 0 for mask in placed for dim in (1, 3)
        )


def _varying(mask: Node) -> Tensor:
    """The fake value of ``mask`` without repeated values."""
    return first_along_constant(mask.meta["val"], varying_shape(mask))


Reads = Callable[[Node], "IndexMap | None"]
"""Takes a node that reads the vectors that a write replaces; returns their place in the value of the write.

None for other nodes.
"""


def kept_vectors(value: Node, reads: Reads, base: Node) -> Masked | None:
    """The choices between new vectors and kept ones that ``value`` is made of; None if it keeps none.

    Args:
        value: the value that a write puts into ``base``.
        reads: the map of a node that holds the vectors of ``base`` that the write replaces.
        base: the cache before the write.
    """
    choices: list[_Choice] = []
    own: list[Node] = []
    views: tuple[Node, ...] = ()
    dtype, node = value.meta["val"].dtype, value
    while True:
        choice, chain = _view_chain(node)
        if choice.target is not aten.where.self or not all(isinstance(arm, Node) for arm in choice.args):
            break
        if choices and not same_sizes(shape_of(node), choices[-1].shape):
            break  # it is broadcast
        views = (*chain, *views)
        if not all(_holds(view, base) for view in (*chain, choice)):
            break
        arms = [(_path_to_kept(arm, choice, views, reads, base), arm) for arm in choice.args[1:]]
        kept = [place for place, (path, _) in enumerate(arms) if path is not None]
        if len(kept) != 1:
            break
        path, _ = arms[kept[0]]
        assert path is not None
        choices.append(_Choice(choice.args[0], kept[0] == 1, shape_of(choice), views))
        own = [*path, choice, *chain, *own]
        dtype, node = choice.meta["val"].dtype, arms[1 - kept[0]][1]
    return Masked(node, tuple(choices), tuple(dict.fromkeys(own)), dtype) if choices else None


def _view_chain(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The value that ``node`` views, and the views in between, ``node`` included."""
    chain: list[Node] = []
    while node.op == "call_function" and node.target in VIEW_OPS:
        chain.insert(0, node)
        node = node.args[0]
    return node, tuple(chain)


def _path_to_kept(arm: Node, choice: Node, views: Sequence[Node], reads: Reads, base: Node) -> tuple[Node, ...] | None:
    """The nodes from ``base`` to ``arm`` if it holds kept vectors, else None."""
    if not same_sizes(shape_of(arm), shape_of(choice)):
        return None
    chain: list[Node] = []
    node = arm
    while (placed := reads(node)) is None:
        if node.op != "call_function" or node.target not in VIEW_OPS or not _holds(node, base):
            return None
        chain.insert(0, node)
        node = node.args[0]
    index_map = follow(placed, *chain, *views)
    if index_map is None or not _is_identity(index_map):
        return None
    return (*_behind(node, base), *chain)


def _behind(node: Node, base: Node) -> tuple[Node, ...]:
    """``node``, which reads ``base``, and the views between them."""
    nodes: list[Node] = []
    while node is not base:
        nodes.insert(0, node)
        if len(nodes) > 1 and node.target not in VIEW_OPS:
            return tuple(nodes[1:])
        node = node.args[0]
    return tuple(nodes)


def _holds(node: Node, base: Node) -> bool:
    """Whether the dtype of ``node`` holds every number of ``base`` exactly."""
    dtype = node.meta["val"].dtype
    return bool(torch.promote_types(base.meta["val"].dtype, dtype) == dtype)


def _is_identity(index_map: IndexMap) -> bool:
    """Whether a view has every element of its base in its place. It may lack first dimensions of size 1."""
    missing = len(index_map.base) - len(index_map.dims)
    if missing < 0:
        return False
    dims = [*[()] * missing, *index_map.dims]
    for axis, (size, dim) in enumerate(zip(index_map.base, dims, strict=True)):
        factors = [factor for factor in dim if not index_map.is_one(factor)]
        if not factors and statically_known_true(size == 1):
            continue
        if len(factors) != 1 or factors[0].axis != axis:
            return False
        if not statically_known_true(factors[0].step == 1) or not statically_known_true(factors[0].size == size):
            return False
    return all(statically_known_true(start == 0) for start in index_map.starts)


def _viewed(emit: Emit, x: Any, views: Sequence[Node], *, of_mask: bool = False) -> Any:
    """``x`` after the views; a mask keeps its dtype."""
    for view in views:
        if view.target in SAME_OPS or (of_mask and view.target in CASTS):
            continue
        target = aten.reshape.default if view.target in RESHAPES else view.target
        x = emit(target, x, *view.args[1:], **view.kwargs)
    return x


def masked_write(
    node: Node, base: Node, form: str, axes: str, fn: Form, masked: Masked, args: Sequence[Any], own: tuple[Node, ...]
) -> CacheWrite:
    """The write of the vectors that ``masked`` takes, in the normal form ``fn``."""

    def normalise(graph: Graph) -> Normalised:
        masks, takes_new = masked.masks(graph)
        x = converted(graph, masked.value(graph), node)

        def written(x: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
            masks, given = others[: len(takes_new)], others[len(takes_new) :]
            placed, positions, valid = fn(x, *given)
            for mask, takes in zip(masks, takes_new, strict=True):
                chosen = fn(mask, *given)[0][:, 0, :, 0].bool()
                chosen = chosen if takes else ~chosen
                valid = chosen if valid is None else valid & chosen
            assert valid is not None, "there is a mask"
            return placed, positions.expand(valid.shape), valid

        return inline(graph, written, x, *masks, *materialise(graph, tuple(args)))

    return CacheWrite(node, base, f"masked {form}", axes, (*own, *masked.own), normalise)


def chosen_write(
    node: Node,
    base: Node,
    write: CacheWrite,
    of_tokens: Callable[[Tensor], Tensor],
    num_tokens: Any,
    own: tuple[Node, ...],
) -> CacheWrite:
    """The write of the tokens of ``write`` that a mask chooses.

    Args:
        node: a ``where`` between the cache after ``write`` and the cache before.
        base: the cache before.
        write: the write.
        of_tokens: computes from the condition of ``node`` whether each token is written, [batch or 1, tokens or 1].
        num_tokens: the number of tokens of the cache.
        own: the nodes through which ``node`` uses the cache.
    """

    def chosen(x: Tensor, positions: Tensor, m: Tensor, first: Any, *valid: Tensor) -> tuple[Tensor, Tensor]:
        m, size = of_tokens(m), (x.shape[0], x.shape[2])
        if m.shape[0] != 1 and first is not None:
            m = m.narrow(0, first, size[0])
        positions = positions.expand(size)
        if m.shape[1] == 1:
            is_chosen = m.expand(size)
        else:  # a position outside the cache is an error, whatever the mask says
            is_chosen = m.expand(size[0], -1).gather(1, positions.clamp(max=num_tokens - 1))
            is_chosen = is_chosen | (positions >= num_tokens)
        for other in valid:
            is_chosen = is_chosen & other
        return positions, is_chosen

    def normalise(graph: Graph) -> Normalised:
        x, positions, valid = write.normalise(graph)
        given = () if valid is None else (valid,)
        first = materialise(graph, (write.first_sequence,))
        return x, *inline(graph, chosen, x, positions, node.args[0], *first, *given)

    return replace(write, node=node, base=base, form=f"masked {write.form}", own=own, normalise=normalise)


def place_of_tokens(read: Node, dim: int, base: Node, axes: str) -> IndexMap | None:
    """:func:`place_of_read` along the tokens."""
    return place_of_read(read, dim, "t", base, axes)


def place_of_read(read: Node, dim: int, along: str, base: Node, axes: str) -> IndexMap | None:
    """The map of ``read``, which takes indices of one dimension of ``base`` in any order of its dimensions.

    The base of the map is the part of ``base`` at these indices, in the order ``axes``. The result is None unless
    dimension ``dim`` of the operand of ``read`` is ``along``.
    """
    (state, order, _), (source, _, views) = unpermuted(base, axes), unpermuted(read.args[0], "")
    if not computed_alike(state, source):
        return None
    for view in reversed(views):
        order = axes_after(view, order)
    if order[dim] != along:
        return None
    if len(shape_of(read)) < len(order):
        order, axes = order.replace(along, ""), axes.replace(along, "")
    sizes = [shape_of(read)[order.index(axis)] for axis in axes]
    return IndexMap.identity(sizes).permuted([axes.index(axis) for axis in order])
