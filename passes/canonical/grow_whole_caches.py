"""Let a cache grow as a whole where a model grows its parts and joins them, or grows a view of it.

GPT-2 and GPT-NeoX grow keys and values and stack them again::

    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    return attention(q, k, v), torch.stack([k, v])

This is ``past = torch.cat([past, torch.stack([k, v])], 3)``, of which attention reads ``past[0]`` and ``past[1]``.
WeNet divides channels in place of a stack. fairseq grows ``past.view(batch * heads, tokens, head_dim)`` and views the
result in four dimensions again. Later passes know a cache only by its growth as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.compat.operators import OpOverload
from kvcompile.passes.graph.aliases import may_leave, users_through_views
from kvcompile.passes.graph.aten import RESHAPES, SAME_OPS, arguments, dtype_of, same_sizes, shape_of
from kvcompile.passes.graph.index_map import IndexMap, follow
from kvcompile.passes.graph.inline import behind_placeholders, insert_call, size_node
from kvcompile.passes.graph.permutations import unpermuted
from kvcompile.passes.graph.states import first_state

aten = torch.ops.aten


@dataclass(frozen=True)
class _Grown:
    """``cat([old, *new], dim)`` in the graph.

    Attributes:
        node: the ``cat``.
        old: a view of a cache.
        new: the new tokens.
        dim: the dimension of the tokens.
    """

    node: Node
    old: Node
    new: tuple[Node, ...]
    dim: int

    @staticmethod
    def of(node: Node) -> _Grown | None:
        if node.target is not aten.cat.default:
            return None
        (old, *new), dim = arguments(node)
        alike = all(
            len(shape_of(x)) == len(shape_of(node)) and x.meta["val"].dtype == dtype_of(node) for x in (old, *new)
        )
        return _Grown(node, old, tuple(new), dim) if new and alike else None


@dataclass(frozen=True)
class _Growth:
    """A value of the graph that equals ``cat([base, *new], dim)``.

    Attributes:
        node: the value.
        base: the cache before.
        dim: the dimension of its tokens.
        parts: the views of ``node`` that grow in the graph.
        joined: inserts one of ``new`` from one new tensor of each part.
        viewed: inserts the view of the whole that part ``i`` is.
        are_views: whether the parts share the memory of ``node`` in the model, too.
    """

    node: Node
    base: Node
    dim: int
    parts: tuple[_Grown, ...]
    joined: Callable[[Graph, Sequence[Node]], Node]
    viewed: Callable[[Graph, Node, int], Node]
    are_views: bool


def grow_whole_caches(graph: Graph) -> None:
    """Replace the growth of parts or of a view of an input by the growth of the whole, where the order allows it."""
    replaced = False
    for node in list(graph.nodes):
        growth = _of_parts(node) or _of_view(node)
        if growth is not None and first_state(growth.base).op == "placeholder":
            replaced |= _replace(graph, growth)
    if replaced:
        graph.eliminate_dead_code()


# Recognition


def _of_parts(node: Node) -> _Growth | None:
    """The growth of a cache whose parts grow alone and are joined along another dimension."""
    joins = _joined_pieces(node)
    if joins is None:
        return None
    pieces, dim, stacks = joins
    grown: list[_Grown] = []
    orders: list[list[int]] = []
    bases: list[Node] = []
    offset = 0
    for piece in pieces:
        tensor, order = _unpermuted(piece)
        part = _Grown.of(tensor)
        if part is None:
            return None
        selection, old_order = _unpermuted(part.old)
        found = _selected(selection, dim, offset, drops=stacks)
        if found is None or [old_order[place] for place in order] != list(range(len(order))):
            return None
        base, size = found
        grown.append(part)
        orders.append(order)
        bases.append(base)
        offset += size
    base, tokens = bases[0], {order.index(part.dim) for order, part in zip(orders, grown, strict=True)}
    is_whole = all(other is base for other in bases) and shape_of(base)[dim] == offset
    if len(pieces) < 2 or not is_whole or len(tokens) != 1 or not _grow_alike(grown):
        return None
    (token,) = tokens
    if token == dim and not stacks:
        return None

    def joined(graph: Graph, new: Sequence[Node]) -> Node:
        values = [_permuted(graph, x, order) for x, order in zip(new, orders, strict=True)]
        if stacks:
            values = [insert_call(graph, aten.unsqueeze.default, x, dim) for x in values]
        return insert_call(graph, aten.cat.default, values, dim)

    starts = [0]
    for piece in pieces:
        starts.append(starts[-1] + (1 if stacks else shape_of(piece)[dim]))

    def viewed(graph: Graph, whole: Node, place: int) -> Node:
        if stacks:
            part = insert_call(graph, aten.select.int, whole, dim, place)
        else:
            part = insert_call(graph, aten.slice.Tensor, whole, dim, starts[place], starts[place + 1])
        order = orders[place]
        return _permuted(graph, part, [order.index(at) for at in range(len(order))])

    return _Growth(node, base, token + (stacks and token >= dim), tuple(grown), joined, viewed, are_views=False)


def _grow_alike(parts: Sequence[_Grown]) -> bool:
    """Whether all parts append as many tensors, of the same numbers of tokens."""
    sizes = [[shape_of(x)[part.dim] for x in part.new] for part in parts]
    return all(same_sizes(own, sizes[0]) for own in sizes)


def _joined_pieces(node: Node) -> tuple[list[Node], int, bool] | None:
    """The tensors that ``node`` joins, along which dimension, and whether they are stacked; None if it joins none."""
    if node.target is aten.cat.default:
        pieces, dim = arguments(node)
        if all(piece.target is aten.unsqueeze.default and arguments(piece)[1] == dim for piece in pieces):
            return [piece.args[0] for piece in pieces], dim, True
        return list(pieces), dim, False
    if node.target in RESHAPES and node.args[0].target is aten.cat.default:  # as ``stack`` is decomposed
        pieces, dim = arguments(node.args[0])
        shape = shape_of(pieces[0])
        alike = all(same_sizes(shape_of(piece), shape) for piece in pieces)
        if alike and same_sizes(shape_of(node), (*shape[:dim], len(pieces), *shape[dim:])):
            return list(pieces), dim, True
    return None


def _selected(node: Node, dim: int, start: int, *, drops: bool) -> tuple[Node, int] | None:
    """The tensor of which ``node`` takes the indices from ``start`` on, and their number; None for another node.

    With ``drops``, ``node`` takes one index and lacks the dimension ``dim``.
    """
    if not node.all_input_nodes:
        return None
    operand = node.all_input_nodes[0]
    base = operand.args[0] if isinstance(operand.meta.get("val"), (list, tuple)) else operand
    if not isinstance(base.meta.get("val"), torch.Tensor):
        return None
    identity = IndexMap.identity(shape_of(base))
    if dim >= len(identity.dims):
        return None
    size = 1 if drops else shape_of(node)[dim]
    expected = identity.sliced(dim, start, size) if isinstance(size, int) else None
    if expected is not None and drops:
        expected = expected.first_of(dim)
    is_selection = base is not node and expected is not None and follow(identity, node) == expected
    return (base, int(size)) if is_selection else None


def _of_view(node: Node) -> _Growth | None:
    """The growth of a view of a cache, whose result is viewed in the dimensions of the cache."""
    if node.target not in RESHAPES:
        return None
    part = _Grown.of(_copied(node.args[0]))
    old = None if part is None else _copied(part.old)
    if part is None or old is None or old.target not in RESHAPES:
        return None
    base = old.args[0]
    before, after, viewed_shape = shape_of(base), shape_of(node), shape_of(old)
    dim = next((at for at in range(len(before)) if _is_same_dim(before, at, viewed_shape, part.dim)), None)
    if dim is None or len(before) != len(after):
        return None
    outer, inner = before[:dim], before[dim + 1 :]
    if not same_sizes((*outer, *inner), (*after[:dim], *after[dim + 1 :])) or len(before) == len(viewed_shape):
        return None

    def joined(graph: Graph, new: Sequence[Node]) -> Node:
        return _shaped(graph, new[0], (*outer, shape_of(new[0])[part.dim], *inner))

    def viewed(graph: Graph, whole: Node, place: int) -> Node:
        return _shaped(graph, whole, shape_of(part.node))

    return _Growth(node, base, dim, (part,), joined, viewed, are_views=True)


def _is_same_dim(shape: Sequence[Any], dim: int, other: Sequence[Any], other_dim: int) -> bool:
    """Whether a reshape from ``shape`` to ``other`` keeps a dimension, and only regroups the others on either side."""
    pairs = (
        (shape[dim], other[other_dim]),
        (math.prod(shape[:dim]), math.prod(other[:other_dim])),
        (math.prod(shape[dim + 1 :]), math.prod(other[other_dim + 1 :])),
    )
    return all(statically_known_true(one == two) for one, two in pairs)


def _unpermuted(node: Node) -> tuple[Node, list[int]]:
    """The tensor that ``node`` permutes, and its dimension for each dimension of ``node``."""
    letters = ascii_lowercase[: len(shape_of(node))]
    tensor, axes, _ = unpermuted(node, letters)
    return tensor, [axes.index(letter) for letter in letters]


def _copied(node: Node) -> Node:
    """The tensor that ``node`` is a copy of."""
    while node.target in SAME_OPS:
        node = node.args[0]
    return node


# Replacement


def _replace(graph: Graph, growth: _Growth) -> bool:
    """Insert the growth of the whole, and let the graph read it. Return False if the graph must stay as it is.

    The whole exists once all new tokens are known. What reads a part earlier moves behind it, so no new tokens may
    depend on a part: then the parts grow one after the other, as those of layers do.
    """
    parts = growth.parts
    if not growth.are_views and any(may_leave(part.node) for part in parts):
        return False  # the caller may change a part, and the whole is a tensor of its own
    if any(user.target is aten.as_strided.default for part in parts for user in users_through_views(part.node)):
        return False  # it counts from the first element of the part's memory
    order = {node: place for place, node in enumerate(graph.nodes)}
    needed = [growth.base, *(x for part in parts for x in part.new)]
    last = max(needed, key=order.__getitem__)
    late = _computed_from([part.node for part in parts], order, order[last])
    if not late.keys().isdisjoint(needed) or any(_is_random(node) for node in late):
        return False
    with graph.inserting_before(behind_placeholders(last) if last.op == "placeholder" else last.next):
        new = [growth.joined(graph, values) for values in zip(*(part.new for part in parts), strict=True)]
        whole = insert_call(graph, aten.cat.default, [growth.base, *new], growth.dim)
        views = [growth.viewed(graph, whole, place) for place in range(len(parts))]
    for old, node in ((growth.node, whole), *((part.node, view) for part, view in zip(parts, views, strict=True))):
        node.meta = {**old.meta, "val": node.meta["val"]}
        old.replace_all_uses_with(node)
    for view in views:  # other views of a part in the dimensions of the whole are the whole
        for user in list(view.users):
            if growth.are_views and user.target in RESHAPES and same_sizes(shape_of(user), shape_of(whole)):
                user.replace_all_uses_with(whole)
    at = views[-1]
    for node in late:
        at.append(node)
        at = node
    return True


def _computed_from(nodes: Sequence[Node], order: dict[Node, int], end: int) -> dict[Node, None]:
    """The nodes before place ``end`` that are computed from ``nodes``, in the order of the graph."""
    found: dict[Node, None] = {}
    begin = min(order[node] for node in nodes)
    for node, place in order.items():
        if begin < place <= end and node not in nodes and any(x in found or x in nodes for x in node.all_input_nodes):
            found[node] = None
    return found


def _is_random(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _permuted(graph: Graph, node: Node, order: list[int]) -> Node:
    return node if order == sorted(order) else insert_call(graph, aten.permute.default, node, order)


def _shaped(graph: Graph, node: Node, shape: Sequence[Any]) -> Node:
    return insert_call(graph, aten.reshape.default, node, [size_node(graph, size) for size in shape])
