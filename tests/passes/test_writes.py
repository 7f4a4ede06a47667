"""The recognised writes of a cache are complete, and take the sizes that are known when they are rewritten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental import _config as symbolic_shapes_config

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.passes.graph.aten import WRITE_OPS
from kvcompile.passes.prove.writes import _MATCHERS

S, D = 70, 32


def step(q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor) -> Tensor:
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return F.scaled_dot_product_attention(q, kc, vc, attn_mask=(torch.arange(S) <= pos)[None])


def test_every_write_operator_has_a_matcher_and_every_matcher_is_of_a_write_operator() -> None:
    """Analyses stop at operators outside ``WRITE_OPS``, and without a matcher no write is understood."""
    assert set(_MATCHERS) == WRITE_OPS


@pytest.mark.usefixtures("without_code_generation")
def test_a_check_after_the_match_may_make_a_length_constant() -> None:
    """The mask makes the length of the keys constant. The values have the same length, so theirs is constant, too."""
    q, k, v = torch.randn(3, 2, 2, 1, D).unbind()
    kc, vc = (
        PackedTensor.from_dense(torch.randn(2, 2, S, D), PackedLayout("int8_per_token_head", role, D))
        for role in ("key", "value")
    )
    args = [q, k, v, kc, vc, torch.tensor([5])]
    expected = step(q, k, v, kc.clone(), vc.clone(), args[5])
    options = {"on_unsupported": "error"}
    with torch.no_grad(), symbolic_shapes_config.patch(use_duck_shape=False):
        out = torch.compile(step, backend="kvquant", dynamic=True, options=options)(*args)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
    assert [site.reason for site in last_report().sites] == [None]
