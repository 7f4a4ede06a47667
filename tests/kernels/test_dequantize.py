"""The dequantize kernel reads the values that the specification reads."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from formats_of_every_kind import KINDS, SHAPES
from packed_bytes import empty_packed
from read_values import assert_reads_like_the_specification, packed_cache

from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.packing import write_tokens_
from kvcompile.kernels.tiles import runs

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

WINDOW = "[recent=1,sinks=1,float32]"


@pytest.mark.parametrize("format_name", [name if "channel" not in name else name + WINDOW for name in KINDS])
def test_every_format_is_read(format_name, device):
    layout, data = packed_cache(format_name, 64, 100, 130)
    assert_reads_like_the_specification(layout, data, 100, torch.float32, device)


@pytest.mark.parametrize(("format_name", "head_dim"), SHAPES)
def test_every_head_dim_is_read_without_padding(format_name, head_dim, device):
    layout, data = packed_cache(format_name, head_dim, 70, 70, "value")
    assert_reads_like_the_specification(layout, data, 70, torch.float32, device)


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize(
    ("format_name", "head_dim"),
    [("turboquant_3bit", 96), ("turboquant_4bit", 192), ("turboquant_2.5bit", 256), ("int2_per_token_head", 16)],
)
def test_planes_with_padding_and_of_many_runs_are_rotated_back(format_name, head_dim, role, device):
    layout, data = packed_cache(format_name, head_dim, 70, 70, role, batch=1, heads=1)
    assert_reads_like_the_specification(layout, data, 70, torch.float32, device)


@pytest.mark.skipif(not INTERPRETED, reason="the number of groups follows from the GPU")
@pytest.mark.parametrize(("head_dim", "groups"), [(96, 4), (256, 8)])
def test_a_rotation_in_groups_of_rows_is_undone(head_dim, groups, monkeypatch):
    monkeypatch.setattr(runs, "groups_of_rows", lambda operand: groups)
    layout, data = packed_cache("turboquant_3bit", head_dim, 67, 130, batch=1, heads=1)
    assert_reads_like_the_specification(layout, data, 67, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 128])
@pytest.mark.parametrize("format_name", ["int8_per_token_head", "int4_per_token_head" + WINDOW])
def test_every_number_of_tokens_is_read(format_name, num_tokens, device):
    layout, data = packed_cache(format_name, 64, num_tokens, 200)
    assert_reads_like_the_specification(layout, data, num_tokens, torch.float32, device)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("format_name", ["turboquant_4bit", "int8_per_token_head"])
def test_values_are_rounded_to_the_dtype_of_the_cache(format_name, dtype, device):
    if device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter does not round to nearest")
    layout, data = packed_cache(format_name, 64, 65, 65)
    assert_reads_like_the_specification(layout, data, 65, dtype, device)


def test_finite_values_stay_finite_in_float16(device):
    layout = PackedLayout.parse("int8_per_token_head", "key", 64)
    data = empty_packed(layout, 3, 1, 1, torch.device("cpu"))
    write_tokens_(data, layout, torch.full((1, 1, 3, 64), 65504.0), torch.arange(3))
    assert_reads_like_the_specification(layout, data, 3, torch.float16, device)


def test_views_of_sequences_and_heads_are_read(device):
    layout, data = packed_cache("int4_per_token_head", 64, 100, 100)
    assert_reads_like_the_specification(layout, data, 100, torch.float32, device, lambda data: data[:, 1:, ::2])
