"""Analyse how a graph uses a *pool*: an input whose tokens lie in slots that any sequence may own.

A pool has one of three shapes:

- [num_slots, num_kv_heads, head_dim],
- [num_blocks, block_size, num_kv_heads, head_dim], which is the same memory: slot ``i`` is token ``i % block_size`` of
  block ``i // block_size``, and a graph may view one as the other,
- [num_blocks, num_kv_heads, block_size, head_dim], with heads before the tokens of a block.

A graph may also exchange the middle two axes. Its indices tell which of them are heads: they name blocks and tokens,
never heads.

A graph writes a pool by indices of slots (a slot mapping), or of blocks and tokens in blocks. Attention reads the
tokens that an index of slots or blocks (a block table) gathers. PagedAttention (Kwon et al., SOSP 2023) keeps its
caches in this form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES, size_along
from kvcompile.passes.graph.aten import RESHAPES, SAME_OPS, SIZE_OPS, same_sizes, shape_of
from kvcompile.passes.graph.names import user_name
from kvcompile.passes.graph.permutations import axes_after
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten


class NotAPool(Refusal):
    """Raised if an input is not a pool because of its use by ``user``."""

    def __init__(self, user: Node) -> None:
        super().__init__(Reason.gathered, detail=f"which is also used by {user_name(user)}")


@dataclass
class Pool:
    """How a graph uses a pool.

    Attributes:
        node: its placeholder.
        axes: the order of its dimensions (:mod:`kvcompile.passes.graph.permutations`).
        states: the nodes that hold the whole pool, each with the order of its dimensions. The placeholder is first, and
            each other state follows the state that it is made of.
        writes: the states that are ``index_put`` of slots.
        gathers: the nodes that an index gathers from a state.
        sizes: the nodes that ask for a size of a state.
        write_back: the ``copy_`` into ``node`` at the end of the graph, if the pool is written.
    """

    node: Node
    axes: str
    states: dict[Node, str] = field(default_factory=dict)
    writes: list[Node] = field(default_factory=list)
    gathers: list[Node] = field(default_factory=list)
    sizes: list[Node] = field(default_factory=list)
    write_back: Node | None = None

    @property
    def vector_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim). Both are constants of the model; int() guards on symbols, as intended."""
        shape = shape_of(self.node)
        return int(shape[self.axes.index("h")]), int(shape[-1])

    @property
    def num_slots(self) -> Any:
        shape = shape_of(self.node)
        return size_along(shape, self.axes, "n") * size_along(shape, self.axes, "t")


def analyse_pool(node: Node, axes: str | None = None) -> Pool | None:
    """Analyse how the graph of input ``node`` uses it.

    Args:
        node: a placeholder.
        axes: the order of its dimensions if it arrives packed.

    Returns:
        The pool; None if ``node`` has another rank than a pool, or if nothing gathers tokens from it.

    Raises:
        NotAPool: the graph uses it in another way than a pool.
    """
    value = node.meta.get("val")
    rank = value.dim() if isinstance(value, Tensor) else 0
    refusals = []
    for order in (axes,) if axes in BLOCK_AXES else (SLOT_AXES, *BLOCK_AXES):
        if len(order) == rank:
            try:
                return _read(Pool(node, order))
            except NotAPool as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    return None


def _read(pool: Pool) -> Pool | None:
    pool.states[pool.node] = pool.axes
    states, others = [pool.node], []
    for state in states:  # the list grows: a state follows the state that it is made of
        others += [user for user in state.users if not _read_use(pool, state, user)]
        states += [user for user in state.users if user in pool.states and user.args[0] is state]
    if pool.write_back is not None and pool.states.get(pool.write_back.args[1]) != pool.axes:
        others.append(pool.write_back)
    if others:
        raise NotAPool(others[0])
    return pool if pool.gathers else None


def _read_use(pool: Pool, state: Node, user: Node) -> bool:
    """Note how ``user`` uses a state of the pool; False if it is not a use of pools."""
    if user.target is aten.copy_.default:
        pool.write_back = user
        return user.args[0] is pool.node and (state is pool.node or state is user.args[1])
    if user.op == "output" or user.args[0] is not state:
        return False
    axes = pool.states[state]
    if user.target in SIZE_OPS:
        pool.sizes.append(user)
    elif user.target is aten.index.Tensor and has_slots(state, user.args[1], axes):
        pool.gathers.append(user)
    elif user.target is aten.index_put.default and _is_write(state, user, axes):
        pool.writes.append(user)
        pool.states[user] = axes
    elif (viewed := _axes_of_view(pool, axes, user)) is not None:
        pool.states[user] = viewed
    else:
        return False
    return True


def _is_write(state: Node, put: Node, axes: str) -> bool:
    accumulates = len(put.args) > 3 and put.args[3]
    return not accumulates and put.args[2] is not state and has_slots(state, put.args[1], axes)


def _axes_of_view(pool: Pool, axes: str, view: Node) -> str | None:
    """The order of ``view``, a view of a state in the order ``axes``; None if pools have no such view.

    A view may exchange the middle axes of blocks, or regroup slots to blocks and tokens or back.
    """
    if view.target in SAME_OPS:
        return axes
    permuted = axes_after(view, axes)
    if permuted != axes:
        return permuted if permuted in BLOCK_AXES else None
    shape = shape_of(view) if view.target in RESHAPES else ()
    if axes == BLOCK_AXES[1] or len(shape) not in (3, 4) or not same_sizes(shape[-2:], pool.vector_shape):
        return None
    return SLOT_AXES if len(shape) == 3 else BLOCK_AXES[0]


def has_slots(state: Node, indices: list[Node | None], axes: str) -> bool:
    """Whether ``indices`` of a state are integers that name slots, blocks, or blocks and tokens in blocks."""
    given = {place: index.meta["val"] for place, index in enumerate(indices) if index is not None}
    places, device = list(given), state.meta["val"].device
    integers = all(value.dtype in (torch.int64, torch.int32) and value.device == device for value in given.values())
    of_slots = [place for place, axis in enumerate(axes) if axis in "nt"]
    return bool(places) and places == of_slots[: len(places)] and integers
