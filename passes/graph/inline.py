"""Insert calls and plain PyTorch code into an FX graph. Code is traced on the fake values of its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import CellType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import GraphAppendingTracer

from kvcompile.compat.inductor import select_decomp_table
from kvcompile.compat.pytree import tree_map_only
from kvcompile.compat.symbols import PythonReferenceAnalysis, expression_of, sympy_interp
from kvcompile.compat.tracing import FakeTensor, FakeTensorMode
from kvcompile.passes.graph.constant_matrices import constant_matrices, formula_of, needed_only_for, steps_to


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The fake mode of the values of ``graph``."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise ValueError("the graph has no fake tensor")


def behind_placeholders(node: Node) -> Node:
    """The first node after ``node`` that is not a placeholder. Sizes are placeholders, too, and may come later."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def insert_call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert one call, with its fake value, at the graph's insertion point."""
    node = graph.call_function(target, args, kwargs)
    _compute_value(node)
    return node


def _compute_value(node: Node) -> None:
    args, kwargs = tree_map_only(Node, lambda operand: operand.meta["val"], (node.args, node.kwargs))
    with fake_mode_of(node.graph):
        node.meta["val"] = node.target(*args, **kwargs)


_TRACES: WeakKeyDictionary[Graph, dict[Any, Graph]] = WeakKeyDictionary()
"""The traces of inserted functions, by graph. The layers of a graph mostly insert the same operations."""


def inline(graph: Graph, fn: Callable[..., Any], *args: Any) -> Any:
    """Insert the operations of ``fn(*args)`` at the graph's insertion point.

    A function that captures nothing is traced once for equal arguments, and its operations are copied afterwards. A
    copy gets new fake values: Inductor reads from them which tensors share memory.

    Args:
        graph: a functional ATen graph whose nodes carry fake values in ``meta["val"]``.
        fn: functional PyTorch code; it is traced with Inductor's decompositions.
        args: nodes (of tensors or symbolic integers) and constants.

    Returns:
        The result of ``fn``, with nodes in place of tensors.
    """
    symbols = symbol_nodes(graph)
    if symbols:
        sizes = [size_node(graph, size, symbols) for size in _captured_sizes(fn)]
        fn, args = _with_sizes_first(fn, len(sizes)), (*sizes, *args)
    # All symbols of the graph are inputs of the trace, so that it can express the sizes that ``fn`` computes.
    nodes = [*(arg for arg in args if isinstance(arg, Node)), *symbols.values()]
    traced, is_copy = (_traced(graph, fn, args, nodes), False) if symbols else traced_once(graph, fn, args)
    return insert_operations(graph, traced, nodes, new_values=is_copy, known=shared_matrices(graph, traced))


def _captured_sizes(fn: Callable[..., Any]) -> Iterator[torch.SymInt]:
    """The symbolic sizes that ``fn``, or a function that it captures, captures."""
    for cell in getattr(fn, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch.SymInt):
            yield cell.cell_contents
        elif isinstance(cell.cell_contents, FunctionType):
            yield from _captured_sizes(cell.cell_contents)


def _with_sizes_first(fn: Callable[..., Any], num_sizes: int) -> Callable[..., Any]:
    """``fn`` as a function of its captured sizes and its arguments.

    A trace finds a captured size only if it is an input of the trace, or a sum or product of inputs, unlike ``Max``.
    """

    def call(*args: Any) -> Any:
        return _with_sizes(fn, iter(args[:num_sizes]))(*args[num_sizes:])

    return call if num_sizes else fn


def _with_sizes(fn: Callable[..., Any], sizes: Iterator[Any]) -> Callable[..., Any]:
    """A copy of ``fn`` that captures ``sizes`` in place of :func:`_captured_sizes`."""
    if not isinstance(fn, FunctionType) or not fn.__closure__:
        return fn
    captured = []
    for value in (cell.cell_contents for cell in fn.__closure__):
        if isinstance(value, torch.SymInt):
            value = next(sizes)
        elif isinstance(value, FunctionType):
            value = _with_sizes(value, sizes)
        captured.append(CellType(value))
    copy = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(captured))
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


