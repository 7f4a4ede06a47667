"""Follow the views between a cache and an attention operand.

Attention takes [batch, heads, tokens, head_dim]. Models make it from a cache by transposing, by casting, by reading the
first tokens, and by repeating heads: each head in place, as ``repeat_kv`` does with unsqueeze, expand, clone and view,
or all heads in turn. There are no patterns for such chains. Every dimension of every intermediate tensor is tracked as
a product of dimensions of the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import CACHE_AXES
from kvcompile.passes.graph.aten import CASTS, SAME_OPS, Size, view_chain, with_defaults
from kvcompile.passes.graph.names import operation, operations
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


SLOTS = -2
"""The axis of tokens that an index gathers, in any order and of any sequences."""


@dataclass(frozen=True)
class Factor:
    """A factor of a dimension: a cache dimension, a repetition or gathered tokens.

    Attributes:
        axis: the cache dimension, -1 for a repetition, or SLOTS for gathered tokens.
        size: number of elements.
        start: for a slice of a cache dimension, the index of its first element.
        half: if the cache dimension was divided in two, 0 for the slower half and 1 for the faster one.
    """

    axis: int
    size: Size
    start: Size | None = None
    half: int | None = None

    @property
    def is_one(self) -> bool:
        """Whether its size is 1 and it is no slice, so that it can be dropped."""
        return self.start is None and statically_known_true(self.size == 1)


@dataclass(frozen=True)
class Read:
    """How an attention operand reads a cache value.

    Attributes:
        root: the cache value that is read, of rank 4.
        chain: the views from ``root`` (excluded) to the operand (included). If the first is
            ``kvcompile::gather_slots``, ``root`` is a pool.
        axes: the order of the dimensions of ``root`` (:mod:`kvcompile.passes.graph.permutations`).
        num_tokens: number of tokens that are read, from the first on. For a pool, number of tokens per sequence.
        num_channels: number of channels that are read, from the first on. Keys are read with all channels.
        num_heads: number of heads that are read.
        num_sequences: number of sequences that are read. For a pool, the sequences of the query.
        first_head: the first head that is read.
        first_sequence: the first sequence that is read; None if all are.
        head_tiles: how often the operand repeats all heads in turn. Each head may be repeated in place as well.
        divides_batch: whether the batch of ``root``, which has one head, is divided into sequences and heads.
    """

    root: Node
    chain: tuple[Node, ...]
    axes: str
    num_tokens: Size
    num_channels: Size
    num_heads: int
    num_sequences: Size
    first_head: int = 0
    first_sequence: Size | None = None
    head_tiles: int = 1
    divides_batch: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it reads a pool, by slots."""
        return bool(self.chain) and self.chain[0].target is GATHER_SLOTS


def trace_read(operand: Node, stop: frozenset[Node], role: str) -> Read:
    """Find the cache value that ``operand``, a key or value of attention, reads, and how; raises Refusal."""
    root, chain = view_chain(operand, stop)
    if root.target is GATHER_SLOTS:
        root, chain = root.args[0], (root, *chain)
    shape = root.meta["val"].shape
    if len(shape) != 4:
        if root.target in (aten.index_put.default, aten.slice_scatter.default, aten.cat.default):
            detail = f"the cache is seen in {len(shape)} dimensions there"
            raise Refusal(Reason.unknown_write, role=role, op=operation(root), detail=detail)
        raise Refusal(Reason.unknown_read, role=role, op=f"a tensor of rank {len(shape)}")
    dims = [[Factor(axis, size)] for axis, size in enumerate(shape)]
    for node in chain:
        dims = _apply(node, dims, role)
    return _interpret(root, chain, dims, role)


