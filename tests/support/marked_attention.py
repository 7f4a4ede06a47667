"""The markers of attention in Dynamo's graph of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from written_out_attention import H_KV, B, D, H, Operands, S, operands

from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.marker import Marker, markers_of

Q = 3


def inputs() -> tuple[Tensor, Tensor, Tensor, Operands]:
    return torch.randn(B, H, Q, D), torch.randn(B, H_KV, S, D), torch.randn(B, H_KV, S, D), operands(Q)


def compiled_by(backend: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=backend, fullgraph=True)(*args)


def marked(fn: Callable[..., Any], *args: Any) -> list[Marker]:
    """The markers of Dynamo's graph of ``fn``."""
    found: list[Marker] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        assert mark_attention(gm) == len(markers_of(gm.graph))
        found.extend(Marker.of(node) for node in markers_of(gm.graph))
        return lambda *given: [torch.zeros(1) for _ in gm.graph.output_node().args[0]]

    compiled_by(backend, fn, args or inputs())
    return found


def value(node: Any) -> Tensor:
    return node.meta["example_value"]