_SHARED: WeakKeyDictionary[Graph, dict[str, Node]] = WeakKeyDictionary()
"""The constant matrices that each graph computes, by their formula."""


def shared_matrices(graph: Graph, traced: Graph) -> dict[Node, Node]:
    """The nodes of ``graph`` that compute the constant matrices of ``traced``, by their nodes in ``traced``.

    Each matrix is in the graph once, before all other operations.
    """
    matrices = {}
    known = _SHARED.setdefault(graph, {})
    for matrix in constant_matrices(traced):
        formula = formula_of(matrix)
        node = known.get(formula)
        if node is None or node not in graph.find_nodes(op="call_function", target=node.target):
            env: dict[Node, Node] = {}
            with graph.inserting_before(behind_placeholders(graph.find_nodes(op="placeholder")[0])):
                for step in steps_to(matrix):
                    env[step] = graph.node_copy(step, env.__getitem__)
                    _compute_value(env[step])
            node = known[formula] = env[matrix]
        matrices[matrix] = node
    return matrices


def insert_operations(
    graph: Graph, traced: Graph, nodes: Sequence[Node], *, new_values: bool, known: Mapping[Node, Node] | None = None
) -> Any:
    """Insert a copy of the operations of ``traced`` at the graph's insertion point.

    Args:
        graph: the graph that gets the operations.
        traced: a graph of tensor operations.
        nodes: nodes of ``graph`` that take the place of the placeholders of ``traced``.
        new_values: whether to compute new fake values. Operations that are copied twice need them.
        known: nodes of ``graph`` that take the place of operations of ``traced``.

    Returns:
        The output of ``traced``, with nodes of ``graph``.
    """
    env: dict[Node, Node] = dict(zip(traced.find_nodes(op="placeholder"), nodes, strict=True))
    env.update(known or {})
    replaced = needed_only_for(known or {})
    for node in traced.nodes:
        if node.op == "output":
            return tree_map_only(Node, env.__getitem__, node.args[0])
        if node.op != "placeholder" and node not in replaced:
            env[node] = _copied(graph, node, env)
            if new_values:
                _compute_value(env[node])
    raise AssertionError("a traced graph ends with an output")


def traced_once(graph: Graph, fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Graph, bool]:
    """The graph of ``fn(*args)``, and whether an earlier call for ``graph`` has traced it. ``graph`` has no symbols.

    The placeholders stand for the nodes in ``args``.
    """
    key = _key_of(fn, args)
    known = _TRACES.setdefault(graph, {})
    if key in known:
        return known[key], True
    traced = _traced(graph, fn, args, [arg for arg in args if isinstance(arg, Node)])
    if key is not None:
        known[key] = traced
    return traced, False


def _traced(graph: Graph, fn: Callable[..., Any], args: tuple[Any, ...], nodes: list[Node]) -> Graph:
    """The graph of ``fn(*args)``, whose placeholders stand for ``nodes``."""

    def call(*values: Any) -> Any:
        remaining = iter(values)
        return fn(*(next(remaining) if isinstance(arg, Node) else arg for arg in args))

    with fake_mode_of(graph):
        traced = make_fx(call, decomposition_table=select_decomp_table())(*(node.meta["val"] for node in nodes)).graph
    _share_typed_views(traced)
    traced.eliminate_dead_code()
    if constant := next(iter(traced.find_nodes(op="get_attr")), None):
        raise ValueError(f"{fn} captures the tensor constant {constant.target}; inlined code must make its own tensors")
    return traced


