"""Follow the views between a cache and an attention operand.

Attention takes [batch, heads, tokens, head_dim]. Models make it from a cache by transposing, by casting, by reading the
first tokens, and by repeating heads: each head in place, as ``repeat_kv`` does with unsqueeze, expand, clone and view,
or all heads in turn. The code matches no patterns of such chains. The map of the operand
(:mod:`kvcompile.passes.graph.index_map`) tells which dimensions of the cache its dimensions are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import (
    CACHE_AXES,
    TRANSPOSED_AXES,
    TRANSPOSED_RANK_3_AXES,
    rank_3_axes,
    rank_4_axes,
    size_along,
)
from kvcompile.passes.graph.aten import CASTS, WRITE_OPS, Size, arguments, shape_of, view_chain
from kvcompile.passes.graph.index_map import Factor, IndexMap, follow
from kvcompile.passes.graph.names import cache_name, operation, operations
from kvcompile.passes.graph.pool_ops import GATHER_SLOTS
from kvcompile.passes.graph.sizes_from_data import has_unread_size
from kvcompile.passes.graph.states import first_state
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten

_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


_MISSING = 2
"""The axis that a cache of three dimensions lacks, in a base of four dimensions."""

_AXES_BY_RANK = {
    4: (*CACHE_AXES, *TRANSPOSED_AXES),
    3: (*CACHE_AXES, *map(rank_4_axes, TRANSPOSED_RANK_3_AXES)),
}
"""The orders that a base of four dimensions may have, by the rank of the cache."""


_OTHER_NAME = str.maketrans("bh", "hb")


_SLOTS = 1
"""The axis of gathered tokens. A pool is [1, num_slots, num_kv_heads, head_dim]."""


@dataclass(frozen=True)
class Read:
    """How an attention operand reads a cache value.

    Attributes:
        root: the cache value that is read, of rank 4 or 3.
        chain: the views from ``root`` (excluded) to the operand (included). If the first is
            ``kvcompile::gather_slots``, ``root`` is a pool.
        axes: the order of the dimensions of ``root`` (:mod:`kvcompile.passes.graph.permutations`).
        num_tokens: number of tokens that are read, from ``first_token`` on. For a pool, number of tokens per sequence.
        num_channels: number of channels that are read, from the first on. Keys are read with all channels.
        num_heads: number of heads that are read.
        num_sequences: number of sequences that are read. For a pool, the sequences of the query.
        first_token: the first token that is read.
        first_head: the first head that is read.
        first_sequence: the first sequence that is read; None if all are.
        head_tiles: how often the operand repeats all heads in turn. Each head may be repeated in place as well.
        regroups_heads: whether ``root``, which has one sequence or one head, is divided otherwise into sequences and
            heads. ``num_sequences`` and ``num_heads`` are then those of the division.
    """

    root: Node
    chain: tuple[Node, ...]
    axes: str
    num_tokens: Size
    num_channels: Size
    num_heads: int
    num_sequences: Size
    first_token: Size = 0
    first_head: int = 0
    first_sequence: Size | None = None
    head_tiles: int = 1
    regroups_heads: bool = False

    @property
    def gathers(self) -> bool:
        """Whether it reads a pool, by slots."""
        return bool(self.chain) and self.chain[0].target is GATHER_SLOTS

    @property
    def exchanged(self) -> Read | None:
        """The same read with the other name for sequences and for heads; None if this names other bytes.

        Packed data has a place for each sequence, and in it for each head. If there is one sequence or one head, the
        places of the others have the same numbers under both names. A cache of three dimensions always has one of
        either. If the read has all places, their division into sequences and heads does not depend on the names.
        """
        sizes = [size_along(shape_of(self.root), self.axes, axis) for axis in "bh"]
        is_one = [statically_known_true(size == 1) for size in sizes]
        reads_all = statically_known_true(self.num_sequences * self.num_heads == sizes[0] * sizes[1])
        if self.gathers or not any(is_one) or not reads_all:
            return None
        return replace(self, axes=self.axes.translate(_OTHER_NAME), regroups_heads=not all(is_one))


def trace_read(operand: Node, stop: frozenset[Node], role: str) -> Read:
    """Find the cache value that ``operand``, a key or value of attention, reads, and how; raises Refusal."""
    root, chain = view_chain(operand, stop)
    gathers = root.target is GATHER_SLOTS
    if gathers:
        root, chain = root.args[0], (root, *chain)
    _check_rank(root, role)
    index_map = _map_of_root(root)
    for node in chain:
        _check_cast(node, role)
        if has_unread_size([node]):
            raise Refusal(Reason.size_from_data, role=role, op=operation(node))
        viewed = _view_of_gathered(index_map, node) if gathers else follow(index_map, node)
        if viewed is None:
            raise Refusal(Reason.unknown_read, role=role, op=operation(node))
        index_map = viewed
    return _interpret(root, chain, index_map, role)


def _check_rank(root: Node, role: str) -> None:
    """Raise Refusal if ``root`` has another rank than a cache, or another rank than the input whose view it writes."""
    rank, first = len(shape_of(root)), first_state(root)
    is_written_view = root.target in WRITE_OPS and first.op == "placeholder" and len(shape_of(first)) != rank
    if rank == 4 or (rank == 3 and not is_written_view):
        return
    if root.target in (aten.index_put.default, aten.slice_scatter.default, aten.cat.default):
        detail = f"it writes a view of the cache with {rank} dimensions"
        raise Refusal(Reason.unknown_write, role=role, op=operation(root), detail=detail)
    raise Refusal(Reason.unknown_read, role=role, op=f"a tensor of rank {rank}")


def _map_of_root(root: Node) -> IndexMap:
    """The map of a cache value, in a base of four dimensions.

    A cache of three dimensions lacks the dimension of its only head, or of its only sequence. In the base, the missing
    dimension has size 1 and lies before the last.
    """
    shape = shape_of(root)
    if len(shape) == 4:
        return IndexMap.identity(shape)
    return IndexMap.identity((*shape[:-1], 1, shape[-1])).first_of(_MISSING)


def _check_cast(node: Node, role: str) -> None:
    # Rounding to the compute dtype of attention is small beside the format's rounding. Rounding to integers is not.
    if node.target in CASTS and node.meta["val"].dtype not in _COMPUTE_DTYPES:
        raise Refusal(Reason.unknown_read, role=role, op=f"a cast to {node.meta['val'].dtype}")


def _view_of_gathered(index_map: IndexMap, node: Node) -> IndexMap | None:
    """The map after a view of gathered tokens, which are numbered anew in the order of the view.

    The same views are applied to the slots of the tokens (:mod:`kvcompile.passes.rewrite.operand_slots`), so only the
    places of heads and channels matter.
    """
    dims = index_map.dims
    if node.target is GATHER_SLOTS:
        slots = [(Factor(_SLOTS, size),) for size in shape_of(node.args[1])]
        return _numbered_anew(replace(index_map, dims=(*slots, *dims[2:])))
    dim = arguments(node)[1] if node.target is aten.slice.Tensor else None
    if dim is not None and {factor.axis for factor in dims[dim]} == {_SLOTS}:
        part = (Factor(_SLOTS, shape_of(node)[dim]),)
        return _numbered_anew(replace(index_map, dims=(*dims[:dim], part, *dims[dim + 1 :])))
    viewed = follow(index_map, node)
    return viewed and _numbered_anew(viewed)


def _numbered_anew(index_map: IndexMap) -> IndexMap:
    """The map with gathered tokens numbered in the order of the view."""
    count: Size = 1
    dims: list[tuple[Factor, ...]] = []
    for dim in reversed(index_map.dims):
        factors: list[Factor] = []
        for factor in reversed(dim):
            if factor.axis != _SLOTS:
                factors.insert(0, factor)
            elif not statically_known_true(factor.size == 1):
                factors.insert(0, Factor(_SLOTS, factor.size, count))
                count = count * factor.size
        dims.insert(0, tuple(factors))
    sequence, _, *vector = index_map.base
    return IndexMap((sequence, count, *vector), (0, 0, *index_map.starts[2:]), tuple(dims))


def _interpret(root: Node, chain: tuple[Node, ...], index_map: IndexMap, role: str) -> Read:
    gathers = bool(chain) and chain[0].target is GATHER_SLOTS
    dims = [[factor for factor in dim if not index_map.is_one(factor)] for dim in index_map.dims]
    rank = len(shape_of(root))
    axes = _axes_of_root(dims, index_map, gathers, rank) if len(dims) == 4 else None
    if axes is None:
        _check_channels(root, dims, role)
        raise Refusal(
            Reason.unknown_read, role=role, op=operations(chain) if chain else f"a tensor of rank {len(dims)}"
        )
    batch_axis, head_axis, token_axis, channel_axis = (axes.index(axis) for axis in "bhtd")
    if rank == 3 and statically_known_true(index_map.base[token_axis] == 1):  # any dimension may be the tokens
        raise Refusal(Reason.unknown_read, role=role, op="a tensor of rank 3 with a single token")
    _check_slices(index_map, channel_axis, role)
    divides_batch = _divides(dims, index_map, batch_axis)
    axis_of_heads = batch_axis if divides_batch else head_axis
    has_one_head = not divides_batch and statically_known_true(index_map.base[head_axis] == 1)
    repeats = takewhile(lambda factor: factor.axis is None, dims[1]) if not has_one_head else ()
    takes_all = divides_batch or statically_known_true(_size(dims[0], batch_axis) == index_map.base[batch_axis])
    return Read(
        root,
        chain,
        axes if rank == 4 else rank_3_axes(axes),
        num_tokens=shape_of(chain[-1])[2] if gathers else _size(dims[2], token_axis),
        num_channels=_size(dims[3], channel_axis),
        num_heads=int(_size(dims[1], axis_of_heads)),
        num_sequences=shape_of(chain[-1])[0] if chain else index_map.base[batch_axis],
        first_token=index_map.starts[token_axis],
        first_head=int(index_map.starts[axis_of_heads]),
        first_sequence=None if takes_all else index_map.starts[batch_axis],
        head_tiles=math.prod(int(factor.size) for factor in repeats),
        regroups_heads=divides_batch,
    )


def _size(dim: list[Factor], axis: int) -> Size:
    """The number of elements along ``axis`` in a dimension."""
    return next((factor.size for factor in dim if factor.axis == axis), 1)


def _axes_of_root(dims: list[list[Factor]], index_map: IndexMap, gathers: bool, rank: int) -> str | None:
    """The order of a cache whose view ``dims`` are [batch, heads, tokens, head_dim]; None if no order fits.

    Several orders may fit because of sizes of 1. The result is the order that has the most dimensions of the cache in
    their place in the view.
    """
    if gathers:
        in_place = _are(dims[1], 2, index_map, repeated=True) and _are(dims[3], 3, index_map)
        return "bthd" if in_place and {factor.axis for factor in (*dims[0], *dims[2])} <= {_SLOTS, None} else None

    def fits(axes: str) -> bool:
        batch, heads, tokens, channels = (axes.index(axis) for axis in "bhtd")
        divides = _divides(dims, index_map, batch) and statically_known_true(index_map.base[heads] == 1)
        return (
            (divides or (_are(dims[0], batch, index_map) and _are(dims[1], heads, index_map, repeated=True)))
            and _are(dims[2], tokens, index_map)
            and _are(dims[3], channels, index_map)
        )

    def seen(axes: str) -> int:
        shown = zip("bhtd", index_map.dims, strict=True)
        return sum(any(factor.axis == axes.index(axis) for factor in dim) for axis, dim in shown)

    return max(filter(fits, _AXES_BY_RANK[rank]), key=seen, default=None)


def _are(dim: list[Factor], axis: int, index_map: IndexMap, *, repeated: bool = False) -> bool:
    """Whether a dimension holds neighbours along ``axis`` only. ``repeated`` allows repetitions, too.

    A dimension without factors holds one index of the axis, such as the only sequence of ``cache[:1]``.
    """
    found = [factor for factor in dim if not (repeated and factor.axis is None)]
    if statically_known_true(index_map.base[axis] == 1):
        return not found
    if not found:
        return _axes_of_one_index(index_map) == [axis]
    return [factor.axis for factor in found] == [axis] and statically_known_true(found[0].step == 1)


def _axes_of_one_index(index_map: IndexMap) -> list[int]:
    """The axes of several elements of which the view has one. With two such axes, an order would be a guess."""
    shown = index_map.axes()
    return [
        axis for axis, size in enumerate(index_map.base) if axis not in shown and not statically_known_true(size == 1)
    ]


def _divides(dims: list[list[Factor]], index_map: IndexMap, batch: int) -> bool:
    """Whether sequences and heads together are dimension ``batch`` of the cache. Heads may be repeated."""
    parts = [*dims[0], *(factor for factor in dims[1] if factor.axis is not None)]
    if [factor.axis for factor in dims[0]] != [batch] or [factor.axis for factor in parts] != [batch, batch]:
        return False
    sequences, heads = parts
    return (
        statically_known_true(index_map.starts[batch] == 0)
        and statically_known_true(sequences.size * heads.size == index_map.base[batch])
        and statically_known_true(sequences.step == heads.size)
        and statically_known_true(heads.step == 1)
    )


def _check_channels(root: Node, dims: list[list[Factor]], role: str) -> None:
    """Raise Refusal if a cache ends neither in its channels nor in its channels and tokens."""
    last = [[factor for factor in dim if factor.axis == 3] for dim in dims]
    is_transposed = bool(last[2]) and any(factor.axis == 2 for factor in dims[-1])
    if sum(map(len, last)) > 1:
        held = "several heads"
    elif any(last[:-1]) and not is_transposed:
        names = zip(("sequences", "heads", "tokens"), last, strict=False)
        held = next((name for name, dim in names if dim), "another dimension")
    else:
        return
    raise channels_not_last(root, role, held)


def channels_not_last(state: Node, role: str, held: str) -> Refusal:
    """The refusal of a cache with the value ``state``, whose last dimension holds ``held``."""
    detail = f"its last dimension holds {held}"
    shape = list(shape_of(state))
    return Refusal(Reason.channels_not_last, role=role, source=cache_name(state), shape=shape, detail=detail)


def _check_slices(index_map: IndexMap, channels: int, role: str) -> None:
    """Raise Refusal for a slice of channels other than the first channels of values.

    The first channels of values give the first channels of the output. A score depends on all channels of its key.
    """
    num_read = _size(index_map.factors(channels), channels)
    if role != "value" and not statically_known_true(num_read == index_map.base[channels]):
        raise Refusal(Reason.unknown_read, role=role, op="a slice of channels")
    if not statically_known_true(index_map.starts[channels] == 0):
        raise Refusal(Reason.unknown_read, role=role, op="a slice of channels without the first")
