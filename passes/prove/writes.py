"""Recognise the ways in which models write a KV cache, after functionalisation.

Every recognised write gets one normal form: tokens ``x`` [batch, num_kv_heads, n, head_dim] go to integer ``positions``
([n], or [batch, n]) along the token axis, optionally only where ``valid``. The tokens have the dtype of the cache,
because an assignment rounds to it. A write whose result has another dtype is refused.

Matchers find each dimension by ``axes``, the order of the cache's dimensions. A cache of three dimensions lacks the
heads or the batch, and its tokens get that dimension with size 1.

====================================  ===========================================
in the model                          in the functional graph
====================================  ===========================================
``cache.index_copy_(2, pos, k)``      ``index_put(cache, [None, None, pos], k)``
``cache[:, :, pos] = k``              the same
``cache[arange(B), :, pos] = k``      ``index_put(cache, [iota, None, pos], k)``
``cache[arange(B)[:, None, None],``    ``index_put(cache, [view(iota), view(iota), pos], k)``
``arange(H)[:, None], pos] = k``
``cache[:, :, a:b] = k``, ``copy_``   ``slice_scatter(cache, copy(slice, k), ...)``
``cache[:, :, i] = k``                ``select_scatter(cache, copy(select, k), ...)``
``cache.scatter_(2, index, k)``       ``scatter.src(cache, 2, expand(pos), k)``
``cache.copy_(where(m, k, cache))``   ``where(m, k, cache)``
``torch.cat([cache, k], 2)``          ``cat([cache, k], 2)``
``cache[a:b, :, pos] = k``            one of the above on ``slice(cache, 0, a, b)``,
                                      put back by ``slice_scatter(cache, ..., 0)``
``cache[i, :, pos] = k[i]``           one of the above on ``select(cache, 0, i)``, for
                                      a sequence or the only head, put back by
                                      ``select_scatter(cache, ..., 0, i)``
====================================  ===========================================

Each of these writes may leave out tokens by a mask. Then ``where`` chooses between the cache after and before the
write, or between new vectors and the vectors that they would replace (:mod:`kvcompile.passes.prove.masked`).

Some writes move the tokens of the cache instead of writing new ones (:mod:`kvcompile.passes.prove.moves`).
Others reorder sequences (:mod:`kvcompile.passes.prove.reorders`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import heads_first, size_along
from kvcompile.passes.graph.aten import (
    arguments,
    computed_alike,
    dtype_of,
    same_sizes,
    shape_of,
    views_alike,
)
from kvcompile.passes.graph.cast_to_cache import converted
from kvcompile.passes.graph.constant_dims import first_along_constant, varying_shape
from kvcompile.passes.graph.index_map import IndexMap
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.graph.names import AXIS_NAMES, operation
from kvcompile.passes.graph.permutations import unpermuted
from kvcompile.passes.graph.sizes_from_data import has_unread_size
from kvcompile.passes.graph.states import is_later_state, kept_arm
from kvcompile.passes.prove.cache_write import CacheWrite, Form, Normalised, materialise
from kvcompile.passes.prove.indexed_axes import WrongIndex, form_of_indices
from kvcompile.passes.prove.masked import (
    Reads,
    chosen_write,
    kept_vectors,
    masked_write,
    place_of_read,
    place_of_tokens,
)
from kvcompile.passes.prove.moves import index_of_tokens, shift_of_tokens, slice_of_tokens
from kvcompile.passes.prove.positions import first_of_slice, num_tokens_of, wrapped
from kvcompile.passes.prove.reorders import match_reorder
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten


def match_write(node: Node, axes: str, role: str) -> CacheWrite | None:
    """Read ``node`` as a write along the tokens of a cache in the order ``axes``.

    Returns None if ``node`` is not a cache write. Raises Refusal for a cache write in a form that is not recognised.
    """
    matcher = _MATCHERS.get(node.target) if node.op == "call_function" else None
    write = _with_later_sizes(lambda: matcher(node, axes, role)) if matcher else None
    if write is not None and has_unread_size((node, *node.all_input_nodes, *write.own)):
        raise Refusal(Reason.size_from_data, role=role, op=operation(node))
    if write is not None and dtype_of(write.base) != dtype_of(node):
        raise _refuse(node, role, f"its result is {dtype_of(node)}, but the cache is {dtype_of(write.base)}")
    return write


def match_slice(node: Node, axes: str) -> CacheWrite | None:
    """Read ``node``, a slice or a copy of a slice, as a move: the tokens that it keeps move to the first positions.

    Returns None if it is not a slice of tokens.
    """
    return _with_later_sizes(lambda: slice_of_tokens(node, axes))


def _with_later_sizes(match: Callable[[], CacheWrite | None]) -> CacheWrite | None:
    """The write that ``match`` finds. It is matched again when its nodes are inserted.

    Checks after the first match may have made symbols constant, and the second match takes the sizes known by then.
    """
    write = match()

    def normalise(graph: Graph) -> Normalised:
        write = match()
        assert write is not None, "the same write as before"
        return write.normalise(graph)

    return write and replace(write, normalise=normalise)


MASK_DIFFERS = "its mask may differ between heads or channels of a token"


def _refuse(node: Node, role: str, detail: str) -> Refusal:
    return Refusal(Reason.unknown_write, role=role, op=operation(node), detail=detail)


def _whole(node: Node, axes: str, n: Any) -> list[Any]:
    """The shape of ``n`` tokens in the order of the cache that ``node`` updates."""
    shape = list(shape_of(node))
    shape[axes.index("t")] = n
    return shape


def _has_size_1(shape: Sequence[Any], axes: str) -> bool:
    """Whether heads and channels have size 1, so that a tensor of this shape has one number for each token."""
    return all(statically_known_true(size_along(shape, axes, axis) == 1) for axis in "hd")


def _write(
    node: Node,
    base: Node,
    form: str,
    axes: str,
    fn: Form,
    value: Node,
    *args: Any,
    own: tuple[Node, ...] = (),
    role: str = "",
    reads: Reads | None = None,
) -> CacheWrite:
    """The write whose normal form ``fn`` computes from ``value``, in the dtype of the cache, and ``args``.

    ``reads`` finds the vectors of the cache that ``value`` replaces. If a mask puts some of these vectors back, the
    result is a write of the other tokens.
    """
    masked = kept_vectors(value, reads, base) if reads is not None else None
    if masked is not None:
        if not masked.is_of_tokens(fn, args):
            raise _refuse(node, role, MASK_DIFFERS)
        return masked_write(node, base, form, axes, fn, masked, args, own)

    def normalise(graph: Graph) -> Normalised:
        return inline(graph, fn, converted(graph, value, node), *materialise(graph, args))

    return CacheWrite(node, base, form, axes, own, normalise)


def _match_index_put(node: Node, axes: str, role: str) -> CacheWrite:
    base, indices, value, accumulate = arguments(node)
    indices = _padded(indices, axes)
    if accumulate:
        raise _refuse(node, role, "it accumulates")
    given = {axis: index for axis, index in zip(axes, indices, strict=True) if index is not None}
    try:
        form, positions = form_of_indices(base, axes, given), given["t"]
    except WrongIndex as wrong:
        raise _refuse(node, role, str(wrong)) from None

    def reads(read: Node) -> IndexMap | None:
        only = _only_index(read) if len(given) == 1 else None
        if only is not None:
            dim, index = only
            return place_of_tokens(read, dim, base, axes) if computed_alike(index, positions) else None
        if read.target is not aten.index.Tensor:
            return None
        is_alike = computed_alike(_padded(read.args[1], axes), indices) and computed_alike(read.args[0], base)
        return IndexMap.identity(shape_of(read)) if is_alike else None

    name = "index_put per sequence" if "b" in given else "index_put"
    return _write(node, base, name, axes, form, value, *given.values(), role=role, reads=reads)


def _padded(indices: Sequence[Node | None], axes: str) -> list[Node | None]:
    """The index of every dimension, or None."""
    return [*indices, *[None] * (len(axes) - len(indices))]


def _only_index(read: Node) -> tuple[int, Node] | None:
    """The dimension and the index of a read by one index; None for another read."""
    if read.target is aten.index_select.default:
        _, dim, index = arguments(read)
        return (dim, index) if len(shape_of(index)) == 1 else None
    if read.target is not aten.index.Tensor:
        return None
    found = [(dim, index) for dim, index in enumerate(read.args[1]) if index is not None]
    return found[0] if len(found) == 1 else None


def _source(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """The new value in ``copy(slice(cache), value)``, and the nodes of that idiom that use the cache."""
    value = node.args[1]
    if value.target is aten.copy.default:
        return value.args[1], (value, value.args[0])
    return value, ()


def _match_slice_scatter(node: Node, axes: str, role: str) -> CacheWrite:
    base, part, axis, start, _, step = arguments(node)
    if axes[axis] == "b":
        return _match_some_sequences(node, axes, role)
    if axes[axis] != "t":
        raise _refuse(node, role, f"it writes some of the {AXIS_NAMES[axes[axis]]}")
    if step != 1:
        raise _refuse(node, role, "it writes tokens that are not neighbours")
    written, first_sequence = node, None
    own: tuple[Node, ...] = ()
    if part.target is aten.slice_scatter.default and axes[arguments(part)[2]] == "b" and _is_put_back(node, part):
        written, own, first_sequence = part, (part, part.args[0]), _first_sequence(part, axes, role)
    shift = shift_of_tokens(node, axes, *_source(node))
    if shift is not None:
        return shift
    value, read = _source(written)
    num_tokens = num_tokens_of(base, axes)

    def normalise(x: Tensor, first: Any, *shape: Any) -> tuple[Tensor, Tensor, None]:
        x = heads_first(x.expand(shape), axes)
        return x, wrapped(torch.arange(x.shape[2], device=x.device) + first, num_tokens), None

    def reads(read: Node) -> IndexMap | None:
        if read.target is not aten.slice.Tensor:
            return None
        (_, dim, first, _, step), (sliced, _, at, put_first, _, put_step) = arguments(read), arguments(written)
        placed = place_of_read(read, dim, axes[at], sliced, axes)
        fits = placed is not None and same_sizes(placed.base, shape_of(written.args[1]))
        return placed if fits and computed_alike([first, step], [put_first, put_step]) else None

    first, shape = first_of_slice(start, num_tokens), shape_of(written.args[1])
    own = (*own, *read)
    write = _write(node, base, "slice_scatter", axes, normalise, value, first, *shape, own=own, role=role, reads=reads)
    return write if first_sequence is None else _of_some_sequences(write, first_sequence)


def _match_some_sequences(node: Node, axes: str, role: str) -> CacheWrite:
    """A write to a slice of the batch that is put back."""
    write = _write_of_part(node, axes, role)
    if write is None or write.first_sequence is not None:
        raise _refuse(node, role, "it writes a slice of the batch that is not a write of its tokens")
    return _of_some_sequences(write, _first_sequence(node, axes, role))


def _write_of_part(scatter: Node, axes: str, role: str) -> CacheWrite | None:
    """The write of tokens to a part, in the order ``axes``, that ``scatter`` puts back; None if it is no such write."""
    base, part, *_ = arguments(scatter)
    write = match_write(part, axes, role)
    if write is None or not write.writes_tokens or not _is_put_back(scatter, part):
        return None
    return replace(write, node=scatter, base=base, own=(part, write.base, *write.own))


def _of_some_sequences(write: CacheWrite, first_sequence: Any) -> CacheWrite:
    return replace(write, form=f"{write.form} of some sequences", first_sequence=first_sequence)


_TAKES = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
"""How each operator that puts a part back takes this part."""


def _is_put_back(scatter: Node, part: Node) -> bool:
    """Whether ``scatter`` puts ``part``, a write to a slice or an index, back where it was taken."""
    base, _, *place = arguments(scatter)
    taken = part.args[0]
    if not isinstance(taken, Node) or taken.target is not _TAKES[scatter.target]:
        return False
    before, *taken_from = arguments(taken)
    return views_alike(before, base) and taken_from == place


def _first_sequence(scatter: Node, axes: str, role: str) -> Any:
    """The first index of a slice of the batch, an int or a node."""
    start, _, step = arguments(scatter)[3:]
    if step != 1:
        raise _refuse(scatter, role, "it writes sequences that are not neighbours")
    return _checked_sequence(scatter, start, shape_of(scatter)[axes.index("b")], role)


def _checked_sequence(scatter: Node, start: Any, num_sequences: Any, role: str) -> Any:
    """The number of the sequence ``start``, which may count from the end."""
    first = first_of_slice(start, num_sequences)
    if not statically_known_true((first.meta["val"] if isinstance(first, Node) else first) >= 0):
        raise _refuse(scatter, role, "the index of its first sequence may be negative")
    return first


def _match_select_scatter(node: Node, axes: str, role: str) -> CacheWrite:
    base, _, axis, index = arguments(node)
    if axes[axis] != "t":
        return _match_one_index(node, axes, role)
    value, own = _source(node)
    num_tokens = num_tokens_of(base, axes)
    shape = shape_of(node.args[1])

    def normalise(x: Tensor, position: Any) -> tuple[Tensor, Tensor, None]:
        x = x.expand(shape).unsqueeze(axes.index("t"))
        positions = torch.zeros(1, dtype=torch.int64, device=x.device) + position
        return heads_first(x, axes), wrapped(positions, num_tokens), None

    def reads(read: Node) -> IndexMap | None:
        if read.target is not aten.select.int or not computed_alike(arguments(read)[2], index):
            return None
        return place_of_tokens(read, arguments(read)[1], base, axes)

    return _write(node, base, "select_scatter", axes, normalise, value, index, own=own, role=role, reads=reads)


def _match_one_index(node: Node, axes: str, role: str) -> CacheWrite:
    """A write to one sequence, or to the only head, that is put back."""
    base, _, axis, index = arguments(node)
    size = shape_of(base)[axis]
    is_only = statically_known_true(size == 1)
    fits = len(axes) == 4 and (axes[axis] == "b" or (axes[axis] == "h" and is_only))
    write = _write_of_part(node, axes.replace(axes[axis], ""), role) if fits else None
    if write is None:
        raise _refuse(node, role, f"it writes one of the {AXIS_NAMES[axes[axis]]}")
    write = replace(write, axes=axes)
    return write if is_only else _of_some_sequences(write, _checked_sequence(node, index, size, role))


def _match_scatter(node: Node, axes: str, role: str) -> CacheWrite:
    base, axis, index, value = arguments(node)
    if axes[axis] != "t":
        raise _refuse(node, role, f"it scatters along the {AXIS_NAMES[axes[axis]]}, and not along the tokens")
    n = num_tokens_of(index, axes)
    shape = varying_shape(index)
    whole = _whole(node, axes, n)
    if not _has_size_1(shape, axes) or not same_sizes(shape_of(index), whole):
        raise _refuse(node, role, "its index may differ between heads or channels of a token")
    num_tokens = num_tokens_of(base, axes)
    batch = size_along(shape, axes, "b")
    all_batches = (1, size_along(whole, axes, "b"))
    if not statically_known_true(size_along(shape, axes, "t") == n) or not any(
        statically_known_true(batch == size) for size in all_batches
    ):
        raise _refuse(node, role, "its index repeats positions")

    def normalise(x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, None]:
        pos = first_along_constant(pos, shape)
        pos = pos.reshape(-1) if batch == 1 else heads_first(pos, axes).flatten(1)
        return heads_first(x, axes), wrapped(pos, num_tokens), None

    if not same_sizes(shape_of(value), whole):
        raise _refuse(node, role, "its source has another shape than its index")

    def reads(read: Node) -> IndexMap | None:
        is_alike = read.target is aten.gather.default and computed_alike(arguments(read)[:3], [base, axis, index])
        return IndexMap.identity(shape_of(read)) if is_alike else None

    return _write(node, base, "scatter", axes, normalise, value, index, role=role, reads=reads)


def _match_where(node: Node, axes: str, role: str) -> CacheWrite | None:
    mask, *arms = node.args
    if not all(isinstance(arm, Node) for arm in arms) or len(shape_of(node)) != len(axes):
        return None
    base = kept_arm(node)
    takes_new = base is arms[1]
    value = arms[0] if takes_new else arms[1]
    if tuple(shape_of(base)) != tuple(shape_of(node)):
        return None
    varying = varying_shape(mask)
    shape = [1] * (len(axes) - len(varying)) + varying
    if not _has_size_1(shape, axes):
        raise _refuse(node, role, MASK_DIFFERS)
    num_tokens = num_tokens_of(base, axes)

    def of_tokens(m: Tensor) -> Tensor:
        """Whether each token is written, [batch or 1, tokens or 1]."""
        m = heads_first(first_along_constant(m, varying).reshape(shape), axes)[:, 0, :, 0].bool()
        return m if takes_new else ~m

    if is_later_state(value, base):
        return _match_choice(node, axes, role, value, base, of_tokens)

    def normalise(x: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = heads_first(x.expand(_whole(node, axes, num_tokens)), axes)
        valid = of_tokens(m).expand(x.shape[0], num_tokens)
        positions = torch.arange(num_tokens, device=x.device).expand(x.shape[0], num_tokens)
        return x, positions, valid

    return _write(node, base, "where", axes, normalise, value, mask)


def _match_choice(
    node: Node, axes: str, role: str, later: Node, base: Node, of_tokens: Callable[[Tensor], Tensor]
) -> CacheWrite:
    """A choice between a cache and its state after a write, as a write of the tokens that a mask chooses."""
    inner, order, own = unpermuted(later, axes)
    write = match_write(inner, order, role)
    before, _, views = unpermuted(write.base, order) if write is not None else (later, "", ())
    if write is None or before is not unpermuted(base, axes)[0]:
        raise _refuse(node, role, "it chooses between states of the cache that are several writes apart")
    if not write.writes_tokens or write.form == "cat":
        raise _refuse(node, role, f"its mask applies to {operation(inner)}, which moves or appends vectors")
    own = (*own, inner, *write.own, *views)
    return chosen_write(node, base, write, of_tokens, num_tokens_of(base, axes), own)


def _match_cat(node: Node, axes: str, role: str) -> CacheWrite | None:
    tensors, axis = arguments(node)
    if len(shape_of(node)) != len(axes) or axes[axis] != "t":
        return None
    if len(tensors) != 2:
        raise _refuse(node, role, f"it concatenates {len(tensors)} tensors")
    base, value = tensors

    def normalise(x: Tensor, length: Any) -> tuple[Tensor, Tensor, None]:
        x = heads_first(x, axes)
        return x, torch.arange(x.shape[2], device=x.device) + length, None

    return _write(node, base, "cat", axes, normalise, value, num_tokens_of(base, axes))


def _match_index(node: Node, axes: str, role: str) -> CacheWrite | None:
    """Sequences of a cache, or its tokens in another order; None for another index."""
    return match_reorder(node, axes) or index_of_tokens(node, axes)


def returned_rows(node: Node, axes: str) -> CacheWrite:
    """New keys or values that the graph returns, as the first write of a growing cache."""

    def normalise(x: Tensor) -> tuple[Tensor, Tensor, None]:
        x = heads_first(x, axes)
        return x, torch.arange(x.shape[2], device=x.device), None

    return _write(node, node, "returned", axes, normalise, node)


_MATCHERS: dict[Any, Callable[[Node, str, str], CacheWrite | None]] = {
    aten.index_put.default: _match_index_put,
    aten.slice_scatter.default: _match_slice_scatter,
    aten.select_scatter.default: _match_select_scatter,
    aten.scatter.src: _match_scatter,
    aten.where.self: _match_where,
    aten.cat.default: _match_cat,
    aten.index.Tensor: _match_index,
    aten.index_select.default: lambda node, axes, role: match_reorder(node, axes),
    aten.gather.default: lambda node, axes, role: match_reorder(node, axes),
}
