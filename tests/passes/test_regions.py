"""Layers share the operations of a region: a graph holds them once. Expanded, they compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kvcompile.compilation.graph_compiler
from kvcompile.compat.operators import invoke_subgraph
from kvcompile.compat.tracing import FakeTensorMode
from kvcompile.kernels.formats.rotation import rotate, unrotate
from kvcompile.passes.graph.inline import inline
from kvcompile.passes.graph.regions import expand_regions, insert_region


class Layers(nn.Module):
    """Attention layers with separate caches, one after the other."""

    def __init__(self, num_layers: int, max_len: int = 66) -> None:
        super().__init__()
        for layer in range(num_layers):
            for name in ("keys", "values"):
                self.register_buffer(f"{name}{layer}", torch.zeros(2, 1, max_len, 64))
        self.num_layers = num_layers

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in range(self.num_layers):
            keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            keys.index_copy_(2, position, x.cos())
            values.index_copy_(2, position, x)
            visible = torch.arange(keys.shape[2]) <= position[:, None]
            x = F.scaled_dot_product_attention(x, keys, values, visible)
        return x


def steps(run, num_steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [run(torch.randn(2, 1, 1, 64, generator=generator), torch.tensor([place])) for place in range(num_steps)]


def calls_of_regions(graph: Graph) -> list[str]:
    return [node.args[1] for node in graph.find_nodes(op="call_function", target=invoke_subgraph)]


@pytest.mark.usefixtures("operators_traced")
@pytest.mark.parametrize("policy", ["int4_per_token_head", pytest.param("int4", marks=pytest.mark.slow)])
def test_layers_share_attention_and_the_encoding_of_tokens(
    policy: str, rewritten_graphs: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.compile(Layers(2), backend="kvquant", options={"policy": policy})
    outputs = steps(shared)
    calls = calls_of_regions(rewritten_graphs[0])
    assert len(calls) == 6  # keys, values and attention of two layers
    assert len(set(calls)) == 3
    torch._dynamo.reset()
    rewritten_graphs.clear()
    monkeypatch.setattr(kvcompile.compilation.graph_compiler, "can_call_subgraphs", lambda: False)
    expanded = torch.compile(Layers(2), backend="kvquant", options={"policy": policy})
    for output, expected in zip(outputs, steps(expanded), strict=True):
        assert torch.equal(output, expected)
    assert not calls_of_regions(rewritten_graphs[0])


@pytest.mark.usefixtures("no_kernels_of_inductor", "operators_traced")
def test_generated_code_holds_a_region_once(fresh_compiler: None) -> None:
    compiled = torch.compile(Layers(2), backend="kvquant", options={"policy": "int8_per_token_head"})
    outputs, codes = run_and_get_code(lambda: steps(compiled))
    attention = "kvquant_attention_0"
    assert [code.count(f"def {attention}(") for code in codes] == [1]
    assert codes[0].count(f" = {attention}({attention}_args)") == 2
    plain = steps(Layers(2))
    for output, expected in zip(outputs, plain, strict=True):
        assert (output - expected).norm() < 0.02 * expected.norm()


@pytest.mark.slow
def test_a_cpp_wrapper_gets_the_operations_of_regions(fresh_compiler: None) -> None:
    compiled = torch.compile(
        Layers(2), backend="kvquant", options={"policy": "int8_per_token_head", "cpp_wrapper": True}
    )
    for output, expected in zip(steps(compiled), steps(Layers(2)), strict=True):
        assert (output - expected).norm() < 0.02 * expected.norm()


def statistics(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.sum(0) * scale, x.amax(0)


def doubled(x: Tensor) -> Tensor:
    return x * 2


def graph_of(*inputs: Tensor) -> tuple[GraphModule, list[Node]]:
    gm = GraphModule({}, Graph())
    mode, nodes = FakeTensorMode(), []
    for place, value in enumerate(inputs):
        nodes.append(gm.graph.placeholder(f"x{place}"))
        nodes[-1].meta["val"] = mode.from_tensor(value)
    return gm, nodes


def test_a_region_is_made_once_for_equal_arguments() -> None:
    inputs = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(5, 4)]
    gm, (x, y, longer) = graph_of(*inputs)
    results = [
        *insert_region(gm.graph, "statistics", statistics, x, 2.0),
        *insert_region(gm.graph, "statistics", statistics, y, 2.0),
        *insert_region(gm.graph, "statistics", statistics, y, 3.0),
        *insert_region(gm.graph, "statistics", statistics, longer, 2.0),
        insert_region(gm.graph, "doubled", doubled, x),
    ]
    gm.graph.output(tuple(results))
    gm.graph.lint()
    gm.recompile()
    names = calls_of_regions(gm.graph)
    assert names == ["kvquant_statistics_0"] * 2 + ["kvquant_statistics_1", "kvquant_statistics_2", "kvquant_doubled_0"]
    x, y, longer = inputs
    expected = [
        *statistics(x, 2.0), *statistics(y, 2.0), *statistics(y, 3.0), *statistics(longer, 2.0), doubled(x),
    ]  # fmt: skip
    for result, value, node in zip(gm(*inputs), expected, results, strict=True):
        assert torch.equal(result, value)
        assert node.meta["val"].shape == value.shape
    assert len({id(node.meta["val"].untyped_storage()) for node in results}) == len(results)

    expand_regions(gm)
    assert not calls_of_regions(gm.graph)
    assert not list(gm.children())
    for result, value in zip(gm(*inputs), expected, strict=True):
        assert torch.equal(result, value)


def test_a_graph_with_symbolic_sizes_gets_the_operations() -> None:
    gm = GraphModule({}, Graph())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    value = mode.from_tensor(torch.randn(3, 4))
    size, x = gm.graph.placeholder("size"), gm.graph.placeholder("x")
    size.meta["val"], x.meta["val"] = value.shape[0], value
    out = insert_region(gm.graph, "doubled", doubled, x)
    gm.graph.output(out)
    gm.recompile()
    assert not calls_of_regions(gm.graph)
    assert torch.equal(gm(3, torch.ones(3, 4)), torch.full((3, 4), 2.0))


def test_sizes_that_became_constant_are_numbers() -> None:
    gm, mode = GraphModule({}, Graph()), FakeTensorMode(shape_env=ShapeEnv())
    x, y = (gm.graph.placeholder(name) for name in "xy")
    x.meta["val"], y.meta["val"] = (mode.from_tensor(torch.randn(3, 4)) for _ in "xy")
    assert x.meta["val"].shape == (3, 4) == y.meta["val"].shape  # a guard on each size
    assert isinstance(x.meta["val"].shape[0], torch.SymInt)
    gm.graph.output(tuple(insert_region(gm.graph, "doubled", doubled, node) for node in (x, y)))
    gm.recompile()
    assert calls_of_regions(gm.graph) == ["kvquant_doubled_0"] * 2
    for result in gm(torch.ones(3, 4), torch.ones(3, 4)):
        assert torch.equal(result, torch.full((3, 4), 2.0))


def rotated_twice(x: Tensor) -> Tensor:
    return unrotate(rotate(x) + 1)


def rotated_with_signs(x: Tensor) -> Tensor:
    return rotate(x, seed=3)


@pytest.mark.parametrize("inserted", [insert_region, lambda graph, name, fn, *args: inline(graph, fn, *args)])
def test_a_graph_computes_each_rotation_once(inserted: Callable[..., Node]) -> None:
    inputs = [torch.randn(3, 16), torch.randn(2, 16), torch.randn(2, 32)]
    gm, (x, y, wider) = graph_of(*inputs)
    given = [(rotated_twice, x), (rotated_twice, y), (rotated_with_signs, x), (rotated_twice, wider)]
    results = [inserted(gm.graph, "rotated", fn, node) for fn, node in given]
    gm.graph.output(tuple(results))
    gm.graph.lint()
    gm.recompile()
    signs = [node for node in gm.graph.nodes if node.target is torch.ops.aten.bitwise_and.Tensor]
    assert len(signs) == 3  # rotations of 16 channels, of 16 channels with signs, and of 32 channels
    expected = [rotated_twice(inputs[0]), rotated_twice(inputs[1]), rotated_with_signs(inputs[0])]
    for result, value in zip(gm(*inputs), [*expected, rotated_twice(inputs[2])], strict=True):
        assert torch.equal(result, value)
    expand_regions(gm)
    gm.recompile()
    for result, value in zip(gm(*inputs), [*expected, rotated_twice(inputs[2])], strict=True):
        assert torch.equal(result, value)
