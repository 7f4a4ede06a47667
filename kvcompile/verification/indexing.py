"""The integer inputs that a graph allows: indices must be within bounds, and writes must have a defined order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from kvcompile.verification.sizes import Sizes, Symbols
from kvcompile.verification.taps import Run

aten = torch.ops.aten

_BY_INDICES = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
}
_BY_DIMENSION = {
    aten.index_select.default, aten.index_copy.default, aten.index_add.default, aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor, aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter.reduce,
    aten.scatter.value_reduce, aten.scatter_add.default, aten.scatter_reduce.two,
}  # fmt: skip
_COMPARISONS = {
    aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor, aten.ne.Tensor,
    aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar, aten.ne.Scalar,
}  # fmt: skip


class IndexingError(Exception):
    """The inputs lead to an index out of bounds, or to a write whose result depends on an undefined order.

    Attributes:
        node: the node that indexes.
        repeats: whether the error is a write with a duplicate index.
    """

    def __init__(self, node: Node, repeats: bool) -> None:
        super().__init__(f"{node} {'writes one place twice' if repeats else 'has an index out of bounds'}")
        self.node, self.repeats = node, repeats


@dataclass(frozen=True)
class _Index:
    """One index of a node: its operand, the size of the dimension that it indexes, and whether it may be negative."""

    operand: Node
    size: Any
    from_end: bool


class IndexCheck:
    """Computes all integers of a graph that do not depend on floats, and checks every index among them.

    On a GPU, an index out of bounds would end the process, so the check runs before the graph.

    Attributes:
        sources: the integer inputs that each node depends on.
    """

    def __init__(self, gm: GraphModule, sizes: Sizes) -> None:
        self._gm, self._sizes = gm, sizes
        self._known = _integral_nodes(gm.graph)
        self.sources = _sources(gm.graph)
        self._bounds: dict[Node, list[Any]] = {source: [] for source in gm.graph.find_nodes(op="placeholder")}
        for node in gm.graph.nodes:
            for source in self.sources[node] if node.op == "call_function" else ():
                self._bounds[source] += _bounds(node, source, self.sources)

    def limits_of(self, source: Node, symbols: Symbols) -> list[int]:
        """The nonzero sizes of dimensions that an integer input may index or is compared with."""
        sizes = (self._sizes(size, symbols) for size in self._bounds[source])
        return [size for size in sizes if size > 0]

    def check(self, args: Sequence[Any], symbols: Symbols, may_repeat: bool) -> None:
        """Raise IndexingError unless the graph allows the integers in ``args``.

        Args:
            args: the inputs of the graph.
            symbols: its sizes.
            may_repeat: whether a write may have duplicate indices.
        """
        _IndexRun(self._gm, self._known, lambda size: self._sizes(size, symbols), may_repeat).outputs(args)


class _IndexRun(Run):
    def __init__(self, gm: GraphModule, known: set[Node], size: Any, may_repeat: bool) -> None:
        super().__init__(gm, lambda x, site: x)
        self._known, self._size, self._may_repeat = known, size, may_repeat

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            return ()
        indices = [index for index in _indices(n) if index.operand in self._known]
        values = [self.env[index.operand] for index in indices]
        for index, value in zip(indices, values, strict=True):
            size = self._size(index.size)
            if value.numel() and not (-size if index.from_end else 0) <= value.min() <= value.max() < size:
                raise IndexingError(n, repeats=False)
        if not self._may_repeat and len(indices) == len(list(_indices(n))) and self._repeats(n, indices, values):
            raise IndexingError(n, repeats=True)
        return super().run_node(n) if n in self._known or n.op == "placeholder" else None

    def _repeats(self, node: Node, indices: list[_Index], values: list[Tensor]) -> bool:
        """Whether a write has duplicate indices, so that the result depends on the order of its elements."""
        sizes = [self._size(index.size) for index in indices]
        if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
            if not values or (len(node.args) > 3 and node.args[3]):
                return False
            place = torch.zeros((), dtype=torch.int64, device=values[0].device)
            for value, size in zip(values, sizes, strict=True):
                place = place * size + value % size
            return place.unique().numel() < place.numel()
        if node.target in (aten.scatter.src, aten.index_copy.default):
            dim, order = int(node.args[1]), values[0]
            order = order.sort(dim if order.dim() > 1 else 0).values
            return bool((order.diff(dim=dim if order.dim() > 1 else 0) == 0).any())
        return False


def _indices(node: Node) -> Iterator[_Index]:
    """The integer indices of a node; empty if it does not index."""
    if node.op != "call_function":
        return
    if node.target in _BY_INDICES:
        for dim, index in enumerate(node.args[1]):
            if index is not None and index.meta["val"].dtype != torch.bool:
                yield _Index(index, node.args[0].meta["val"].shape[dim], True)
    elif node.target in _BY_DIMENSION:
        shape = node.args[0].meta["val"].shape
        if len(shape) and isinstance(node.args[2], Node):
            yield _Index(node.args[2], shape[int(node.args[1])], False)
    elif node.target is aten.embedding.default:
        yield _Index(node.args[1], node.args[0].meta["val"].shape[0], False)


def _bounds(node: Node, source: Node, sources: Mapping[Node, frozenset[Node]]) -> Iterator[Any]:
    """The sizes that bound the integers in ``source``, an input that ``node`` depends on."""
    for index in _indices(node):
        if source in sources.get(index.operand, ()):
            yield index.size
    if node.target in _COMPARISONS:
        yield from node.meta["val"].shape


def _is_integral(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_integral, value))
    if isinstance(value, Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, (bool, int, torch.SymInt, torch.SymBool))


def _integral_nodes(graph: Graph) -> set[Node]:
    """The nodes that are integers, booleans or sizes, depend only on such values, and change no input."""
    known: set[Node] = set()
    for node in graph.nodes:
        is_computed = node.op == "placeholder" or (node.op == "call_function" and not node.is_impure())
        if is_computed and _is_integral(node.meta.get("val")) and known.issuperset(node.all_input_nodes):
            known.add(node)
    return known


def _sources(graph: Graph) -> dict[Node, frozenset[Node]]:
    """The integer inputs that each node depends on through integers and booleans only. The node may hold floats."""
    sources: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder":
            is_source = isinstance(value, Tensor) and _is_integral(value) and value.dtype != torch.bool
            sources[node] = frozenset((node,)) if is_source else frozenset()
        else:
            operands = [sources[operand] for operand in node.all_input_nodes if _is_integral(operand.meta.get("val"))]
            sources[node] = frozenset().union(*operands)
    return sources
