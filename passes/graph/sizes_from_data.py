"""Find data-dependent sizes: only the data of a step determine them.

Each data-dependent size is a symbol that no input has. The passes can compute with the size if the graph reads it as a
number, with ``.item()``. Other sizes are only in the shape of a tensor, such as a slice that ends at the last token.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from kvcompile.compat.operators import read_number
from kvcompile.passes.graph.aten import shape_of


def has_unread_size(nodes: Iterable[Node]) -> bool:
    """Whether the shape of one of ``nodes`` has a size from data that the graph does not read as a number."""
    for node in nodes:
        symbols = _symbols_of(node)
        if symbols and not symbols <= _numbers_read(node.graph):
            return True
    return False


def has_size_from_data(node: Node) -> bool:
    """Whether the shape of ``node`` has a size from data, which a caller cannot know before the graph runs."""
    return bool(_symbols_of(node))


def _symbols_of(node: Node) -> set[sympy.Symbol]:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return set()
    return {symbol for size in shape_of(node) for symbol in free_unbacked_symbols(size)}


def _numbers_read(graph: Graph) -> set[sympy.Symbol]:
    reads = graph.find_nodes(op="call_function", target=read_number)
    return {symbol for node in reads for symbol in free_unbacked_symbols(node.meta["val"])}
