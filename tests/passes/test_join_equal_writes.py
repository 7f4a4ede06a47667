"""Equal writes of an input become one node, unless several of them leave the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.canonical.join_equal_writes import join_equal_writes

aten = torch.ops.aten


def cats_of(fn: Callable[[Tensor, Tensor], tuple[Tensor, ...]], copied: int | None = None) -> int:
    """The number of concatenations after the pass. Output ``copied`` is copied into the first input."""
    graph: Graph = make_fx(fn, tracing_mode="fake")(torch.empty(2, 6), torch.empty(2, 6)).graph
    output = graph.output_node()
    if copied is not None:
        results = list(output.args[0])
        with graph.inserting_before(output):
            graph.call_function(aten.copy_.default, (next(iter(graph.nodes)), results.pop(copied)))
        output.args = (tuple(results),)
    join_equal_writes(graph)
    graph.lint()
    return len(graph.find_nodes(op="call_function", target=aten.cat.default))


def doubled_often(x: Tensor) -> Tensor:
    """The paths to ``x`` double with each sum."""
    for _ in range(60):
        x = x + x
    return x


def negated_often(x: Tensor) -> Tensor:
    for _ in range(1200):
        x = x.neg()
    return x


@pytest.mark.parametrize(
    ("fn", "number"),
    [
        (lambda x, y: (torch.cat([x, y]).sum(), torch.cat([x, y])), 1),
        (lambda x, y: (torch.cat([x, y]), torch.cat([x, y]).sum()), 1),
        (lambda x, y: (torch.cat([x, y]).sum(), torch.cat([x, y]).amax(), torch.cat([x, y])), 1),
        (lambda x, y: (torch.cat([x, y], 1).sum(), torch.cat([x, y], -1)), 1),
        (lambda x, y: (torch.cat([torch.cat([x, y]), y]).sum(), torch.cat([torch.cat([x, y]), y])), 2),
        (lambda x, y: (torch.cat([x, y.chunk(2, 1)[1]], 1).sum(), torch.cat([x, y.chunk(2, 1)[1]], 1)), 1),
    ],
)
def test_equal_writes_become_one(fn: Callable[[Tensor, Tensor], tuple[Tensor, ...]], number: int) -> None:
    assert cats_of(fn) == number


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (torch.cat([x, y]), torch.cat([x, y])),
        lambda x, y: (torch.cat([x, y])[1:], torch.cat([x, y]).mT),
        lambda x, y: (torch.cat([x, y]).clone(), torch.cat([x, y])),  # later passes may drop the copy
        lambda x, y: (torch.cat([x, y]).split(2)[0], torch.cat([x, y])),
        lambda x, y: (torch.cat([x, y]).view(torch.int32), torch.cat([x, y])),
        lambda x, y: (torch.cat([x, y]).sum(), torch.cat([y, x])),
        lambda x, y: (torch.cat([x, y + 1]).sum(), torch.cat([x, y + 2])),
        lambda x, y: (torch.cat([x, torch.rand_like(y)]).sum(), torch.cat([x, torch.rand_like(y)])),
    ],
    ids=["outputs", "views", "a clone", "a piece", "bits", "another order", "other operands", "noise"],
)
def test_two_writes_stay_two(fn: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
    assert cats_of(fn) == 2


def test_a_third_equal_write_joins_one_that_leaves() -> None:
    assert cats_of(lambda x, y: (torch.cat([x, y]), torch.cat([x, y]), torch.cat([x, y]).sum())) == 2


def test_a_write_that_is_copied_back_and_an_equal_output_stay_two() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        one, other = torch.cat([x, y]), torch.cat([x, y])
        return torch.ops.aten.slice(one, 0, 0, 2), other

    assert cats_of(fn, copied=0) == 2


@pytest.mark.parametrize("compute", [doubled_often, negated_often])
def test_long_computations_are_compared_in_time_and_without_recursion(compute: Callable[[Tensor], Tensor]) -> None:
    assert cats_of(lambda x, y: (torch.cat([x, compute(y)]).sum(), torch.cat([x, compute(y)]))) == 1
