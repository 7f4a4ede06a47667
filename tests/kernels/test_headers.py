"""A cache that is packed as a whole gets the header of the specification from its kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from stored_bytes import assert_same_sections

from kvcompile.kernels.layout.packed_layout import PackedLayout, Residual
from kvcompile.kernels.spec.packing import pack_tokens
from kvcompile.kernels.spec.residual import header_of
from kvcompile.kernels.store.launch import store_header, store_whole_blocks
from kvcompile.packed import tokens
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, HEAD_DIM = 2, 3, 24
RESIDUALS = [
    Residual(0, 1, torch.float32),
    Residual(2, 0, torch.bfloat16),
    Residual(1, 3, torch.float16),
]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def assert_same_header(x, residual, device, num_written=None, restride=None):
    """Write the header of the tokens ``x`` with the kernel, and compare its bytes with the specification."""
    layout = PackedLayout("int4_per_channel", "key", HEAD_DIM, residual)
    x = x.bfloat16().to(x.dtype)  # Triton's interpreter does not round to nearest
    expected = header_of(layout, x, num_written)
    data = torch.zeros(layout.shape(x.shape[2], *x.shape[:2]), dtype=torch.uint8, device=device)
    on_device = x.to(device) if restride is None else restride(x.to(device))
    store_header(data, on_device, None if num_written is None else num_written.to(device), layout)
    torch.testing.assert_close(data[: layout.header_blocks].cpu(), expected, rtol=0, atol=0)
    assert not data[layout.header_blocks :].any()


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 400])
def test_a_full_cache_ends_with_its_last_token(num_tokens, residual, device):
    assert_same_header(torch.randn(BATCH, HEADS, num_tokens, HEAD_DIM), residual, device)


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
def test_every_head_ends_with_its_last_token_that_is_not_zero(residual, device):
    x = torch.randn(BATCH, HEADS, 330, HEAD_DIM)
    for head, num_written in enumerate((0, 1, 64, 65, 200, 329)):
        x[head // HEADS, head % HEADS, num_written:] = 0.0
    x[1, 0, 310, -1] = float("-inf")
    x[1, 1, 320] = -0.0
    assert_same_header(x, residual, device)


@pytest.mark.parametrize("residual", RESIDUALS, ids=str)
@pytest.mark.parametrize("num_written", [[0], [65], [64, 300], [0, 129]], ids=str)
def test_values_behind_a_known_number_of_written_tokens_do_not_count(num_written, residual, device):
    x = torch.randn(BATCH, HEADS, 300, HEAD_DIM)
    x[:, :, 250:] = 0.0
    count = torch.tensor(num_written)
    assert_same_header(x, residual, device, count if len(num_written) > 1 else count[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_vectors_may_have_any_strides_and_any_dtype(axes, dtype, device):
    def restride(x):
        return x.permute(axes).contiguous().permute([axes.index(dim) for dim in range(4)])

    x = torch.randn(BATCH, HEADS, 130, HEAD_DIM, dtype=dtype)
    assert_same_header(x, RESIDUALS[2], device, restride=restride)


@pytest.mark.parametrize("format_name", ["int4_per_channel", "int2_per_channel", "int8_per_channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks_of_tokens_that_share_scales_get_the_bytes_of_the_specification(format_name, dtype, device):
    layout = PackedLayout(format_name, "key", HEAD_DIM)
    x = torch.randn(BATCH, HEADS, 192, HEAD_DIM, dtype=dtype)
    x[0, 1, 70] = float("inf")
    expected = pack_tokens(layout, x)
    data = torch.full((len(expected) + 1, *expected.shape[1:]), 77, dtype=torch.uint8, device=device)
    store_whole_blocks(data, x.transpose(1, 2).contiguous().transpose(1, 2).to(device), layout)
    assert_same_sections(layout, data[:-1].cpu(), expected, device)
    assert (data[-1] == 77).all()


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("format_name", ["int4_per_channel", "int8_per_token_head"])
def test_a_packed_cache_has_the_bytes_of_the_specification(format_name, num_tokens, device, monkeypatch):
    layout = PackedLayout(format_name, "key", 32, Residual(1, 1, torch.bfloat16))
    x = torch.randn(BATCH, HEADS, num_tokens, 32, dtype=torch.bfloat16)
    expected = PackedTensor.from_dense(x, layout).packed
    monkeypatch.setattr(tokens, "runs_kernels", lambda data: True)
    packed = PackedTensor.from_dense(x.to(device), layout).packed.cpu()
    header = layout.header_blocks
    torch.testing.assert_close(packed[:header], expected[:header], rtol=0, atol=0)
    assert_same_sections(layout, packed, expected, device)
