"""The order of the dimensions of a cache, as a text with one letter per dimension.

``b`` is the sequence of the batch, ``h`` the KV head, ``t`` the token and ``d`` the channel: ``bhtd`` is [batch,
num_kv_heads, tokens, head_dim], ``tbhd`` is [tokens, batch, num_kv_heads, head_dim]. Keys may be kept transposed:
``bhdt`` is [batch, num_kv_heads, head_dim, tokens]. Heads and their channels may share a dimension ``m``: ``btm`` is
[batch, tokens, num_kv_heads * head_dim]. A pool of slots that any sequence may own is ``thd``. A pool whose slots lie
in blocks, ``n``, is ``nthd`` or ``nhtd``. A stack is a tensor with further dimensions; an index for each of them
selects a part, which is a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

CACHE_AXES = ("bhtd", "bthd", "tbhd", "thbd", "hbtd", "htbd")
"""The orders of a cache whose channels are last, the likeliest first: several orders fit if sizes are 1."""


TRANSPOSED_AXES = ("bhdt", "hbdt")
"""The orders of a cache whose tokens are last and follow its channels."""


RANK_3_AXES = ("btd", "tbd", "htd", "thd")
"""The orders of a cache without the dimension of its only head, or of its only sequence. Its channels are last."""


TRANSPOSED_RANK_3_AXES = ("bdt", "hdt")
"""The orders of a cache of three dimensions whose tokens are last."""


MERGED_AXES = ("btm", "tbm")
"""The orders of a cache whose last dimension is heads and channels together."""


WHOLE_AXES = (*CACHE_AXES, *TRANSPOSED_AXES, *RANK_3_AXES, *TRANSPOSED_RANK_3_AXES, *MERGED_AXES)
"""All orders of a cache. A pool of slots [num_slots, heads, head_dim] is one sequence."""


STORED_AXES = "bhtd"
"""The order of the values in packed data: sequence of the batch, KV head, token, channel."""


SLOT_AXES = "thd"


BLOCK_AXES = ("nthd", "nhtd")


def heads_first(x: Tensor, axes: str) -> Tensor:
    """A view [batch, heads, tokens, channels] of a tensor in the order ``axes``, which has four or three letters."""
    if len(axes) == 3:
        x, axes = x.unsqueeze(-2), rank_4_axes(axes)
    return x if axes == "bhtd" else x.permute([axes.index(axis) for axis in "bhtd"])


def in_order(x: Tensor, axes: str) -> Tensor:
    """Inverse of :func:`heads_first`."""
    if len(axes) == 3:
        return in_order(x, rank_4_axes(axes)).squeeze(-2)
    return x if axes == "bhtd" else x.permute(["bhtd".index(axis) for axis in axes])


def divided_axes(axes: str) -> str:
    """The order in which heads and channels have a dimension each."""
    return axes.replace("m", "hd")


def merged_axes(axes: str) -> str:
    """Inverse of :func:`divided_axes` for an order in which channels follow their head."""
    return axes.replace("hd", "m")


def sizes_by_axis(shape: Sequence[Any], axes: str, head_dim: int) -> dict[str, Any] | None:
    """The sizes along the dimensions of :func:`divided_axes`; None if ``shape`` is not a cache of this ``head_dim``."""
    if len(shape) != len(axes):
        return None
    sizes = dict(zip(axes, shape, strict=True))
    if "m" in sizes:
        merged = sizes.pop("m")
        sizes |= {"h": merged // head_dim, "d": head_dim if merged % head_dim == 0 else None}
    return sizes if sizes["d"] == head_dim else None


def divided(x: Tensor, axes: str, head_dim: int) -> Tensor:
    """A view of a tensor in the order ``axes``, with its dimensions in the order :func:`divided_axes`."""
    return x.unflatten(axes.index("m"), (-1, head_dim)) if "m" in axes else x


def in_stored_order(x: Tensor, axes: str, head_dim: int) -> Tensor:
    """A tensor in the order ``axes``, which may lack dimensions -> [batch, heads, tokens, head_dim]."""
    x, axes = divided(x, axes, head_dim), divided_axes(axes)
    x = x.permute([axes.index(axis) for axis in STORED_AXES if axis in axes])
    for dim, axis in enumerate(STORED_AXES):
        x = x if axis in axes else x.unsqueeze(dim)
    return x


def from_stored_order(x: Tensor, axes: str) -> Tensor:
    """Inverse of :func:`in_stored_order`."""
    order = divided_axes(axes)
    for dim, axis in reversed(list(enumerate(STORED_AXES))):
        x = x if axis in order else x.squeeze(dim)
    remaining = [axis for axis in STORED_AXES if axis in order]
    x = x.permute([remaining.index(axis) for axis in order])
    return x.flatten(place, place + 1) if (place := axes.find("m")) >= 0 else x


def size_along(shape: Sequence[Any], axes: str, axis: str) -> Any:
    """The size along ``axis`` of a tensor in the order ``axes``; 1 if the tensor lacks that dimension."""
    return shape[axes.index(axis)] if axis in axes else 1


def rank_4_axes(axes: str) -> str:
    """The order of a cache of three dimensions, with the missing dimension inserted before its last."""
    (missing,) = set("bhtd").difference(axes)
    return f"{axes[:-1]}{missing}{axes[-1]}"


def rank_3_axes(axes: str) -> str:
    """Inverse of :func:`rank_4_axes`."""
    return axes[:-2] + axes[-1]


PartIndex = tuple[int, ...]
"""Selects a part of a stack: an index for each of its stacked dimensions."""


def with_ranges(x: Tensor, num_ranges: int) -> Tensor:
    """A view of a stack whose parts are ranges of channels, with a stacked dimension before the channels.

    [..., num_ranges * channels] -> [..., num_ranges, channels]; ``x`` itself if ``num_ranges`` is 0.
    """
    return x.unflatten(-1, (num_ranges, -1)) if num_ranges else x


def without_ranges(x: Tensor, num_ranges: int) -> Tensor:
    """Inverse of :func:`with_ranges`."""
    return x.flatten(-2) if num_ranges else x


def shape_of_part(x: Tensor, stacked_dims: Sequence[int], num_ranges: int) -> list[Any]:
    """The shape of each part of a stack; its stacked dimensions are numbered as in :func:`with_ranges`."""
    return [size for dim, size in enumerate(with_ranges(x, num_ranges).shape) if dim not in stacked_dims]


def stacked_dims_of_source(
    indexed: Sequence[int], num_index_dims: int, rank: int, stacked_dims: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The stacked dimensions of the source in an assignment to an indexed stack.

    Args:
        indexed: the dimensions of the stack that have an index tensor, in ascending order; at least one, and no stacked
            dimension.
        num_index_dims: the rank of the index tensors, broadcast together.
        rank: the rank of the stack.
        stacked_dims: the stacked dimensions of the stack.

    Returns:
        The dimensions of the source that correspond to ``stacked_dims``. None if selecting them from the source does
        not give the source of a part: this happens if the indexed dimensions are adjacent in a part but not in the
        stack.
    """

    def layout(dims: list[int]) -> list[Any]:
        """The dimensions of a source. Dimensions of index tensors come first unless indexed dimensions are adjacent."""
        places = [dims.index(dim) for dim in indexed]
        begin = places[0] if places == list(range(places[0], places[0] + len(places))) else 0
        kept = [dim for dim in dims if dim not in indexed]
        return [*kept[:begin], *["index"] * num_index_dims, *kept[begin:]]

    of_all = layout(list(range(rank)))
    of_part = layout([dim for dim in range(rank) if dim not in stacked_dims])
    if [dim for dim in of_all if dim not in stacked_dims] != of_part:
        return None
    return tuple(of_all.index(dim) for dim in stacked_dims)


CACHE_RANK = 4
