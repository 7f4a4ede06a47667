"""Views of packed caches show present values, and all other operators read dequantized values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from packed_caches import HEAD_DIM, INT8, assert_same, every_order, pair, quantized, values
from torch import Tensor

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.live_view import LiveView
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.tensor import PackedTensor

pytestmark = pytest.mark.usefixtures("seed_without_grad")


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda c: c.flatten(0, 1),
    "unsqueeze": lambda c: c.unsqueeze(0),
    "channels": lambda c: c[..., :8],
    "one channel": lambda c: c[..., 3],
    "every second token": lambda c: c[:, :, ::2],
    "view": lambda c: c.view(6, -1, 4),
    "repeated heads": lambda c: c[:, :, None].expand(2, 3, 2, 70, HEAD_DIM),
    "a view of tokens": lambda c: c[:, :, 3:66].unsqueeze(2),
    "permuted": lambda c: c.transpose(1, 2).unsqueeze(0).permute(0, 4, 2, 1, 3),
    "chunks of channels": lambda c: c.chunk(2, -1)[1],
    "a diagonal": lambda c: c.diagonal(0, 1, 2),
    "windows": lambda c: c.unfold(2, 5, 3),
    "as_strided": lambda c: c.as_strided((3, 7), (1, 20), 50),
    "as_strided of a view": lambda c: c[:, :, 5:9].as_strided((90,), (1,)),
    "as_strided of a permutation": lambda c: torch.as_strided(x := c.transpose(1, 2), x.shape, x.stride()),
    "integers": lambda c: c.view(torch.int32),
    "bytes": lambda c: c[..., :4].view(torch.uint8),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_shows_the_present_values_and_writes_through_it_reach_the_cache(view, mode):
    with mode():
        cache, plain = pair(PackedLayout("float32", "key", HEAD_DIM))
        seen, expected = view(cache), view(plain)
        assert isinstance(seen, LiveView)
        assert (seen.shape, seen.stride(), seen.dtype) == (expected.shape, expected.stride(), expected.dtype)
        x = values(2, 3, 70, HEAD_DIM)
        for c in (cache, plain):
            c[:, :, 2:69] = x[:, :, 2:69]
        assert torch.equal(seen.clone(), expected)
        if not expected.is_contiguous() and 0 in expected.stride():
            return  # plain PyTorch does not write to expanded memory either
        for v in (seen, expected):
            v.clamp_(0, 1)
        assert_same(cache, plain)


def test_a_live_view_keeps_the_packed_bytes_and_no_values():
    cache, _ = pair(INT8)
    assert cache_nbytes(cache[..., :8], cache.flatten(0, 1)) == cache_nbytes(cache)


def test_the_version_of_a_cache_counts_writes_through_views():
    cache, plain = pair(INT8)
    for c in (cache, plain):
        c.zero_()
        c[0].zero_()
        c.transpose(1, 2)[0].fill_(1)
        c[..., 3].add_(1)
        c.flatten(0, 1).add_(1)
    assert cache._version == plain._version


@every_order
def test_dequantized_values_have_the_strides_of_the_view(axes):
    cache, plain = pair(INT8, axes)
    for order in ((0, 1, 2, 3), (2, 1, 0, 3), (3, 0, 2, 1)):
        view, expected = cache.permute(order), plain.permute(order)
        assert view.dequantize().stride() == view.stride() == expected.stride()
        assert torch.equal(view.dequantize(), expected)
        assert view.narrow(1, 1, 1).dequantize().stride() == expected.narrow(1, 1, 1).clone().stride()


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "arithmetic": lambda c: c * 2 + 1,
    "matmul": lambda c: torch.ones(2, 3, 4, HEAD_DIM) @ c.transpose(2, 3),
    "attention": lambda c: F.scaled_dot_product_attention(torch.ones(2, 6, 4, HEAD_DIM), c, c, enable_gqa=True),
    "repeat_kv": lambda c: c[:, :, None].expand(2, 3, 2, 70, HEAD_DIM).reshape(2, 6, 70, HEAD_DIM),
    "a view": lambda c: c.view(6, 70, HEAD_DIM),
    "channels": lambda c: c[..., 8:] - c[..., :8],
    "a strided slice": lambda c: c[:, :, 1::3],
    "a gather": lambda c: c.gather(2, torch.arange(0, 70, 7)[:, None].expand(2, 3, 10, HEAD_DIM).contiguous()),
    "stack": lambda c: torch.stack([c, c]),
    "cat of channels": lambda c: torch.cat([c, c], -1),
    "cat behind a plain tensor": lambda c: torch.cat([torch.ones(2, 3, 1, HEAD_DIM), c], 2),
    "another dtype": lambda c: c.to(torch.float16),
    "where with elements": lambda c: torch.where(torch.ones(70, HEAD_DIM, dtype=torch.bool), c, 0.0),
    "einsum": lambda c: torch.einsum("bhtd,d->bht", c, torch.ones(HEAD_DIM)),
    "copy to a plain tensor": lambda c: torch.zeros(2, 3, 70, HEAD_DIM).copy_(c),
    "sum": lambda c: c[1, :, 5:66].sum(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_other_operator_reads_dequantized_values(read, mode):
    with mode():
        cache, plain = pair(INT8)
        result, expected = read(cache), read(plain)
        assert not isinstance(result, PackedTensor)
        if isinstance(result, (LiveView, RepeatedHeads)):
            result = result.clone()
        assert type(result) is Tensor
        torch.testing.assert_close(result, expected)


def test_as_strided_of_a_copy_counts_from_the_first_token_of_the_copy():
    plain = quantized(values(1, 1, 70, HEAD_DIM), INT8)
    copied = PackedTensor.from_dense(plain, INT8)[:, :, 5:].clone()
    assert copied.dequantize().storage_offset() == 0
    strided = copied.as_strided((3, HEAD_DIM), (HEAD_DIM, 1))
    torch.testing.assert_close(strided + 0, plain[0, 0, 5:8])


def test_a_clone_of_a_live_view_is_an_ordinary_tensor():
    cache, plain = pair(INT8)
    copied = cache[..., :8].clone()
    copied += 1
    assert torch.equal(copied, plain[..., :8] + 1)
    assert_same(cache, plain)