def _apply(node: Node, dims: list[list[Factor]], role: str) -> list[list[Factor]]:
    """The dimensions of ``node``, a view, from the dimensions of its input."""
    target, args = node.target, node.args
    if target in SAME_OPS:
        return dims
    if target in CASTS:
        # Rounding to the compute dtype of attention is small beside the format's rounding. Rounding to integers is not.
        if node.meta["val"].dtype not in _COMPUTE_DTYPES:
            raise Refusal(Reason.unknown_read, role=role, op=f"a cast to {node.meta['val'].dtype}")
        return dims
    if target is GATHER_SLOTS:
        return [*([Factor(SLOTS, size)] for size in args[1].meta["val"].shape), *dims[2:]]
    if target is aten.permute.default:
        return [dims[axis] for axis in args[1]]
    if target is aten.transpose.int:
        order = list(range(len(dims)))
        order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
        return [dims[axis] for axis in order]
    if target is aten.unsqueeze.default:
        axis = args[1] % (len(dims) + 1)
        return [*dims[:axis], [], *dims[axis:]]
    if target is aten.slice.Tensor:
        return _slice(node, dims, role)
    if target is aten.expand.default:
        return _expand(node, dims)
    if target is aten.repeat.default:
        return _repeat(node, dims)
    return _regroup(node, dims, role)


def _slice(node: Node, dims: list[list[Factor]], role: str) -> list[list[Factor]]:
    _, axis, start, _, step = with_defaults(node, None, 0, None, None, 1)
    size, full = node.meta["val"].shape[axis], node.args[0].meta["val"].shape[axis]
    if statically_known_true(size == full):
        return dims
    if dims[axis] and all(factor.axis == SLOTS for factor in dims[axis]):
        return [*dims[:axis], [Factor(SLOTS, size)], *dims[axis + 1 :]]
    start = start.meta["val"] if isinstance(start, Node) else start or 0
    if isinstance(start, int) and isinstance(full, int) and start < 0:
        start = max(start + full, 0)
    if not statically_known_true(start >= 0) or step != 1 or len(dims[axis]) != 1:
        raise Refusal(Reason.unknown_read, role=role, op=operation(node))
    (factor,) = dims[axis]
    first = start if factor.start is None else start + factor.start
    return [*dims[:axis], [replace(factor, size=size, start=first)], *dims[axis + 1 :]]


def _expand(node: Node, dims: list[list[Factor]]) -> list[list[Factor]]:
    shape = node.meta["val"].shape
    dims = [[]] * (len(shape) - len(dims)) + dims
    old = node.args[0].meta["val"].shape
    old = [1] * (len(shape) - len(old)) + list(old)
    return [
        dim if statically_known_true(size == was) else [Factor(-1, size), *(one for one in dim if not one.is_one)]
        for dim, size, was in zip(dims, shape, old, strict=True)
    ]


def _repeat(node: Node, dims: list[list[Factor]]) -> list[list[Factor]]:
    counts = [count.meta["val"] if isinstance(count, Node) else count for count in node.args[1]]
    dims = [[]] * (len(counts) - len(dims)) + dims
    return [
        dim if statically_known_true(count == 1) else [Factor(-1, count), *dim]
        for dim, count in zip(dims, counts, strict=True)
    ]


def _regroup(node: Node, dims: list[list[Factor]], role: str) -> list[list[Factor]]:
    """A reshape: it groups the same factors, in the same order, into other dimensions.

    Gathered tokens may be divided into several dimensions, and every other factor into two.
    """
    factors = _merged([factor for dim in dims for factor in dim])
    sizes = list(node.meta["val"].shape)
    result: list[list[Factor]] = []
    while sizes:
        if factors and factors[0].axis == SLOTS and not statically_known_true(sizes[0] == 1):
            group, product = _divided(sizes, factors[0].size)
            fits = statically_known_true(product == factors.pop(0).size)
        elif factors and _is_divided(factors[0], sizes):
            axis, fits = factors.pop(0).axis, True
            group = [[Factor(axis, sizes.pop(0), half=half)] for half in range(2)]
        else:
            size = sizes.pop(0)
            members, product = _taken(factors, size)
            group, fits = [members], statically_known_true(product == size)
        if not fits:
            raise Refusal(Reason.unknown_read, role=role, op=operation(node))
        result += group
    return result


