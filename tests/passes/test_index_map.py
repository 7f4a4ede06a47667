"""The map of a view, applied to the numbers of its base, gives the numbers of the view."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import sympy
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.passes.graph.index_map import Factor, IndexMap, follow, reshape_groups

View = Callable[[Tensor], Tensor]

SHAPE = (2, 6, 4, 3)
SIZES = st.sampled_from([SHAPE, (4, 6, 1, 8), (12,), (1, 5, 1, 2, 2)])
OTHER_SIZES = {SHAPE: (4, 12, 8, 6), (4, 6, 1, 8): (8, 12, 1, 4), (12,): (24,), (1, 5, 1, 2, 2): (1, 7, 1, 4, 6)}


def path(graph: Graph) -> list[Node]:
    """The nodes from the only input to the only output."""
    found: list[Node] = []
    node = graph.output_node().args[0]
    while node.op == "call_function":
        found.insert(0, node)
        node = node.args[0]
    return found


def traced(chain: Callable[[Tensor], Tensor], x: Tensor, mode: str = "fake") -> GraphModule:
    return make_fx(torch.func.functionalize(chain), tracing_mode=mode)(x)


def map_of(graph: Graph) -> IndexMap | None:
    (base,) = graph.find_nodes(op="placeholder")
    return follow(IndexMap.identity(base.meta["val"].shape), *path(graph))


def numbers(index_map: IndexMap, shape: Sequence[int], value: Callable[[Any], int] = int) -> Tensor:
    """The numbers of the view that ``index_map`` describes, of a base that counts from 0."""
    factors = [factor for dim in index_map.dims for factor in dim]
    sizes = [value(factor.size) for factor in factors]
    indices = [torch.full(sizes, value(start)) for start in index_map.starts]
    for place, factor in enumerate(factors):
        if factor.axis is not None:
            digits = torch.arange(sizes[place]).view([-1 if at == place else 1 for at in range(len(sizes))])
            indices[factor.axis] = indices[factor.axis] + value(factor.step) * digits
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    result = sum((index * stride for index, stride in zip(indices, strides, strict=True)), torch.zeros(sizes).long())
    return result.reshape([math.prod(value(factor.size) for factor in dim) for dim in index_map.dims])


def counted(shape: Sequence[int]) -> Tensor:
    return torch.arange(math.prod(shape)).view(*shape)


# Random chains of views

Choice = tuple[str, int, int, int]


def permuted(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    dims = list(range(x.dim()))
    dims = dims[one % x.dim() :] + dims[: one % x.dim()]
    return x.permute(dims if turn % 2 else dims[::-1])


def sliced(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    dim, start = one % x.dim(), other % 5 - 2
    stop = (None, -1, 2, 4)[turn % 4]
    return x[(slice(None),) * dim + (slice(start, stop, 1 + turn % 3),)]


def divided(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    dim = one % x.dim()
    sizes = next(((size, -1) for size in (2, 3) if x.shape[dim] % size == 0), (1, -1))
    return x.unflatten(dim, sizes[:: 1 if turn % 2 else -1])


def flattened(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    first, last = sorted((one % x.dim(), other % x.dim()))
    return x.flatten(first, last)


def regrouped(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    return x.reshape(next((-1, size) for size in (4, 3, 2, 1) if x.numel() % size == 0))


def expanded(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    dim = one % (x.dim() + 1)
    return x.unsqueeze(dim).expand(*x.shape[:dim], 1 + turn % 3, *x.shape[dim:])


def repeated(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    return x.repeat(*((2,) if turn % 2 else ()), *(2 if dim == one % x.dim() else 1 for dim in range(x.dim())))


def split(x: Tensor, one: int, other: int, turn: int) -> Tensor:
    dim = one % x.dim()
    return x.split(2, dim)[-1] if x.shape[dim] else x  # PyTorch 2.11 cannot trace a split of nothing


VIEWS: dict[str, Callable[[Tensor, int, int, int], Tensor]] = {
    "select": lambda x, one, other, turn: x.select(one % x.dim(), (0, 1, -1)[other % 3]) if x.dim() > 1 else x,
    "slice": sliced,
    "narrow": lambda x, one, other, turn: x.narrow(one % x.dim(), 1, 1),
    "permute": permuted,
    "transpose": lambda x, one, other, turn: x.transpose(one % x.dim(), other % x.dim() - x.dim()),
    "movedim": lambda x, one, other, turn: x.movedim(one % x.dim(), other % x.dim()),
    "divide": divided,
    "flatten": flattened,
    "regroup": regrouped,
    "unsqueeze": lambda x, one, other, turn: x.unsqueeze(-1 - one % (x.dim() + 1)),
    "squeeze": lambda x, one, other, turn: x.squeeze(one % x.dim()) if turn % 2 else x.squeeze(),
    "expand": expanded,
    "repeat": repeated,
    "repeat_interleave": lambda x, one, other, turn: x.repeat_interleave(2, one % x.dim()),
    "split": split,
    "chunk": lambda x, one, other, turn: x.chunk(2, one % x.dim())[turn % 2 - 1],
    "unbind": lambda x, one, other, turn: x.unbind(one % x.dim())[other % 2] if x.dim() > 1 else x,
    "clone": lambda x, one, other, turn: x.clone(),
    "unfold": lambda x, one, other, turn: x.unfold(one % x.dim(), 1, 2),
    "diagonal": lambda x, one, other, turn: x.diagonal() if x.dim() > 1 else x,
    "flip": lambda x, one, other, turn: x.flip(one % x.dim()),
}
NUMBER = st.integers(0, 11)
CHAINS = st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), NUMBER, NUMBER, NUMBER), min_size=1, max_size=6)


def chain_of(choices: list[Choice]) -> View:
    def chain(x: Tensor) -> Tensor:
        for name, *numbers in choices:
            x = VIEWS[name](x, *numbers) if x.dim() else x
        return x

    return chain


def is_possible(chain: View, x: Tensor) -> bool:
    try:
        return chain(x).numel() <= 5000
    except (IndexError, RuntimeError, ValueError):
        return False


@settings(max_examples=120, deadline=None)
@given(SIZES, CHAINS)
def test_a_map_gives_the_numbers_of_the_view(shape: tuple[int, ...], choices: list[Choice]) -> None:
    x, chain = counted(shape), chain_of(choices)
    if is_possible(chain, x):
        index_map = map_of(traced(chain, x).graph)
        assert index_map is None or torch.equal(numbers(index_map, shape), chain(x))


@settings(max_examples=20, deadline=None)
@example((2, 6, 4, 3), [("split", 1, 0, 0), ("flatten", 0, 2, 0)])
@given(SIZES, CHAINS)
def test_a_map_of_symbolic_sizes_holds_for_all_sizes(shape: tuple[int, ...], choices: list[Choice]) -> None:
    x, chain = counted(shape), chain_of(choices)
    if not is_possible(chain, x):
        return
    gm = traced(chain, x, "symbolic")
    index_map = map_of(gm.graph)
    if index_map is None:
        return
    for sizes in (shape, OTHER_SIZES[shape]):
        if has_the_same_graph(gm, sizes):
            known = values_of_symbols(gm, sizes)
            assert torch.equal(numbers(index_map, sizes, known), chain(counted(sizes)))


def has_the_same_graph(gm: GraphModule, sizes: Sequence[int]) -> bool:
    (base,) = gm.graph.find_nodes(op="placeholder")
    known = values_of_symbols(gm, sizes)
    if [known(size) for size in base.meta["val"].shape] != list(sizes):
        return False  # the trace has made a size constant
    env: ShapeEnv = gm.shape_env
    # PyTorch drops some guards on divisions, such as the one that tells into how many parts a tensor is split.
    values = numbers_of_symbols(gm, sizes)
    hold = all(env.replace(guard.expr).xreplace(values) == sympy.true for guard in env.guards)
    return hold and env.evaluate_guards_for_args([base.meta["val"]], [counted(sizes)])


def values_of_symbols(gm: GraphModule, sizes: Sequence[int]) -> Callable[[Any], int]:
    values = numbers_of_symbols(gm, sizes)
    return lambda size: int(size.node.expr.xreplace(values)) if isinstance(size, torch.SymInt) else size


def numbers_of_symbols(gm: GraphModule, sizes: Sequence[int]) -> dict[Any, int]:
    (base,) = gm.graph.find_nodes(op="placeholder")
    pairs = zip(base.meta["val"].shape, sizes, strict=True)
    return {
        size.node.expr: sympy.Integer(value)
        for size, value in pairs
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol
    }


# Views that have a map

WITH_A_MAP: dict[str, View] = {
    "layer of a stack": lambda x: x[1, :, 2],
    "heads repeated in place": lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "heads repeated in turn": lambda x: x.repeat(1, 2, 1, 1),
    "both": lambda x: x.repeat_interleave(2, 1).repeat(1, 2, 1, 1),
    "one projection": lambda x: x.unflatten(1, (3, 2)).unbind(1)[1].transpose(1, 2),
    "every second token": lambda x: x[:, 1::2].chunk(3, 1)[1],
    "merged and divided again": lambda x: x.flatten(0, 1).mT.unflatten(0, x.shape[:2]),
    "divided and merged again": lambda x: x.unflatten(1, (3, 2))[None].flatten(2, 3).flatten(0, 1),
    "divided in three": lambda x: x.unflatten(1, (3, 1, 2, 1)).squeeze(),
    "last rows": lambda x: x[:, -2:, -1:],
}


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("view", WITH_A_MAP.values(), ids=WITH_A_MAP)
def test_these_views_have_a_map(view: View, mode: str) -> None:
    x = counted(SHAPE)
    gm = traced(view, x, mode)
    index_map = map_of(gm.graph)
    assert index_map is not None
    assert torch.equal(numbers(index_map, SHAPE, values_of_symbols(gm, SHAPE)), view(x))


WITHOUT_A_MAP: dict[str, View] = {
    "an unknown view": lambda x: x.diagonal(),
    "other numbers": lambda x: x.flip(1),
    "an overlapping view": lambda x: x.unfold(1, 2, 1),
    "parts of two dimensions": lambda x: x.transpose(0, 1).reshape(4, 3, 4, 3),
}


@pytest.mark.parametrize("view", WITHOUT_A_MAP.values(), ids=WITHOUT_A_MAP)
def test_these_views_have_no_map(view: View) -> None:
    assert map_of(traced(view, counted(SHAPE)).graph) is None


def test_merged_dimensions_cannot_be_sliced() -> None:
    merged = IndexMap.identity((2, 3)).reshaped((6,))
    assert merged is not None
    assert merged.dims == ((Factor(0, 2), Factor(1, 3)),)
    assert merged.sliced(0, 1, 2) is None


def test_a_reshape_has_the_smallest_groups() -> None:
    assert reshape_groups([2, 6, 4], [12, 2, 1, 2]) == [(2, 1), (1, 3)]
    assert reshape_groups([2, 1], [1, 2]) == [(0, 1), (1, 1), (1, 0)]
    assert reshape_groups([4, 6], [24, 2]) is None
