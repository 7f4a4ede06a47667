"""Drop checks that the offset of a view is not negative: such a check would count as another use of a cache.

``cache.narrow(2, start, n)`` is a view at an unknown offset if ``start`` is read from a tensor
(``torch._dynamo.config.capture_scalar_outputs``). PyTorch makes a symbol for this offset and asserts that it is not
negative. The check always holds: no tensor begins before its storage.
"""

from __future__ import annotations

import operator

from torch import ops
from torch.fx import Graph

aten = ops.aten


def drop_offset_checks(graph: Graph) -> None:
    """Remove these checks, and the nodes of offsets that have no other use."""
    for offset in graph.find_nodes(op="call_function", target=aten.sym_storage_offset.default):
        for check in [user for user in offset.users if user.target is operator.ge and user.args == (offset, 0)]:
            for assertion in [user for user in check.users if user.target is aten._assert_scalar.default]:
                graph.erase_node(assertion)
            if not check.users:
                graph.erase_node(check)
        if not offset.users:
            graph.erase_node(offset)
