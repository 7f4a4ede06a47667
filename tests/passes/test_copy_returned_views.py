"""A new tensor that the model returns is a value of the graph, even if an operation on an input was dropped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.canonical.copy_returned_views import copy_returned_views

aten = torch.ops.aten
Results = tuple[Tensor, ...]


def copied(fn: Callable[[Tensor, Tensor], Results], own_outputs: set[int], writes: bool = False) -> Graph:
    """The graph of ``fn`` after the pass. It ends with a copy of the second input into the first if it ``writes``."""
    graph = make_fx(fn, tracing_mode="fake")(torch.empty(2, 6), torch.empty(2, 6)).graph
    if writes:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(aten.copy_.default, tuple(graph.find_nodes(op="placeholder")))
    copy_returned_views(graph, own_outputs)
    graph.lint()
    return graph


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :3], lambda x: x.mT], ids=["input", "slice", "transpose"])
def test_a_returned_view_of_an_input_becomes_a_copy_that_all_operations_use(view: Callable[[Tensor], Tensor]) -> None:
    def fn(x: Tensor, y: Tensor) -> Results:
        viewed = view(x)
        return viewed, viewed * y.mean()

    graph = copied(fn, {0, 1})
    (copy,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    returned, product = graph.output_node().args[0]
    assert returned is copy
    assert product.args[0] is copy


def test_an_input_that_is_returned_twice_is_copied_once() -> None:
    graph = copied(lambda x, y: (x, x), {0, 1})
    (copy,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert graph.output_node().args[0] == (copy, copy)


def test_operations_keep_an_input_that_the_graph_writes() -> None:
    graph = copied(lambda x, y: (x, x * 2), {0, 1}, writes=True)
    (copy,) = graph.find_nodes(op="call_function", target=aten.clone.default)
    assert list(copy.users) == [graph.output_node()]


@pytest.mark.parametrize(
    ("fn", "own_outputs"),
    [
        (lambda x, y: (x, x[:, :3]), set()),  # the model returns an input and a view of it
        (lambda x, y: (x + y, y.sum()), {0, 1}),
    ],
    ids=["outputs that are inputs in the model", "computed outputs"],
)
def test_outputs_with_memory_of_their_own_are_not_copied(
    fn: Callable[[Tensor, Tensor], Results], own_outputs: set[int]
) -> None:
    assert not copied(fn, own_outputs).find_nodes(op="call_function", target=aten.clone.default)
