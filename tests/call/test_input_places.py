"""Weights that are tensor subclasses, which AOTAutograd unwraps, may come before, between and after caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.testing._internal.two_tensor import TwoTensor

from kvcompile import last_report
from kvcompile.call.inputs import graph_inputs
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, MAX_LEN, HEAD_DIM = 2, 2, 70, 16

pytestmark = pytest.mark.usefixtures("seed_without_grad", "without_code_generation")


def weight() -> TwoTensor:
    """A tensor that holds two tensors; each operation runs on both."""
    return TwoTensor(torch.randn(HEAD_DIM, HEAD_DIM), torch.randn(HEAD_DIM, HEAD_DIM))


def test_a_subclass_of_subclasses_takes_the_place_of_all_its_parts() -> None:
    inputs = [torch.zeros(1), TwoTensor(weight(), weight()), torch.zeros(1), 3]
    graph = Graph()
    for index, value in enumerate(inputs):
        graph.placeholder(f"input_{index}").meta["example_value"] = value
    graph.output(())
    records = graph_inputs(GraphModule(torch.nn.Module(), graph), inputs, ["a", "b", "c", "d"])
    assert [known.dynamo_index for known in records] == [0, None, None, None, None, 2, 3]


def static_step(before: Tensor, q: Tensor, kc: Tensor, between: Tensor, vc: Tensor, pos: Tensor, after: Tensor) -> Any:
    kc.index_copy_(2, pos, q + 1)
    vc.index_copy_(2, pos, q * 2)
    return F.scaled_dot_product_attention(q, kc, vc), before @ between + after


def growing_step(before: Tensor, q: Tensor, kc: Tensor, between: Tensor, vc: Tensor, pos: Tensor, after: Tensor) -> Any:
    kc, vc = torch.cat([kc, q + 1], 2), torch.cat([vc, q * 2], 2)
    return F.scaled_dot_product_attention(q, kc, vc), before @ between + after, kc, vc


@pytest.mark.parametrize("step", [static_step, growing_step])
def test_caches_are_packed_beside_weights_that_are_subclasses(step: Any) -> None:
    q = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
    before, between, after = weight(), weight(), weight()
    kc, vc = torch.randn(2, BATCH, HEADS, MAX_LEN, HEAD_DIM).unbind()
    kc, vc = kc.clone(), vc.clone()
    expected = [kc.clone(), vc.clone()]
    compiled = torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})
    for position in (5, 6, 7):
        pos = torch.tensor([position])
        out, product, *grown = compiled(before, q, kc, between, vc, pos, after)
        reference, expected_product, *expected_grown = step(before, q, expected[0], between, expected[1], pos, after)
        kc, vc = grown or (kc, vc)
        expected = expected_grown or expected
        assert isinstance(kc, PackedTensor)
        assert isinstance(vc, PackedTensor)
        torch.testing.assert_close(out, reference, rtol=0, atol=0.05)
        for part in ("a", "b"):
            torch.testing.assert_close(getattr(product, part), getattr(expected_product, part))
    torch.testing.assert_close(kc.dequantize(), expected[0], rtol=0, atol=0.05)
    assert [site.reason for site in last_report().sites] == [None]
