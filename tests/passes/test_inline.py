"""Inlined code is traced once for equal arguments, and a copy computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.passes.graph import inline as inlining
from kvcompile.passes.graph.inline import inline, size_node


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that were traced."""
    names: list[str] = []
    trace = inlining._traced

    def note(graph, fn, *rest):
        names.append(fn.__name__)
        return trace(graph, fn, *rest)

    monkeypatch.setattr(inlining, "_traced", note)
    return names


def graph_of(*inputs: Tensor) -> tuple[Graph, list[Node]]:
    graph, mode = Graph(), FakeTensorMode()
    nodes = []
    for index, value in enumerate(inputs):
        nodes.append(graph.placeholder(f"x{index}"))
        nodes[-1].meta["val"] = mode.from_tensor(value)
    return graph, nodes


def scaled_sum(x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    return (x * factor).sum(0) + y, x.t()


def difference(x: Tensor, y: Tensor) -> Tensor:
    return x - y


def run(graph: Graph, outputs: list[Node], *inputs: Tensor) -> list[Tensor]:
    graph.output(tuple(outputs))
    graph.lint()
    return list(GraphModule(torch.nn.Module(), graph)(*inputs))


def test_equal_arguments_are_traced_once_and_computed_alike(traced: list[str]) -> None:
    inputs = [torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)]
    graph, (x, y, z) = graph_of(*inputs)
    outputs = [*inline(graph, scaled_sum, x, y, 2.0), *inline(graph, scaled_sum, z, y, 2.0)]
    assert traced == ["scaled_sum"]
    assert [node.meta["val"].shape for node in outputs] == [(4,), (4, 3)] * 2
    expected = [*scaled_sum(*inputs[:2], 2.0), *scaled_sum(inputs[2], inputs[1], 2.0)]
    for result, value in zip(run(graph, outputs, *inputs), expected, strict=True):
        assert torch.equal(result, value)


def sum_of_bits(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(torch.int16)[0] + x.view(torch.int16)[1], x.view(torch.int8)[0] + y.view(torch.int16)[0, 0]


def test_equal_views_in_another_dtype_are_computed_once() -> None:
    inputs = [torch.randn(3, 4).half(), torch.randn(3, 4).half()]
    graph, nodes = graph_of(*inputs)
    outputs = list(inline(graph, sum_of_bits, *nodes))
    views = graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype)
    assert [node.args for node in views] == [(nodes[0], torch.int16), (nodes[0], torch.int8), (nodes[1], torch.int16)]
    for result, value in zip(run(graph, outputs, *inputs), sum_of_bits(*inputs), strict=True):
        assert torch.equal(result, value)


def test_one_tensor_in_two_places_is_not_traced_for_two_tensors(traced: list[str]) -> None:
    inputs = [torch.randn(4), torch.randn(4)]
    graph, (x, y) = graph_of(*inputs)
    outputs = [inline(graph, difference, x, x), inline(graph, difference, x, y), inline(graph, difference, y, y)]
    assert traced == ["difference"] * 2
    zero = torch.zeros(4)
    for result, value in zip(run(graph, outputs, *inputs), [zero, inputs[0] - inputs[1], zero], strict=True):
        assert torch.equal(result, value)


def test_copies_of_a_trace_share_no_memory() -> None:
    graph, (x, y, z) = graph_of(torch.randn(3, 4), torch.randn(4), torch.randn(3, 4))
    sums, views = zip(inline(graph, scaled_sum, x, y, 2.0), inline(graph, scaled_sum, z, y, 2.0), strict=True)

    def memory(node: Node) -> int:
        return node.meta["val"].untyped_storage()._cdata

    assert memory(sums[0]) != memory(sums[1])
    assert [memory(view) for view in views] == [memory(x), memory(z)]


@pytest.mark.parametrize(
    ("other", "factor"),
    [
        (torch.randn(3, 4), 3.0),
        (torch.randn(5, 4), 2.0),
        (torch.randn(3, 4, dtype=torch.float64), 2.0),
        (torch.randn(4, 3).t(), 2.0),
    ],
    ids=["another constant", "another shape", "another dtype", "other strides"],
)
def test_other_arguments_are_traced_anew(other: Tensor, factor: float, traced: list[str]) -> None:
    inputs = [torch.randn(3, 4), torch.randn(4), other]
    graph, (x, y, z) = graph_of(*inputs)
    outputs = [*inline(graph, scaled_sum, x, y, 2.0), *inline(graph, scaled_sum, z, y, factor)]
    assert traced == ["scaled_sum"] * 2
    expected = [*scaled_sum(*inputs[:2], 2.0), *scaled_sum(other, inputs[1], factor)]
    for result, value in zip(run(graph, outputs, *inputs), expected, strict=True):
        assert torch.equal(result, value)


def test_functions_that_capture_variables_and_other_graphs_are_traced_anew(traced: list[str]) -> None:
    for _ in range(2):
        graph, (x,) = graph_of(torch.randn(3))
        for factor in (2.0, 3.0):
            inline(graph, lambda x, factor=factor: x * factor, x)  # a default is captured, too
        inline(graph, lambda x: x + factor, x)  # noqa: B023
    assert len(traced) == 6


def test_a_function_may_capture_any_symbolic_size() -> None:
    def with_size(x: Tensor) -> Tensor:
        return x * x.shape[0]

    gm = make_fx(with_size, tracing_mode="symbolic")(torch.randn(5, 4))
    x, output = next(iter(gm.graph.nodes)), gm.graph.output_node()
    num_rows = x.meta["val"].shape[0]
    most, twice = torch.sym_max(num_rows - 7, 0), num_rows * 2

    def place(x: Tensor, *, step: int = 3) -> Tensor:
        return x + most * step

    def both(x: Tensor) -> Tensor:
        return place(x)[0] + twice

    with gm.graph.inserting_before(output):
        output.args = (inline(gm.graph, both, x),)
    gm.recompile()
    for rows in (5, 9):
        value = torch.randn(rows, 4)
        torch.testing.assert_close(gm(value), value[0] + 3 * max(rows - 7, 0) + 2 * rows)


def test_a_size_that_is_a_symbol_needs_no_new_node() -> None:
    gm = make_fx(lambda x: x * x.shape[0], tracing_mode="symbolic")(torch.randn(5, 4))
    x, output = next(iter(gm.graph.nodes)), gm.graph.output_node()
    num_rows = x.meta["val"].shape[0]
    before = list(gm.graph.nodes)
    with gm.graph.inserting_before(output):
        own = size_node(gm.graph, num_rows)
        assert list(gm.graph.nodes) == before
        assert own in before
        assert str(own.meta["val"]) == str(num_rows)
        twice = size_node(gm.graph, num_rows * 2)
    assert [node for node in gm.graph.nodes if node not in before] == [twice]
    assert own in twice.all_input_nodes
    assert twice.meta["val"] == 2 * num_rows
