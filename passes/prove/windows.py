"""Recognise sliding windows: ``cat`` appends to a cache, and a slice drops the tokens that have left the window.

A growing window is returned. A window of fixed size is an input, which the slice overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import arguments, shape_of, sliced_by
from kvcompile.passes.prove.cache_write import CacheWrite
from kvcompile.passes.prove.reorders import REORDER

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """A slice that a graph returns, or copies into an input, without returning the whole tensor.

    Attributes:
        output: the value that is returned or copied: the slice or a copy of it.
        slice: the slice.
        is_returned: whether the graph returns it; otherwise the graph copies it into an input.
    """

    output: Node
    slice: Node
    is_returned: bool = True

    @property
    def drops_appended(self) -> bool:
        """Whether the slice drops tokens of a ``cat``. Attention then reads the remaining tokens, or all of them."""
        whole, axis, *_ = arguments(self.slice)
        if whole.target is not aten.cat.default:
            return False
        if axis != arguments(whole)[1]:
            return False
        return not statically_known_true(shape_of(self.slice)[axis] == shape_of(whole)[axis])


def windows_of(output: Node) -> dict[Node, Window]:
    """The windows that a graph returns or copies into inputs, by the whole tensor."""
    windows: dict[Node, Window] = {}
    for node in output.args[0]:
        chain = sliced_by(node) if isinstance(node, Node) else ()
        if chain and chain[-1].args[0] not in output.args[0]:
            windows.setdefault(chain[-1].args[0], Window(node, chain[-1]))
    for copy in output.graph.find_nodes(op="call_function", target=aten.copy_.default):
        chain = sliced_by(copy.args[1])
        if chain and chain[-1].args[0].target is aten.cat.default and chain[-1].args[0] not in output.args[0]:
            windows.setdefault(chain[-1].args[0], Window(copy.args[1], chain[-1], is_returned=False))
    return windows


def is_growing(changes: Sequence[CacheWrite]) -> bool:
    """Whether the changes append tokens, drop tokens at most once, reorder sequences, and do nothing else.

    Other writes are not allowed, because the grown cache shares its storage with the cache that was passed, which keeps
    its tokens.
    """
    forms = [write.form for write in changes]
    return "cat" in forms and forms.count("slice") <= 1 and {"cat", "slice", REORDER}.issuperset(forms)


def is_shifting(changes: Sequence[CacheWrite], base: Node, axes: str) -> bool:
    """Whether the changes drop as many tokens of ``base`` as they append, before or after appending."""
    forms = [write.form for write in changes]
    before, after = (shape_of(state)[axes.index("t")] for state in (base, changes[-1].node))
    fits = statically_known_true(before == after)
    return fits and forms in (["slice", "cat"], ["cat", "slice"], ["slice", "cat", "slice"])
