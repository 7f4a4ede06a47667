"""Heads of 512 channels, as in the full attention of Gemma 4, are packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor

B, H, H_KV, S, D = 2, 4, 1, 96, 512


def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor, mask: Tensor) -> Tensor:
    keys.index_copy_(2, pos, k)
    values.index_copy_(2, pos, v)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)


def decoded(policy: str, formats: tuple[str, str], q_len: int) -> tuple[Tensor, Tensor]:
    """The compiled step on packed caches, and the same step on their dequantized content."""
    torch.manual_seed(0)
    pos = torch.arange(q_len) + 70
    q, k, v = (torch.randn(B, heads, q_len, D) for heads in (H, H_KV, H_KV))
    caches = [
        PackedTensor.from_dense(torch.randn(B, H_KV, S, D), PackedLayout(name, role, D))
        for name, role in zip(formats, ("key", "value"), strict=True)
    ]
    plain = [cache.clone() for cache in caches]
    mask = torch.arange(S) <= pos[:, None]
    torch._dynamo.reset()
    options = {"policy": policy, "on_unsupported": "error"}
    with torch.no_grad():
        out = torch.compile(step, backend="kvquant", fullgraph=True, options=options)(q, k, v, *caches, pos, mask)
        for cache, new in zip(plain, (k, v), strict=True):
            cache.index_copy_(2, pos, new)
        keys, values = (cache.dequantize() for cache in plain)
        expected = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
    assert [site.reason for site in last_report().sites] == [None]
    return out, expected


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_per_token_head", "turboquant_3.5bit", "fp8_e4m3"])
@pytest.mark.parametrize("q_len", [1, 5])
def test_heads_of_512_channels_are_packed(name: str, q_len: int) -> None:
    out, expected = decoded(name, (name, name), q_len)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_generated_code_reads_heads_of_512_channels() -> None:
    out, expected = decoded("int8_per_token_head", ("int8_per_token_head",) * 2, 1)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
