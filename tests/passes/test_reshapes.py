"""Graphs that run without Inductor do not depend on traced strides."""

from __future__ import annotations

import torch
from torch import Tensor, ops
from torch.fx.experimental.proxy_tensor import make_fx

from kvcompile.passes.graph.aten import replace_views_by_reshapes

aten = ops.aten


def test_a_view_copies_where_strides_allow_no_view() -> None:
    gm = make_fx(lambda x: x.view(6), tracing_mode="fake")(torch.zeros(2, 3))
    x = torch.arange(6.0).reshape(3, 2).mT
    replace_views_by_reshapes(gm)
    assert torch.equal(gm(x), x.reshape(6))


def test_a_reshape_to_the_same_shape_is_right_for_other_strides() -> None:
    """PyTorch traces it as ``as_strided`` with the strides of its input."""

    def reshaped(x: Tensor) -> Tensor:
        return aten.as_strided.default(x, [2, 3], [1, 2]) + 1

    gm = make_fx(reshaped, tracing_mode="fake")(torch.zeros(3, 2).mT)
    x = torch.arange(6.0).reshape(2, 3)
    assert not torch.equal(gm(x), x + 1)
    replace_views_by_reshapes(gm)
    assert torch.equal(gm(x), x + 1)


def test_other_elements_of_a_storage_are_still_read() -> None:
    gm = make_fx(lambda x: aten.as_strided.default(x, [2], [3], 1), tracing_mode="fake")(torch.zeros(2, 3))
    replace_views_by_reshapes(gm)
    assert gm(torch.arange(6.0).reshape(2, 3)).tolist() == [1.0, 4.0]
