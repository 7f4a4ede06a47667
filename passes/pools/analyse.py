"""Analyse how a graph uses a *pool*: an input whose tokens lie in slots that any sequence may own.

A pool has one of three shapes:

- [num_slots, num_kv_heads, head_dim],
- [num_blocks, block_size, num_kv_heads, head_dim], which is the same memory: slot ``i`` is token ``i % block_size`` of
  block ``i // block_size``, and a graph may view one as the other,
- [num_blocks, num_kv_heads, block_size, head_dim], with heads before the tokens of a block.

A graph may also exchange the middle two axes. Its indices tell which of them are heads: they name blocks and tokens,
never heads.

Indices of slots (a slot mapping), or of blocks and tokens in blocks, write a pool. Attention reads the tokens that an
index of slots or blocks (a block table) gathers. PagedAttention (Kwon et al., SOSP 2023) keeps its caches in this form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kvcompile.passes.graph.aten import RESHAPES, SAME_OPS, SIZE_OPS, same_sizes, shape_of
from kvcompile.passes.graph.names import user_name
from kvcompile.passes.graph.permutations import swaps_axes
from kvcompile.passes.refusal import Reason, Refusal

aten = torch.ops.aten


class NotAPool(Refusal):
    """Raised if an input is no pool because of its use by ``user``."""

    def __init__(self, user: Node) -> None:
        super().__init__(Reason.gathered, detail=f"which is also used by {user_name(user)}")


@dataclass
class Pool:
    """How a graph uses a pool.

    Attributes:
        node: its placeholder.
        heads_first: whether it is [num_blocks, num_kv_heads, block_size, head_dim].
        states: the nodes that hold the whole pool. The placeholder is first, and each follows the one it is made of.
        swapped: the states whose middle axes are exchanged.
        writes: the states that are ``index_put`` of slots.
        gathers: the nodes that an index gathers from a state.
        sizes: the nodes that ask for a size of a state.
        write_back: the ``copy_`` into ``node`` at the end of the graph, if the pool is written.
    """

    node: Node
    heads_first: bool
    states: list[Node] = field(default_factory=list)
    swapped: set[Node] = field(default_factory=set)
    writes: list[Node] = field(default_factory=list)
    gathers: list[Node] = field(default_factory=list)
    sizes: list[Node] = field(default_factory=list)
    write_back: Node | None = None

    def has_heads_first(self, state: Node) -> bool:
        """Whether a state has heads before the tokens of a block."""
        return self.heads_first != (state in self.swapped)

    @property
    def vector_shape(self) -> tuple[int, int]:
        """(num_kv_heads, head_dim). Both are constants of the model; int() guards on symbols, as intended."""
        shape = shape_of(self.node)
        return int(shape[1 if self.heads_first else -2]), int(shape[-1])

    @property
    def num_slots(self) -> Any:
        shape = shape_of(self.node)
        return shape[0] if len(shape) == 3 else shape[0] * shape[2 if self.heads_first else 1]


def analyse_pool(node: Node, heads_first: bool | None = None) -> Pool | None:
    """Analyse how the graph of input ``node`` uses it.

    Args:
        node: a placeholder.
        heads_first: whether its blocks hold heads before tokens. None tries both.

    Returns:
        The pool; None if ``node`` has another rank than a pool, or if nothing gathers tokens from it.

    Raises:
        NotAPool: the graph uses it in a way that no pool is used.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() not in (3, 4):
        return None
    if heads_first is None and value.dim() == 4:
        try:
            return _read(Pool(node, heads_first=False))
        except NotAPool as error:
            try:
                return _read(Pool(node, heads_first=True))
            except NotAPool:
                raise error from None
    return _read(Pool(node, bool(heads_first)))


def _read(pool: Pool) -> Pool | None:
    pool.states.append(pool.node)
    others = []
    for state in pool.states:  # the list grows: a state follows the one it is made of
        others += [user for user in state.users if not _read_use(pool, state, user)]
    if pool.write_back is not None and not _is_last_state(pool, pool.write_back.args[1]):
        others.append(pool.write_back)
    if others:
        raise NotAPool(others[0])
    return pool if pool.gathers else None


def _is_last_state(pool: Pool, node: Node) -> bool:
    return node in pool.states and node not in pool.swapped


def _read_use(pool: Pool, state: Node, user: Node) -> bool:
    """Note how ``user`` uses a state of the pool; False if no pool is used so."""
    if user.target is aten.copy_.default:
        pool.write_back = user
        return user.args[0] is pool.node and (state is pool.node or state is user.args[1])
    if user.op == "output" or user.args[0] is not state:
        return False
    heads_first = pool.has_heads_first(state)
    if user.target in SIZE_OPS:
        pool.sizes.append(user)
    elif user.target is aten.index.Tensor and has_slots(state, user.args[1], heads_first):
        pool.gathers.append(user)
    elif user.target is aten.index_put.default and _is_write(state, user, heads_first):
        pool.writes.append(user)
        _add_state(pool, user, state in pool.swapped)
    elif user.target in SAME_OPS or _is_view(pool, state, user):
        _add_state(pool, user, (state in pool.swapped) != swaps_axes(user))
    else:
        return False
    return True


def _add_state(pool: Pool, node: Node, is_swapped: bool) -> None:
    pool.states.append(node)
    if is_swapped:
        pool.swapped.add(node)


def _is_write(state: Node, put: Node, heads_first: bool) -> bool:
    accumulates = len(put.args) > 3 and put.args[3]
    return not accumulates and put.args[2] is not state and has_slots(state, put.args[1], heads_first)


def _is_view(pool: Pool, state: Node, view: Node) -> bool:
    """Whether ``view`` exchanges the middle axes, or regroups slots to blocks and tokens or back."""
    if len(shape_of(state)) == 4 and swaps_axes(view):
        return True
    shape = shape_of(view) if view.target in RESHAPES else ()
    if pool.has_heads_first(state) or len(shape) not in (3, 4):
        return False
    return same_sizes(shape[-2:], pool.vector_shape)


def has_slots(state: Node, indices: list[Node | None], heads_first: bool) -> bool:
    """Whether ``indices`` of a state are integers that name slots, blocks, or blocks and tokens in blocks."""
    given = {axis: index.meta["val"] for axis, index in enumerate(indices) if index is not None}
    axes, device = list(given), state.meta["val"].device
    integers = all(value.dtype in (torch.int64, torch.int32) and value.device == device for value in given.values())
    token_axes = [0] if len(shape_of(state)) == 3 else [0, 2] if heads_first else [0, 1]
    return bool(axes) and axes == token_axes[: len(axes)] and integers
