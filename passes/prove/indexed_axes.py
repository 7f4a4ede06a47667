"""Writes by indices of several dimensions, such as ``cache[b, h, pos] = k`` with aranges ``b`` and ``h``.

An index of all sequences or of all heads, in order, selects the whole dimension. Only the positions of tokens are free.
They may differ between sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.kernels.layout.axes import STORED_AXES, size_along
from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.constant_dims import varying_shape
from kvcompile.passes.graph.names import AXIS_NAMES
from kvcompile.passes.prove.cache_write import Form
from kvcompile.passes.prove.positions import num_tokens_of, wrapped

aten = torch.ops.aten


class WrongIndex(Exception):
    """An index that is not understood. The text names it."""


def form_of_indices(base: Node, axes: str, given: Mapping[str, Node]) -> Form:
    """The normal form of an ``index_put`` into ``base``, a function of its value and of the indices in ``given``.

    Args:
        axes: the order of the dimensions of ``base``.
        given: the index along each indexed axis, in the order of ``axes``.

    Raises:
        WrongIndex: no integer index selects tokens, channels are indexed, or an index along sequences or heads is not
            of all of them, in order.
    """
    if "t" not in given:
        raise WrongIndex("no index selects tokens")
    if given["t"].meta["val"].dtype == torch.bool:
        raise WrongIndex("the index of tokens is a mask; give their positions as integers")
    if "d" in given:
        raise WrongIndex("it indexes channels; write whole vectors")
    places = _places_of_aranges(base, axes, given)
    # Indexed dimensions that are not neighbours come first in the value.
    first = axes.index(next(iter(given)))
    together = axes[first : first + len(given)] == "".join(given)
    leading = axes[:first] if together else ""
    trailing = "".join(axis for axis in axes if axis not in given and axis not in leading)
    sizes = {axis: size_along(shape_of(base), axes, axis) for axis in leading + trailing}
    num_tokens = num_tokens_of(base, axes)

    def form(x: Tensor, *indices: Tensor) -> tuple[Tensor, Tensor, None]:
        indexed = torch.broadcast_shapes(*(index.shape for index in indices))
        x = x.expand(*(sizes[axis] for axis in leading), *indexed, *(sizes[axis] for axis in trailing))
        names = ["t"] * len(indexed)
        for axis, place in places.items():
            names[place] = axis
        pos = indices[[*given].index("t")]
        if places:
            pos = _in_stored_order(pos.expand(indexed), names)
        if "h" in places:
            pos = pos.select(1 if "b" in places else 0, 0)
        pos = pos.reshape(pos.shape[0], math.prod(pos.shape[1:])) if "b" in places else pos.reshape(-1)
        return _stored(x, leading + "".join(names) + trailing), wrapped(pos, num_tokens), None

    return form


def _in_stored_order(x: Tensor, names: Sequence[str]) -> Tensor:
    """``x`` with its dimensions, which have these names, in the order of STORED_AXES. Several may be named "t"."""
    order = sorted(range(x.dim()), key=lambda dim: STORED_AXES.index(names[dim]))
    return x if order == [*range(x.dim())] else x.permute(order)


def _stored(x: Tensor, names: str) -> Tensor:
    """``x`` as [batch, heads, tokens, channels].

    ``x`` may lack the first two dimensions, and any number of its dimensions may be named "t".
    """
    x = _in_stored_order(x, names)
    before, count = len({"b", "h"}.intersection(names)), names.count("t")
    if count != 1:
        x = x.flatten(before, before + count - 1) if count else x.unsqueeze(before)
    for dim, axis in enumerate("bh"):
        x = x if axis in names else x.unsqueeze(dim)
    return x


def _places_of_aranges(base: Node, axes: str, given: Mapping[str, Node]) -> dict[str, int]:
    """The dimensions, from the end, along which the indices of sequences and heads vary.

    An index of the only sequence or head has no such dimension. Raises WrongIndex if an index does not count all
    sequences or heads in order, or if another index varies along its dimension. Positions may vary with the sequence.
    """
    rank = max(len(shape_of(index)) for index in given.values())
    places: dict[str, int] = {}
    for axis in [axis for axis in given if axis in "bh"]:
        size = size_along(shape_of(base), axes, axis)
        own = [dim for dim in range(-rank, 0) if _varies(given[axis], dim)]
        counts_all = len(own) <= 1 and all(statically_known_true(shape_of(given[axis])[dim] == size) for dim in own)
        if not is_arange(given[axis], size) or not counts_all:
            raise WrongIndex(
                f"the index of {AXIS_NAMES[axis]} does not count all of them in order, as torch.arange does"
            )
        for other in [other for other in given if other != axis and (axis, other) != ("b", "t")]:
            if any(_varies(given[other], dim) for dim in own):
                raise WrongIndex(f"the index of {AXIS_NAMES[other]} varies with the index of {AXIS_NAMES[axis]}")
        if own:
            places[axis] = own[0]
    return places


def _varies(index: Node, dim: int) -> bool:
    """Whether an index may vary along its dimension ``dim``, which is counted from the end."""
    shape = varying_shape(index)
    return -dim <= len(shape) and not statically_known_true(shape[dim] == 1)


def is_arange(node: Node, size: Any) -> bool:
    """Whether ``node`` holds ``arange(size)`` in any shape. Further dimensions may repeat the numbers."""
    while node.target in (aten.view.default, aten.unsqueeze.default, aten.expand.default):
        node = node.args[0]
    return (
        node.target is torch.ops.prims.iota.default
        and statically_known_true(shape_of(node)[0] == size)
        and node.kwargs.get("start") == 0
        and node.kwargs.get("step") == 1
    )