def _is_divided(factor: Factor, sizes: list[Size]) -> bool:
    """Whether the first two sizes divide a whole cache dimension."""
    is_whole = factor.axis >= 0 and factor.start is None and factor.half is None
    if not is_whole or len(sizes) < 2 or any(statically_known_true(size == 1) for size in sizes[:2]):
        return False
    return statically_known_true(sizes[0] * sizes[1] == factor.size)


def _merged(factors: list[Factor]) -> list[Factor]:
    """The factors other than 1. Neighbouring factors of gathered tokens, and the halves of a dimension, are merged."""
    merged: list[Factor] = []
    for factor in factors:
        if factor.is_one:
            continue
        are_halves = bool(merged) and (merged[-1].half, factor.half) == (0, 1) and factor.start is None
        if merged and factor.axis == merged[-1].axis and (factor.axis == SLOTS or are_halves):
            merged[-1] = Factor(factor.axis, merged[-1].size * factor.size)
        else:
            merged.append(factor)
    return merged


def _taken(factors: list[Factor], size: Size) -> tuple[list[Factor], Size]:
    """The first factors and their product; they are removed from the list until the product is ``size``."""
    taken: list[Factor] = []
    product: Size = 1
    if factors and statically_known_true(factors[0].size == size):  # also a slice of one
        return [factors.pop(0)], size
    while not statically_known_true(product == size) and factors:
        taken.append(factors.pop(0))
        product = product * taken[-1].size
    return taken, product


def _divided(sizes: list[Size], total: Size) -> tuple[list[list[Factor]], Size]:
    """Dimensions of gathered tokens, and their product; sizes are removed from the list until it is ``total``."""
    dims = [[Factor(SLOTS, sizes.pop(0))]]
    product = dims[0][0].size
    while not statically_known_true(product == total) and sizes:
        dims.append([Factor(SLOTS, sizes.pop(0))])
        product = product * dims[-1][0].size
    return dims, product


def _interpret(root: Node, chain: tuple[Node, ...], dims: list[list[Factor]], role: str) -> Read:
    shape = root.meta["val"].shape
    gathers = bool(chain) and chain[0].target is GATHER_SLOTS
    axes = _axes_of_root(dims, shape, gathers) if len(dims) == 4 else None
    if axes is None:
        _check_channels(root, dims, role)
        raise Refusal(Reason.unknown_read, role=role, op=operations(chain))
    _check_slices(dims, shape, axes, role)
    head_axis, token_axis = axes.index("h"), axes.index("t")
    num_tokens = next((factor.size for factor in dims[2] if factor.axis == token_axis), shape[token_axis])
    if gathers:
        num_tokens = chain[-1].meta["val"].shape[2]
    num_channels = next((factor.size for factor in dims[3] if factor.axis == 3), shape[3])
    divides_batch = _divides(dims, axes.index("b"))
    axis_of_heads = axes.index("b") if divides_batch else head_axis
    heads = next((factor for factor in dims[1] if factor.axis == axis_of_heads), Factor(head_axis, shape[head_axis]))
    has_one_head = not divides_batch and statically_known_true(shape[head_axis] == 1)
    turns = takewhile(lambda factor: factor.axis == -1, dims[1]) if not has_one_head else ()
    return Read(
        root,
        chain,
        axes,
        num_tokens,
        num_channels,
        num_heads=int(heads.size),
        num_sequences=chain[-1].meta["val"].shape[0] if chain else shape[axes.index("b")],
        first_head=0 if heads.start is None else int(heads.start),
        first_sequence=next((factor.start for factor in dims[0] if factor.axis == axes.index("b")), None),
        head_tiles=math.prod(int(factor.size) for factor in turns),
        divides_batch=divides_batch,
    )