def _share_typed_views(traced: Graph) -> None:
    """Merge equal views of a tensor in another dtype. In generated code for CPUs each of these views calls PyTorch."""
    known: dict[tuple[Any, ...], Node] = {}
    for node in traced.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
        first = known.setdefault(node.args, node)
        if first is not node:
            node.replace_all_uses_with(first)
            traced.erase_node(node)


def _key_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A key that is equal for calls that trace the same operations; None if a call cannot have a key.

    ``fn`` must not capture variables, and sizes must be numbers. The key describes a tensor by all properties that its
    operations may depend on, and by the first argument that is the same tensor: the trace of a call with one tensor in
    two places has one input for both.
    """
    if not isinstance(fn, FunctionType) or fn.__closure__ is not None or fn.__kwdefaults__:
        return None
    given = (*args, *(fn.__defaults__ or ()))
    described = []
    for arg in given:
        value = arg.meta["val"] if isinstance(arg, Node) else arg
        parts = [value]
        if isinstance(value, torch.Tensor):
            parts = [*value.shape, *value.stride(), value.storage_offset(), value.dtype, value.device]
        parts = [_constant(part) for part in parts]
        if any(isinstance(part, torch.SymInt) or not isinstance(part, Hashable) for part in parts):
            return None
        described.append((type(arg), *parts, next(place for place, other in enumerate(given) if other is arg)))
    return fn.__code__, tuple(described)


def _constant(value: Any) -> Any:
    """``value``, or its number if it is a symbolic size that a guard has made constant."""
    if isinstance(value, torch.SymInt) and (expr := expression_of(value)).is_number:
        return int(expr)
    return value


def _copied(graph: Graph, node: Node, env: dict[Node, Node]) -> Node:
    """A copy of a traced node. A sum or product of several operands becomes several calls with two operands each.

    ``make_fx`` writes a sum of sizes from outside the trace as one call with all operands. Generated Python would take
    the first two of them and drop the others.
    """
    if node.target not in (operator.add, operator.mul) or len(node.args) <= 2:
        return graph.node_copy(node, env.__getitem__)
    first, *others = (env.get(arg, arg) for arg in node.args)
    for other in others:
        first = insert_call(graph, node.target, first, other)
    return first


def symbol_nodes(graph: Graph) -> dict[sympy.Symbol, Node]:
    """The nodes whose values are the graph's symbols: its symbolic integers, and numbers that it reads from tensors."""
    symbols: dict[sympy.Symbol, Node] = {}
    for symbol, node in _symbols(graph):
        symbols.setdefault(symbol, node)
    return symbols


def _symbols(graph: Graph) -> Iterator[tuple[sympy.Symbol, Node]]:
    """Each symbol of the graph with every node whose value it is, in the order of the graph."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            yield value.node.expr, node


def size_node(graph: Graph, size: int | torch.SymInt, symbols: Mapping[sympy.Symbol, Node] | None = None) -> Node | int:
    """A node that computes ``size`` from the graph's symbolic inputs, or the number itself.

    The node of a size that is a symbol is in the graph already. All other nodes are inserted.

    Args:
        graph: the graph that computes the size.
        size: a number, or a symbolic size of the graph.
        symbols: the result of :func:`symbol_nodes`, if the caller has it.
    """
    size = _constant(size)
    if not isinstance(size, torch.SymInt):
        return size
    expr = expression_of(size)
    if isinstance(expr, sympy.Symbol):
        known = _symbols(graph) if symbols is None else symbols.items()
        return next(node for symbol, node in known if symbol == expr)
    symbols = symbol_nodes(graph) if symbols is None else symbols
    tracer = GraphAppendingTracer(graph)  # operations on two proxies need a common tracer
    proxies = {symbol: Proxy(symbols[symbol], tracer) for symbol in expr.free_symbols}
    before = set(graph.nodes)
    result = sympy_interp(PythonReferenceAnalysis, proxies, expr).node
    for node in graph.nodes:
        if node not in before:
            _compute_value(node)
    return result
