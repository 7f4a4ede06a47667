"""Views of one tensor share memory unless they take disjoint ranges of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.graph.aliases import share_memory

SHARED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "a view": lambda x: (x, x.transpose(1, 2)),
    "its base": lambda x: (x.view(2, -1), x),
    "two views": lambda x: (x.transpose(1, 2), x[:, :, 3]),
    "ranges that overlap": lambda x: (x[:, 1:4], x[:, 3:]),
    "ranges of two dimensions": lambda x: (x[:, :2], x[:, :, 2:]),
    "a row and a range that has it": lambda x: (x[:, -1], x[:, 4:]),
    "an element and its repetition": lambda x: x[None].expand(2, -1, -1, -1).unbind(),
    "an unknown view": lambda x: (x.diagonal(), x[:, 3:]),
    "memory beyond a range": lambda x: (x[:, :3].as_strided((2, 6, 8), (48, 8, 1)), x[:, 3:]),
    "one part of a division twice": lambda x: (x.chunk(2, 2)[1], x.chunk(2, 2)[1].mT),
}
SEPARATE: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "other values": lambda x: (x, x + 1),
    "a copy": lambda x: (x, x.transpose(1, 2).clone()),
    "ranges side by side": lambda x: (x[:, :3], x[:, 3:]),
    "a row and earlier rows": lambda x: (x[:, -1], x[:, :-1]),
    "parts of a division": lambda x: x.split([2, 6], 2),
    "views of parts": lambda x: (x.unbind(0)[0].mT, x.unbind(0)[1].flatten()),
    "parts of two equal divisions": lambda x: (x.view(2, 6, 2, 4)[:, :, 0], x.view(2, 6, 2, 4)[:, :, 1]),
    "a part of every unit": lambda x: (x.view(2, 6, 2, 4)[..., 0], x.view(2, 6, 2, 4)[..., 1:]),
    "parts of merged dimensions": lambda x: x.flatten(1).split([5, 43], 1),
    "a part and a range": lambda x: (x.split(3, 1)[0], x[:, 3:]),
}


def shares(make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> bool:
    graph = make_fx(torch.func.functionalize(lambda x: make(x * 2)))(torch.empty(2, 6, 8)).graph
    one, other = graph.output_node().args[0]
    assert share_memory(one, other) == share_memory(other, one)
    return share_memory(one, other)


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_these_tensors_share_memory(make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert shares(make)


@pytest.mark.parametrize("make", SEPARATE.values(), ids=SEPARATE)
def test_these_tensors_share_no_memory(make: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    assert not shares(make)