def _axes_of_root(dims: list[list[Factor]], shape: torch.Size, gathers: bool) -> str | None:
    """The order of a cache whose view ``dims`` are [batch, heads, tokens, head_dim]; None if no order fits.

    Several orders may fit because of sizes of 1. Then the order is taken in which the view has the most dimensions of
    the cache in their place.
    """
    if gathers:
        in_place = _are(dims[1], 2, shape, repeated=True) and _are(dims[3], 3, shape)
        return "bthd" if in_place and {*_axes_in(dims[0]), *_axes_in(dims[2])} <= {SLOTS, -1} else None

    def fits(axes: str) -> bool:
        batch, heads, tokens, channels = (axes.index(axis) for axis in "bhtd")
        has_one_head = statically_known_true(shape[heads] == 1)
        return (
            (_are(dims[0], batch, shape) or (has_one_head and _divides(dims, batch)))
            and (_are(dims[1], heads, shape, repeated=True) or _divides(dims, batch))
            and (_are(dims[2], tokens, shape) or not _axes_in(dims[2]))
            and _are(dims[3], channels, shape)
        )

    def seen(axes: str) -> int:
        shown = zip("bhtd", dims, strict=True)
        return sum(any(factor.axis == axes.index(axis) for factor in dim) for axis, dim in shown)

    return max(filter(fits, CACHE_AXES), key=seen, default=None)


def _are(factors: list[Factor], axis: int, shape: torch.Size, *, repeated: bool = False) -> bool:
    """Whether a dimension is ``axis`` of the cache and nothing else, apart from repetitions if ``repeated``."""
    if any(factor.half is not None for factor in factors):
        return False
    found = [factor for factor in _axes_in(factors) if not (repeated and factor == -1)]
    return found == ([] if statically_known_true(shape[axis] == 1) else [axis])


def _divides(dims: list[list[Factor]], batch: int) -> bool:
    """Whether sequences and heads are the two halves of dimension ``batch`` of the cache. Heads may be repeated."""
    halves = [[factor for factor in dim if not factor.is_one] for dim in dims[:2]]
    halves[1] = [factor for factor in halves[1] if factor.axis != -1]
    return [[(factor.axis, factor.start, factor.half) for factor in half] for half in halves] == [
        [(batch, None, 0)],
        [(batch, None, 1)],
    ]


def _axes_in(factors: list[Factor]) -> list[int]:
    return [factor.axis for factor in factors if not factor.is_one]


def _check_channels(root: Node, dims: list[list[Factor]], role: str) -> None:
    """Raise Refusal if the last dimension of a cache is not its channels."""
    last = [[factor for factor in dim if factor.axis == 3 and not factor.is_one] for dim in dims]
    if any(factor.half is not None for dim in last for factor in dim):
        detail = "it holds several heads"
    elif any(last[:-1]):
        held = next(what for what, dim in zip(("sequences", "heads", "tokens"), last, strict=False) if dim)
        detail = f"it holds {held}"
    else:
        return
    raise Refusal(Reason.channels_not_last, role=role, shape=list(root.meta["val"].shape), detail=detail)


def _check_slices(dims: list[list[Factor]], shape: torch.Size, axes: str, role: str) -> None:
    """Raise Refusal for a slice other than of sequences, heads, the first tokens, or the first channels of values.

    The first channels of values give the first channels of the output. A score depends on all channels of its key.
    """
    for factor in (factor for dim in dims for factor in dim if factor.axis >= 0):
        axis, is_whole = axes[factor.axis], statically_known_true(factor.size == shape[factor.axis])
        if axis == "d" and role != "value" and not is_whole:
            raise Refusal(Reason.unknown_read, role=role, op="a slice of channels")
        if axis in "td" and factor.start is not None and not statically_known_true(factor.start == 0):
            what = "tokens" if axis == "t" else "channels"
            raise Refusal(Reason.unknown_read, role=role, op=f"a slice of {what} without the first")
