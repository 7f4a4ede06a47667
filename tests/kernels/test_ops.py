"""The operators kvcompile::store and kvcompile::attention."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from formats_of_every_kind import BY_TOKEN
from packed_bytes import empty_packed
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kvcompile.kernels import ops  # noqa: F401 - defines torch.ops.kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.attention import attend
from kvcompile.kernels.spec.packing import write_tokens

CPU = torch.device("cpu")
INT8 = "int8_per_token_head"
KEY, VALUE = PackedLayout(INT8, "key", 64), PackedLayout(INT8, "value", 64)

store = torch.ops.kvcompile.store.default
attention = torch.ops.kvcompile.attention.default


def caches(kv_len=70, batch=2, heads=2):
    """Packed keys and values of random vectors."""
    torch.manual_seed(0)
    positions = torch.arange(kv_len)
    return [
        write_tokens(
            empty_packed(layout, kv_len, batch, heads, CPU), layout, torch.randn(batch, heads, kv_len, 64), positions
        )
        for layout in (KEY, VALUE)
    ]


def attention_arguments(mask=None, sinks=None, softcap=0.0):
    return torch.randn(2, 4, 3, 64), *caches(), mask, sinks, 70, False, 0.125, softcap, INT8, INT8, 64


@pytest.mark.parametrize("format_name", BY_TOKEN)
def test_store_writes_in_place_the_bytes_of_the_specification(format_name):
    layout = PackedLayout(format_name, "value", 64)
    data, x, positions = empty_packed(layout, 70, 2, 2, CPU), torch.randn(2, 2, 3, 64), torch.tensor([0, 64, 5])
    expected = write_tokens(data, layout, x, positions)
    assert store(data, x, positions, None, format_name, "value") is None
    assert torch.equal(data, expected)


def test_attention_without_values_reads_the_keys_as_values():
    query, k_data, _, *rest = attention_arguments()
    expected = attend(query, k_data, k_data, KEY, KEY, kv_len=70, scale=0.125)
    torch.testing.assert_close(attention(query, k_data, None, *rest), expected)
    *settings, _, head_dim = rest
    with pytest.raises(ValueError, match="must be int8_per_token_head and 64, but are"):
        attention(query, k_data, None, *settings, "fp8_e4m3", head_dim)


def test_keys_with_scales_per_channel_cannot_serve_as_values():
    arguments = list(attention_arguments())
    arguments[2], arguments[9] = None, "int4_per_channel[recent=1,sinks=0,float32]"
    with pytest.raises(ValueError, match="cannot serve as values; pass v_data"):
        attention(*arguments)


def test_attention_equals_attend_and_is_contiguous():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    query, k_data, v_data, *_ = arguments = attention_arguments(sinks=sinks, softcap=2.0)
    out = attention(*arguments)
    expected = attend(query, k_data, v_data, KEY, VALUE, sinks=sinks, kv_len=70, scale=0.125, softcap=2.0)
    assert out.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True])])
def test_store_passes_the_checks_of_torch_library(valid):
    data, x = empty_packed(KEY, 70, 2, 2, CPU), torch.randn(2, 2, 3, 64)
    torch.library.opcheck(store, (data, x, torch.arange(3), valid, INT8, "key"))


@pytest.mark.parametrize("mask", [None, torch.arange(70) < 50])
@pytest.mark.parametrize("sinks", [None, torch.zeros(4)])
def test_attention_passes_the_checks_of_torch_library(mask, sinks):
    torch.library.opcheck(attention, attention_arguments(mask, sinks))


def test_fake_tensors_may_have_symbolic_sizes():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        tokens, kv_len = mode.shape_env.create_unbacked_symint(), mode.shape_env.create_unbacked_symint()
        blocks = mode.shape_env.create_unbacked_symint()
        k_data = torch.empty(blocks, 2, 2, KEY.block_bytes, dtype=torch.uint8)
        v_data = torch.empty(blocks, 2, 2, VALUE.block_bytes, dtype=torch.uint8)
        store(k_data, torch.empty(2, 2, tokens, 64), torch.empty(tokens, dtype=torch.int64), None, INT8, "key")
        query = torch.empty(2, 4, tokens, 64, dtype=torch.bfloat16)
        out = attention(query, k_data, v_data, None, None, kv_len, True, 0.1, 0.0, INT8, INT8, 96)
    assert out.shape[2] is not None
    assert out.shape[3] == 96
    assert out.dtype == torch.bfloat16


def test_compiled_code_calls_the_operators_and_stores_in_place():
    def step(data, v_data, x, position, query):
        store(data, x, position, None, INT8, "key")
        return attention(query, data, v_data, None, None, 70, False, 0.125, 0.0, INT8, INT8, 64)

    k_data, v_data = caches()
    x, position, query = torch.randn(2, 2, 1, 64), torch.tensor([69]), torch.randn(2, 4, 1, 64)
    expected_data = k_data.clone()
    expected = step(expected_data, v_data, x, position, query)
    address = k_data.data_ptr()
    out = torch.compile(step, fullgraph=True)(k_data, v_data, x, position, query)
    torch.testing.assert_close(out, expected)
    assert torch.equal(k_data, expected_data)
    assert k_data.data_ptr() == address


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {**a, "format": "int4_unrotated"}, r"blocks of 4352 bytes, but int4_unrotated .* has 2304"),
        (lambda a: {**a, "format": "int5"}, "unknown cache format 'int5'"),
        (lambda a: {**a, "data": a["data"].float()}, "data must be uint8"),
        (lambda a: {**a, "data": a["data"][:, :1]}, "data has batch and KV heads"),
        (lambda a: {**a, "data": a["data"].transpose(0, 3).contiguous().transpose(0, 3)}, "has strides"),
        (lambda a: {**a, "positions": torch.arange(4)}, "positions must be"),
        (lambda a: {**a, "positions": torch.arange(3, dtype=torch.int32)}, "positions must be int64"),
        (lambda a: {**a, "valid": torch.ones(2, dtype=torch.bool)}, "valid must be"),
        (lambda a: {**a, "valid": torch.ones(3)}, "valid bool, but they are torch.int64 and torch.float32"),
        (lambda a: {**a, "x": torch.ones(2, 2, 3, 64, dtype=torch.int64)}, "x must be floating point"),
        (lambda a: {**a, "x": torch.ones(2, 3, 64)}, r"x must be \[batch, heads, tokens, head_dim\]"),
        (lambda a: {**a, "role": "keys"}, "'keys' is not a role of a cache; roles: key, value"),
    ],
)
def test_store_refuses_arguments_that_do_not_fit_and_names_them(change, message):
    arguments = {
        "data": caches()[0], "x": torch.randn(2, 2, 3, 64), "positions": torch.arange(3), "valid": None,
        "format": INT8, "role": "key",
    }  # fmt: skip
    store(**arguments)
    with pytest.raises(ValueError, match=message):
        store(**change(arguments))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.randn(2, 3, 1, 64), "multiple of the KV heads"),
        (0, torch.randn(1, 4, 1, 64), "the same batch"),
        (0, torch.randn(4, 1, 64), r"query must be \[batch, heads, tokens, head_dim\]"),
        (0, torch.randn(2, 4, 1, 80), "k_data has blocks of 4352 bytes, but int8_per_token_head with head_dim 80"),
        (4, torch.zeros(2), "sinks must be .4., one per head"),
        (5, 129, "kv_len 129 is not within the 128 tokens"),
        (9, "fp8", "unknown cache format 'fp8'"),
        (11, 80, "v_data has blocks of 4352 bytes"),
    ],
)
def test_attention_refuses_arguments_that_do_not_fit_and_names_them(index, value, message):
    arguments = list(attention_arguments())
    arguments[index] = value
    with pytest.raises(ValueError, match=message):
        attention(*arguments)


def test_everything_but_the_kernels_works_without_triton_and_both_modules_of_operators_share_the_namespace():
    script = """
import sys
sys.modules["triton"] = None
import torch
import kvcompile.kernels.deepseek_v4.ops
k_cache = torch.zeros(2, 64, 584, dtype=torch.uint8)
k = torch.ones(1, 512, dtype=torch.bfloat16)
torch.ops.kvcompile.quantize_and_insert_k_cache(k, k_cache, torch.tensor([70]), 64)
assert k_cache[1].any() and not k_cache[0].any()
from kvcompile.kernels import ops
from kvcompile.kernels.layout.packed_layout import PackedLayout
layout = PackedLayout("int4_per_token_head", "key", 64)
data = torch.zeros(layout.shape(64, 1, 1), dtype=torch.uint8)
torch.ops.kvcompile.store(data, torch.ones(1, 1, 1, 64), torch.tensor([3]), None, "int4_per_token_head", "key")
assert data.any()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
