"""One operator increases the numbers of tokens of all layers, and everything else is computed from its results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import kvcompile
from kvcompile.passes.rewrite.merge_counters import merge_counters

aten = torch.ops.aten
LAST = torch.iinfo(torch.int64).max


def counts(*values: int, dtype: torch.dtype = torch.int64) -> list[Tensor]:
    return [torch.tensor(value, dtype=dtype) for value in values]


def increases(gm: GraphModule) -> list[int]:
    """The number of counters that each operator increases together."""
    return [len(node.args[0]) for node in gm.graph.find_nodes(op="call_function", target=aten._foreach_add.Scalar)]


def merged(step: Callable[..., Any], args: list[Tensor], mode: str = "fake") -> GraphModule:
    """The graph of ``step`` with merged counters, which has the same results and leaves the same values in ``args``."""
    gm = make_fx(step, tracing_mode=mode)(*args)
    before, after = copy.deepcopy(args), copy.deepcopy(args)
    expected = gm(*before)
    merge_counters(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert all("val" in node.meta for node in gm.graph.nodes if node.op == "call_function")
    torch.testing.assert_close(gm(*after), expected, rtol=0, atol=0)
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    return gm


def add(number: int, *counters: Tensor) -> None:
    for counter in counters:
        counter.copy_(counter + number)


def positions_and_lengths(*counters: Tensor) -> list[Tensor]:
    """What three tokens of each layer need: their positions, and the length of the cache with them."""
    positions = [torch.arange(3) + counter for counter in counters]
    lengths = [counter + 3 for counter in counters]
    for counter, length in zip(counters, lengths, strict=True):
        counter.copy_(length)
    return [*positions, *(length * 2 for length in lengths)]


@pytest.mark.parametrize("values", [(0, 0), (5, 5, 5), (7, 0, 2), (-1, LAST - 1, LAST)])
def test_one_operator_increases_all_counters_and_everything_depends_on_its_results(values: tuple[int, ...]) -> None:
    gm = merged(positions_and_lengths, counts(*values))
    assert increases(gm) == [len(values)]
    for counter in gm.graph.find_nodes(op="placeholder"):
        assert {user.target for user in counter.users} == {aten._foreach_add.Scalar, aten.copy_.default}


def test_int32_wraps_around_too() -> None:
    gm = merged(positions_and_lengths, counts(1, torch.iinfo(torch.int32).max, dtype=torch.int32))
    assert increases(gm) == [2]


def test_a_counter_may_have_dimensions_of_size_1() -> None:
    gm = merged(positions_and_lengths, [torch.tensor([4]), torch.tensor([[6]])])
    assert increases(gm) == [2]


def test_counters_that_differ_in_step_or_dtype_are_merged_apart() -> None:
    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, g: Tensor) -> None:
        add(1, a, b, e, f, g)
        add(2, c, d)

    gm = merged(step, [*counts(1, 2, 3, 4), *counts(5, 6, dtype=torch.int32), *counts(7)])
    assert sorted(increases(gm)) == [2, 2, 3]


def test_a_single_counter_stays_as_it_is() -> None:
    gm = make_fx(positions_and_lengths, tracing_mode="fake")(*counts(3))
    code = gm.code
    merge_counters(gm.graph)
    gm.recompile()
    assert gm.code == code


def increased_and_returned(a: Tensor, b: Tensor) -> list[Tensor]:
    add(1, a, b)
    return [a, b]


def times_two(a: Tensor, b: Tensor) -> None:
    a.copy_(a * 2)
    b.copy_(b * 2)


def scaled(a: Tensor, b: Tensor) -> None:
    a.copy_(torch.add(a, 1, alpha=3))
    b.copy_(torch.add(b, 1, alpha=3))


def exchanged(a: Tensor, b: Tensor) -> None:
    totals = a + 1, b + 1
    b.copy_(totals[0])
    a.copy_(totals[1])


def by_each_other(a: Tensor, b: Tensor) -> None:
    totals = a + b, b + a
    a.copy_(totals[0])
    b.copy_(totals[1])


def twice(a: Tensor, b: Tensor) -> None:
    add(1, a, b)
    add(1, a, b)


@pytest.mark.parametrize("step", [increased_and_returned, times_two, scaled, exchanged, by_each_other, twice])
def test_other_changes_of_an_input_stay_as_they_are(step: Callable[..., Any]) -> None:
    gm = make_fx(step, tracing_mode="fake")(*counts(3, 8))
    merge_counters(gm.graph)
    assert increases(gm) == []


def test_an_input_that_the_graph_returns_stays_as_it_is() -> None:
    gm = make_fx(lambda a, b: add(1, a, b), tracing_mode="fake")(*counts(3, 8))
    gm.graph.output_node().args = (gm.graph.find_nodes(op="placeholder")[:1],)
    merge_counters(gm.graph)
    assert increases(gm) == []


@pytest.mark.parametrize(
    "args",
    [
        [torch.tensor(1.0), torch.tensor(2.0)],
        [torch.tensor(1, dtype=torch.uint8), torch.tensor(2, dtype=torch.uint8)],
        [torch.tensor([1, 2]), torch.tensor([3, 4])],
        [torch.tensor([], dtype=torch.long), torch.tensor([], dtype=torch.long)],
    ],
    ids=["floats", "bytes", "two numbers", "no numbers"],
)
def test_inputs_that_are_no_counters_stay_as_they_are(args: list[Tensor]) -> None:
    assert increases(merged(lambda a, b: add(1, a, b), args)) == []


def test_a_symbolic_number_of_tokens_stays_as_it_is() -> None:
    def step(a: Tensor, b: Tensor, x: Tensor) -> None:
        for counter in (a, b):
            counter.copy_(counter + x.shape[0])

    assert increases(merged(step, [*counts(1, 2), torch.zeros(5)], mode="symbolic")) == []


class TestStepsOfAModel:
    """Three layers of a Llama, with static caches that eager code has filled to different lengths."""

    @staticmethod
    def compare(compiled: Any, model: Any, num_tokens: int) -> list[int]:
        """Compare two compiled steps with eager steps; returns the lengths of the caches afterwards."""
        cache = kvcompile.static_cache(model, 2, 64, "bfloat16")
        model(input_ids=torch.randint(0, 97, (2, 9)), past_key_values=cache)
        cache.layers[1].cumulative_length.add_(4)
        cache.layers[2].cumulative_length.sub_(2)
        expected = copy.deepcopy(cache)
        for _ in range(2):
            ids = torch.randint(0, 97, (2, num_tokens))
            logits = compiled(input_ids=ids, past_key_values=cache).logits
            torch.testing.assert_close(logits, model(input_ids=ids, past_key_values=expected).logits)
        for own, other in zip(cache.layers, expected.layers, strict=True):
            torch.testing.assert_close(own.keys.dequantize(), other.keys.dequantize())
        lengths = [int(layer.cumulative_length) for layer in cache.layers]
        assert lengths == [int(layer.cumulative_length) for layer in expected.layers]
        return lengths

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("num_tokens", [1, 3])
    @pytest.mark.parametrize("on_cuda", [True, False], ids=["as on a GPU", "on a CPU"])
    @pytest.mark.usefixtures("fresh_compiler")
    def test_on_a_gpu_one_operator_counts_the_tokens_of_all_layers(
        self, on_cuda: bool, num_tokens: int, rewritten_graphs: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiny_llama = pytest.importorskip("tiny_llama")
        monkeypatch.setattr("kvcompile.passes.calling.Rewritten.on_cuda", on_cuda)
        model = tiny_llama.attention_llama(num_layers=3)
        options = {"policy": "bfloat16", "on_unsupported": "error"}
        compiled = torch.compile(model, backend="kvquant", options=options)
        added = 2 * num_tokens
        assert self.compare(compiled, model, num_tokens) == [9 + added, 13 + added, 7 + added]
        (graph,) = rewritten_graphs
        operators = graph.find_nodes(op="call_function", target=aten._foreach_add.Scalar)
        assert [len(node.args[0]) for node in operators] == ([3] if on_cuda else [])
