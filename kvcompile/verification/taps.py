"""The tap op ``kvcompile::tap``: it marks the result of an attention in the original and in the rewritten graph.

A tap follows each marker before the passes run. The passes do not know the operator of a tap, so they keep the tap.
Both graphs therefore have the same taps. A run of the original records the result of each attention. A run of the
rewritten graph compares its own result with the recorded result, and continues with the recorded result. A difference
at a site is therefore caused by this site, and rounding does not add up over layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from kvcompile.compat.operators import flex_attention
from kvcompile.passes.marker import markers_of
from kvcompile.verification.flex import with_blocks

aten = torch.ops.aten

_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define("tap(Tensor x, int site) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
torch.library.register_fake("kvcompile::tap", lambda x, site: torch.empty_like(x), lib=_library)

TAP = torch.ops.kvcompile.tap.default

AtTap = Callable[[Tensor, int], Tensor]
"""(result of an attention, position of its site) -> the result with which the graph continues."""


def insert_taps(graph: Graph) -> None:
    """Insert a tap after each marker. Sites are counted in the order of the graph."""
    for site, marker in enumerate(markers_of(graph)):
        with graph.inserting_after(marker):
            tap = graph.call_function(TAP, (marker, site))
        tap.meta["val"] = marker.meta["val"]
        marker.replace_all_uses_with(tap, delete_user_cb=lambda user, tap=tap: user is not tap)


class Run(Interpreter):
    """Runs a functional ATen graph node by node.

    Attributes:
        at_tap: called at each tap.
        current: the running node, or the node that raised an error.
    """

    def __init__(self, gm: GraphModule, at_tap: AtTap) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self.at_tap = at_tap
        self.current: Node | None = None

    def run_node(self, n: Node) -> Any:
        self.current = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is TAP:
            return self.at_tap(*args)
        if target is aten.view.default:
            target = aten.reshape.default  # the strides of fake and real values may differ; Inductor also copies
        if target is flex_attention:
            args = with_blocks(args)
        return super().call_function(target, args, kwargs)

    def outputs(self, args: Sequence[Any]) -> list[Any]:
        """The outputs of the graph for ``args``."""
        return list(self.run(*args, enable_io_processing=False))
