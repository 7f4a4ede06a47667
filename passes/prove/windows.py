"""Sliding windows: ``cat`` appends to a cache, and a slice drops the tokens that have left the window.

A cache that grows is returned; one of fixed size, as the window, is overwritten with the slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvcompile.passes.graph.aten import shape_of, sliced_by, with_defaults
from kvcompile.passes.prove.writes import CacheWrite

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """A slice that a graph returns, or copies into an input, while it does not return what was sliced.

    Attributes:
        output: what is returned or copied, the slice or a copy of it.
        slice: the slice.
        is_returned: whether it is returned.
    """

    output: Node
    slice: Node
    is_returned: bool = True

    @property
    def drops_appended(self) -> bool:
        """Whether tokens are dropped from what ``cat`` appends to: attention then reads what is left, or all of it."""
        whole, axis = with_defaults(self.slice, None, 0)[:2]
        if whole.target is not aten.cat.default:
            return False
        _, appended_axis = with_defaults(whole, None, 0)
        if axis != appended_axis:
            return False
        return not statically_known_true(shape_of(self.slice)[axis] == shape_of(whole)[axis])


def windows_of(output: Node) -> dict[Node, Window]:
    """The windows that a graph returns or copies into inputs, by what they are slices of."""
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
    """Whether they append tokens and, at most once, drop some."""
    forms = [write.form for write in changes]
    return "cat" in forms and forms.count("slice") <= 1 and forms.count("cat") >= len(forms) - 1


def is_shifting(changes: Sequence[CacheWrite], base: Node, axes: str) -> bool:
    """Whether they drop tokens of ``base``, before or after they append some, and leave as many as it has."""
    forms = [write.form for write in changes]
    before, after = (shape_of(state)[axes.index("t")] for state in (base, changes[-1].node))
    fits = statically_known_true(before == after)
    return fits and forms in (["slice", "cat"], ["cat", "slice"], ["slice", "cat", "slice"])
