"""Small projections of the same activations become one product, if the caller can keep their weights adjacent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.calling import GraphInput
from kvcompile.passes.graph.regions import insert_region, is_region_call
from kvcompile.passes.rewrite import merge_projections as merging
from kvcompile.passes.rewrite.merge_projections import merge_projections

aten = torch.ops.aten
IN = 24
PRODUCTS = (aten.mm.default, aten.addmm.default)


def named(name: str) -> GraphInput:
    return GraphInput(f"L['self']._modules['{name}']._parameters['weight']")


def weights(*out_features: int) -> list[Tensor]:
    return [torch.randn(out, IN) for out in out_features]


def num_products(gm: GraphModule) -> int:
    return sum(node.target in PRODUCTS for node in gm.graph.nodes)


def merged(
    step: Callable[..., Any], args: Sequence[Tensor], names: str, may: Callable[..., bool] = lambda places: True
) -> tuple[GraphModule, tuple[tuple[int, ...], ...]]:
    """The graph of ``step`` with merged projections. ``names`` has a letter for each input; ``x`` is no parameter."""
    gm = make_fx(step, tracing_mode="fake")(*args)
    expected = gm(*args)
    inputs = [GraphInput("L['x']") if name == "x" else named(name) for name in names]
    adjacent = merge_projections(gm, inputs, may)
    given = list(args)
    for first, group in adjacent.items():
        given[first] = torch.cat([args[place] for place in group])
    torch.testing.assert_close(gm(*given), expected, rtol=1e-5, atol=1e-5)
    return gm, tuple(adjacent.values())


def qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    heads = (F.linear(x, weight).unflatten(-1, (-1, 4)).transpose(1, 2) for weight in (q, k, v))
    return tuple(one * 1 for one in heads)


@pytest.mark.parametrize(("batch", "q_len"), [(1, 1), (3, 1), (2, 5)])
def test_queries_keys_and_values_are_one_product_in_the_order_of_their_names(batch: int, q_len: int) -> None:
    gm, adjacent = merged(qkv, [torch.randn(batch, q_len, IN), *weights(16, 8, 8)], "xqkv")
    assert num_products(gm) == 1
    assert adjacent == ((2, 1, 3),)


def test_biases_are_merged_with_their_weights() -> None:
    def step(x: Tensor, q: Tensor, k: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return F.linear(x, q, a), F.linear(x, k, b)

    gm, adjacent = merged(step, [torch.randn(3, IN), *weights(16, 8), torch.randn(16), torch.randn(8)], "xqkab")
    assert num_products(gm) == 1
    assert adjacent == ((2, 1), (4, 3))


def test_projections_with_and_without_a_bias_are_two_products() -> None:
    def step(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, a), F.linear(x, b, e), F.linear(x, c), F.linear(x, d, f)

    args = [torch.randn(3, IN), *weights(8, 8, 8, 8), torch.randn(8), torch.randn(8)]
    gm, adjacent = merged(step, args, "xabcdef")
    assert num_products(gm) == 2
    assert set(adjacent) == {(1, 3), (2, 4), (5, 6)}


def heads_doubled(x: Tensor) -> Tensor:
    return (x.flatten(0, 1) * 2).view(x.shape)


@pytest.mark.parametrize("batch", [1, 2])
def test_regions_read_tensors_of_the_same_strides_as_before(batch: int) -> None:
    """All calls of a region share its code, also calls for layers whose projections stay apart."""

    def step(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, weight).unflatten(-1, (-1, 4)).transpose(1, 2) for weight in (q, k))

    args = [torch.randn(batch, 1, IN), *weights(16, 8)]
    gm = make_fx(step, tracing_mode="fake")(*args)
    expected = [2 * result for result in gm(*args)]
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        output.args = ([insert_region(gm.graph, "doubled", heads_doubled, node) for node in output.args[0]],)
    merge_projections(gm, [GraphInput("L['x']"), named("q"), named("k")], lambda places: True)
    assert num_products(gm) == 1
    for call in filter(is_region_call, gm.graph.nodes):
        read, *_ = getattr(gm, call.args[1]).graph.find_nodes(op="placeholder")
        assert call.args[2].meta["val"].stride() == read.meta["val"].stride()
    whole = torch.cat([args[2], args[1]])
    torch.testing.assert_close(gm(args[0], args[1], whole), expected, rtol=1e-5, atol=1e-5)


def test_activations_that_differ_are_not_merged() -> None:
    gm, adjacent = merged(
        lambda x, q, k: (F.linear(x, q), F.linear(x + 1, k)), [torch.randn(3, IN), *weights(8, 8)], "xqk"
    )
    assert (num_products(gm), adjacent) == (2, ())


def test_only_parameters_are_merged() -> None:
    step = lambda x, q, k: (F.linear(x, q), F.linear(x, k))  # noqa: E731
    gm, adjacent = merged(step, [torch.randn(3, IN), *weights(8, 8)], "xqx")
    assert (num_products(gm), adjacent) == (2, ())


def test_a_weight_that_the_graph_changes_is_not_merged() -> None:
    def step(x: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        out = F.linear(x, q), F.linear(x, k)
        k.copy_(q)
        return out

    gm = make_fx(step, tracing_mode="fake")(torch.randn(3, IN), *weights(8, 8))
    assert merge_projections(gm, [GraphInput("L['x']"), named("q"), named("k")], lambda places: True) == {}


@pytest.mark.parametrize(("out_features", "dtype"), [(6, torch.float32), (12, torch.bfloat16)])
def test_results_that_would_begin_within_a_vector_load_are_not_merged(out_features: int, dtype: torch.dtype) -> None:
    args = [x.to(dtype) for x in (torch.randn(3, IN), *weights(out_features, out_features))]
    gm = make_fx(lambda x, q, k: (F.linear(x, q), F.linear(x, k)), tracing_mode="fake")(*args)
    is_merged = bool(merge_projections(gm, [GraphInput("L['x']"), named("q"), named("k")], lambda places: True))
    assert is_merged == (out_features * dtype.itemsize % 16 == 0)


def test_a_weight_that_is_not_transposed_is_not_merged() -> None:
    args = [torch.randn(3, IN), torch.randn(IN, 8), torch.randn(IN, 8)]
    gm, adjacent = merged(lambda x, q, k: (x @ q, x @ k), args, "xqk")
    assert (num_products(gm), adjacent) == (2, ())


def test_a_weight_has_one_place_in_memory() -> None:
    def step(x: Tensor, y: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, a), F.linear(x, b), F.linear(y, a), F.linear(y, c)

    gm, adjacent = merged(step, [torch.randn(3, IN), torch.randn(3, IN), *weights(8, 8, 8)], "xxabc")
    assert (num_products(gm), adjacent) == (3, ((2, 3),))


def test_layers_that_share_weights_are_merged_alike() -> None:
    def step(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.linear(x, a), F.linear(x, b), F.linear(y, b), F.linear(y, a)

    gm, adjacent = merged(step, [torch.randn(3, IN), torch.randn(2, IN), *weights(8, 8)], "xxab")
    assert (num_products(gm), adjacent) == (2, ((2, 3),))


def test_nothing_is_merged_if_the_caller_cannot_keep_the_weights_adjacent() -> None:
    gm, adjacent = merged(qkv, [torch.randn(1, 1, IN), *weights(16, 8, 8)], "xqkv", lambda places: False)
    assert (num_products(gm), adjacent) == (3, ())


@pytest.mark.parametrize(("rows", "products"), [(128, 1), (129, 3), (2000, 3)])
def test_products_that_fill_the_device_alone_are_not_merged(
    rows: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "_num_multiprocessors", lambda device: 2)
    gm, _ = merged(qkv, [torch.randn(1, rows, IN), *weights(256, 128, 128)], "xqkv")
    assert num_products(gm) == products


def test_all_projections_are_merged_if_two_of_them_leave_the_device_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "_num_multiprocessors", lambda device: 2)
    gm, adjacent = merged(qkv, [torch.randn(1, 1, IN), *weights(512, 128, 128)], "xqkv")
    assert (num_products(gm), adjacent) == (1, ((2, 1, 3),))
