"""Read what a graph does with a *pool*: an input whose tokens lie in slots that any sequence may own.

A pool is [num_slots, num_kv_heads, head_dim], or [num_blocks, block_size, num_kv_heads, head_dim], which is the same
memory: slot ``i`` is token ``i % block_size`` of block ``i // block_size``, and a graph may view one as the other. It
is written by indices of slots (a slot mapping) or of blocks and tokens in them, and attention reads what an index of
slots or blocks (a block table) gathers. PagedAttention (Kwon et al., SOSP 2023) keeps its caches so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.match_write import shape_of
from kvcompile.passes.part_rules import UsedAsWholeError
from kvcompile.passes.tensor_axes import same_sizes
from kvcompile.passes.trace_read import SAME_OPS, SIZE_OPS

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)


@dataclass
class Pool:
    """What a graph does with a pool.

    Attributes:
        node: its placeholder.
        states: the nodes that hold all of it, the placeholder first, each behind the one that it is made of.
        writes: those of them that are ``index_put`` of slots.
        gathers: the nodes that hold what an index has gathered from a state.
        sizes: the nodes that ask for a size of a state.
        write_back: the ``copy_`` into ``node`` at the end of the graph, if it is written.
    """

    node: Node
    states: list[Node] = field(default_factory=list)
    writes: list[Node] = field(default_factory=list)
    gathers: list[Node] = field(default_factory=list)
    sizes: list[Node] = field(default_factory=list)
    write_back: Node | None = None

    @property
    def num_slots(self) -> Any:
        return slots_in(shape_of(self.node))

    @property
    def vector_shape(self) -> tuple[int, int]:
        """num_kv_heads and head_dim, constants of the model: guarding on them, where sizes are symbols, is wanted."""
        num_kv_heads, head_dim = shape_of(self.node)[-2:]
        return int(num_kv_heads), int(head_dim)


def slots_in(shape: torch.Size) -> Any:
    """How many slots a pool of this shape has."""
    return shape[0] if len(shape) == 3 else shape[0] * shape[1]


def read_pool(node: Node) -> Pool | None:
    """Read what the graph of input ``node`` does with it, if it is a pool.

    Returns:
        None if nothing gathers tokens from it, or if it has not the dimensions of a pool.

    Raises:
        UsedAsWholeError: it has, and is used in another way than a pool is.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() not in (3, 4) or not _is_contiguous(value):
        return None
    pool = Pool(node, [node])
    others = []
    for state in pool.states:  # grows: a state comes behind the one that it is made of
        others += [user for user in state.users if not _read_use(pool, state, user)]
    if pool.write_back is not None and pool.write_back.args[1] not in pool.states:
        others.append(pool.write_back)
    if others:
        raise UsedAsWholeError(others[0])
    return pool if pool.gathers else None


def _is_contiguous(value: Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return False
        expected = expected * size
    return True


def _read_use(pool: Pool, state: Node, user: Node) -> bool:
    """Note what ``user`` does with a state of the pool; False if that is not what is done with pools."""
    if user.target is aten.copy_.default:
        pool.write_back = user
        return user.args[0] is pool.node and (state is pool.node or state is user.args[1])
    if user.op == "output" or user.args[0] is not state:
        return False
    if user.target in SIZE_OPS:
        pool.sizes.append(user)
    elif user.target in SAME_OPS or (user.target in _VIEWS and _is_pool(pool, user)):
        pool.states.append(user)
    elif user.target is aten.index_put.default and _is_write(state, user):
        pool.states.append(user)
        pool.writes.append(user)
    elif user.target is aten.index.Tensor and has_slots(state, user.args[1]):
        pool.gathers.append(user)
    else:
        return False
    return True


def _is_write(state: Node, put: Node) -> bool:
    accumulates = len(put.args) > 3 and put.args[3]
    return not accumulates and put.args[2] is not state and has_slots(state, put.args[1])


def _is_pool(pool: Pool, view: Node) -> bool:
    """Whether a view has slots, or blocks and tokens, before heads and channels."""
    shape = shape_of(view)
    return len(shape) in (3, 4) and same_sizes(shape[-2:], pool.vector_shape)


def has_slots(state: Node, indices: list[Node | None]) -> bool:
    """Whether ``indices`` of a state are integers that name slots, blocks, or blocks and tokens in them."""
    given = [index for index in indices if index is not None]
    first = given == list(indices[: len(given)])
    values, device = [index.meta["val"] for index in given], state.meta["val"].device
    integers = all(value.dtype in (torch.int64, torch.int32) and value.device == device for value in values)
    return bool(given) and first and integers and len(given) <= len(shape_of(state)) - 2
