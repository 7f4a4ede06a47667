"""Positions that a step reads from a tensor with ``.item()``, in one graph, as ExecuTorch's and other static caches do.

``torch._dynamo.config.capture_scalar_outputs`` keeps such a step in one graph. Compiled steps equal plain code in a
lossless format. Graphs run node by node.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor

import kvcompile
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, MAX_LEN, HEAD_DIM = 2, 2, 70, 32

Write = Callable[[Tensor, Tensor, int], object]
"""Writes vectors [batch, n, heads, head_dim] to a cache [batch, tokens, heads, head_dim] from a position on."""

pytestmark = pytest.mark.usefixtures("fresh_compiler", "without_code_generation")


def narrow(cache: Tensor, x: Tensor, start: int) -> None:
    cache.narrow(1, start, x.shape[1]).copy_(x)


def assigned_slice(cache: Tensor, x: Tensor, start: int) -> None:
    torch._check(start >= 0)
    torch._check(start + x.shape[1] <= MAX_LEN)
    cache[:, start : start + x.shape[1]] = x


@pytest.mark.parametrize("write", [narrow, assigned_slice])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_cache_is_packed_that_is_written_from_a_position_in_a_tensor(write: Write) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        start = positions[0].item()
        write(keys, k, start), write(values, v, start)
        visible = torch.arange(MAX_LEN) <= positions[:, None]
        return F.scaled_dot_product_attention(q, keys.transpose(1, 2), values.transpose(1, 2), visible)

    caches = [torch.zeros(BATCH, MAX_LEN, HEADS, HEAD_DIM) for _ in range(2)]
    expected = [x.clone() for x in caches]
    run = torch.compile(
        step, backend="kvquant", fullgraph=True, options={"policy": "float32", "on_unsupported": "error"}
    )
    start = 0
    for n in (63, 1, 1, 3):
        q, k, v = torch.randn(BATCH, HEADS, n, HEAD_DIM), *torch.randn(2, BATCH, n, HEADS, HEAD_DIM)
        positions = torch.arange(start, start + n)
        out = run(q, k, v, *caches, positions)
        torch.testing.assert_close(out, step(q, k, v, *expected, positions), rtol=1e-4, atol=1e-5)
        start += n
    for cache, other in zip(caches, expected, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.dequantize(), other)
    assert [site.reason for site in kvcompile.last_report().sites] == [None]
    with pytest.raises((IndexError, RuntimeError)):  # behind the last token
        run(q, k, v, *caches, torch.arange(MAX_LEN - 1, MAX_LEN + 2))
    assert torch.equal(caches[0].dequantize(), expected[0])
