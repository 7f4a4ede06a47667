"""The normal form of a write of a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import shape_of
from kvcompile.passes.graph.inline import size_node

Normalised = tuple[Node | None, Node, Node | None]

Form = Callable[..., tuple[Tensor, Tensor, Tensor | None]]
"""Computes the normal form ``(x, positions, valid)`` of a write from its value and other arguments."""


@dataclass(frozen=True)
class CacheWrite:
    """One change of a cache: it writes tokens, moves tokens, or reorders sequences.

    Attributes:
        node: the functional write, whose value is the cache after it.
        base: the cache before it.
        form: the kind of write, for the report.
        axes: the order of the dimensions of ``base`` (:mod:`kvcompile.passes.graph.permutations`).
        own: further nodes through which the write uses ``base``: they read its shape, or values that are put back.
        normalise: inserts the nodes of ``(x, positions, valid)`` at a graph's insertion point. For a move, these are
            ``(None, source, None)``: token ``i`` becomes the token that was at ``source[i]``. For a reorder, ``source``
            has the sequences in the same way.
        moves: whether it moves tokens.
        reorders: whether it reorders, repeats or drops sequences.
        first_sequence: the first of the neighbouring sequences that it writes, an int or a node; None if it writes all.
    """

    node: Node
    base: Node
    form: str
    axes: str
    own: tuple[Node, ...]
    normalise: Callable[[Graph], Normalised]
    moves: bool = False
    reorders: bool = False
    first_sequence: Any = None

    @property
    def writes_tokens(self) -> bool:
        return not self.moves and not self.reorders

    @property
    def drops_tokens(self) -> bool:
        """Whether the cache has fewer tokens after it than before."""
        axis = self.axes.index("t")
        before, after = (shape_of(state)[axis] for state in (self.base, self.node))
        return self.form == "slice" and not statically_known_true(before == after)


def materialise(graph: Graph, args: tuple[Any, ...]) -> list[Any]:
    """The arguments of an inserted function: nodes in place of symbolic sizes."""
    return [size_node(graph, arg) if isinstance(arg, torch.SymInt) else arg for arg in args]
