"""Every form of scaled-dot-product attention on a static cache is packed, for every head shape, dtype and mask.

On a CPU most forms run node by node: their rewritten graphs differ in sizes and masks only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from devices import cases_by_device
from policies import reading_packed
from torch import Tensor

from kvcompile import last_report
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

MAX_LEN = 130
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Case:
    """Shapes and options of one attention layer."""

    mask: str = "bool"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 64
    q_len: int = 1
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    gqa: str = "enable_gqa"
    preset: str = "int8_per_token_head"

    def __str__(self) -> str:
        default = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(default, name)}
        return "-".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in changed.items()) or "default"


CASES = [
    Case(),
    Case(mask="none"),
    Case(mask="causal", q_len=5),
    Case(mask="float"),
    Case(mask="bool 2d", q_len=3),
    Case(mask="padding", q_len=2),
    Case(mask="rows without keys", q_len=2),
    Case(scale=0.3),
    Case(q_len=16),
    Case(q_len=40),
    Case(num_kv_heads=4),
    Case(num_kv_heads=1),
    Case(num_heads=8, num_kv_heads=2, gqa="repeat_kv"),
    Case(num_heads=8, num_kv_heads=2, gqa="repeat_interleave"),
    Case(num_kv_heads=1, gqa="expand"),
    Case(head_dim=80, v_head_dim=80, preset="int4_per_token_head"),
    Case(head_dim=96, v_head_dim=64, preset="turboquant_4bit_nc"),
    Case(head_dim=128, v_head_dim=128, preset="turboquant_4bit_nc", dtype=torch.bfloat16),
    Case(head_dim=256, v_head_dim=256, preset="fp8_e4m3", dtype=torch.float16),
    Case(head_dim=64, v_head_dim=128, preset="int4_per_token_head", q_len=3),
]

GENERATED_ON_CPU = [Case(mask="causal", q_len=5), Case(mask="float"), *CASES[-3:]]
"""Dtypes, masks and formats whose generated code is slow to compile and differs little. The test of chunks below
generates code for a format without a rotation, in float32, and test_output_code.py for a format with a rotation, in
bfloat16."""


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    batch, heads, length, head_dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, length, head_dim).reshape(batch, -1, length, head_dim)


def step(case: Case, q: Tensor, k: Tensor, v: Tensor, kc: Tensor, vc: Tensor, pos: Tensor, mask: Any) -> Tensor:
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(case, q, kc, vc, mask)


def attend(case: Case, q: Tensor, keys: Tensor, values: Tensor, mask: Any) -> Tensor:
    repeats = case.num_heads // case.num_kv_heads
    if case.gqa == "repeat_kv":
        keys, values = repeat_kv(keys, repeats), repeat_kv(values, repeats)
    elif case.gqa == "repeat_interleave":
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    elif case.gqa == "expand":
        keys, values = keys.expand(-1, repeats, -1, -1), values.expand(-1, repeats, -1, -1)
    return F.scaled_dot_product_attention(
        q,
        keys,
        values,
        attn_mask=mask,
        is_causal=case.mask == "causal",
        scale=case.scale,
        enable_gqa=case.gqa == "enable_gqa",
    )


def make_mask(case: Case, pos: Tensor, batch: int) -> Tensor | None:
    visible = torch.arange(MAX_LEN, device=pos.device)[None, :] <= pos[:, None]
    if case.mask in ("none", "causal"):
        return None
    if case.mask == "bool 2d":
        return visible
    mask = visible[None, None].expand(batch, 1, case.q_len, MAX_LEN)
    if case.mask == "padding":
        padding = torch.tensor([0, 7], device=pos.device)
        mask = mask & (torch.arange(MAX_LEN, device=pos.device) >= padding[:, None])[:, None, None]
    if case.mask == "rows without keys":
        mask = mask & torch.tensor([True, False], device=pos.device)[:, None]
    if case.mask == "float":
        bias = torch.randn(1, case.num_heads, 1, MAX_LEN, device=pos.device, dtype=case.dtype)
        return bias.masked_fill(~mask[:1], float("-inf"))
    return mask


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("case", "device"),
    cases_by_device(
        on_gpu=[(case,) for case in CASES],
        on_cpu=[(case,) for case in CASES],
        generated_on_cpu=[(case,) for case in GENERATED_ON_CPU],
    ),
    ids=str,
)
def test_attention_on_a_packed_cache_equals_attention_on_its_dequantized_values(
    case: Case, device: str, node_by_node_on_cpu: None
) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    batch = 2

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(case.dtype)

    k_cache = rand(batch, case.num_kv_heads, MAX_LEN, case.head_dim)
    v_cache = rand(batch, case.num_kv_heads, MAX_LEN, case.v_head_dim)
    formats = Policy.load(case.preset).formats_for("", 0, 1)
    expected_k = PackedTensor.from_dense(k_cache, PackedLayout(formats.key, "key", case.head_dim))
    expected_v = PackedTensor.from_dense(v_cache, PackedLayout(formats.value, "value", case.v_head_dim))
    if device == "cpu" and case != Case():  # caches that arrive plain take another graph
        k_cache, v_cache = expected_k.clone(), expected_v.clone()
    options = {"policy": reading_packed(case.preset), "on_unsupported": "error"}
    compiled = torch.compile(step, backend="kvquant", options=options, fullgraph=True)
    with torch.no_grad():
        for start in (60, 63):
            pos = torch.arange(start, start + case.q_len, device=device)
            q = rand(batch, case.num_heads, case.q_len, case.head_dim)
            k = rand(batch, case.num_kv_heads, case.q_len, case.head_dim)
            v = rand(batch, case.num_kv_heads, case.q_len, case.v_head_dim)
            mask = make_mask(case, pos, batch)
            out = compiled(case, q, k, v, k_cache, v_cache, pos, mask)
            expected_k.index_copy_(2, pos, k)
            expected_v.index_copy_(2, pos, v)
            keys, values = expected_k.dequantize().float(), expected_v.dequantize().float()
            bias = mask.float() if mask is not None and mask.is_floating_point() else mask
            expected = attend(case, q.float(), keys, values, bias)
            assert out.dtype is case.dtype
            assert out.shape == expected.shape
            error = (out.float() - expected).norm() / expected.norm()
            assert error < TOLERANCE[case.dtype]
            if case.mask == "rows without keys":
                assert not out[:, :, 1].any()
    assert isinstance(k_cache, PackedTensor)
    assert [site.reason for site in last_report().sites] == [None]


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Generated code has parallel loops."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_any_length_share_one_symbolic_graph(device: str, two_threads: None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    case = Case()
    options = {"policy": reading_packed("int8_per_token_head"), "on_unsupported": "error"}
    compiled = torch.compile(step, backend="kvquant", dynamic=True, options=options)
    k_cache, v_cache = torch.randn(2, 2, 2, MAX_LEN, 64, device=device).unbind()
    k_cache, v_cache = (
        PackedTensor.from_dense(cache, PackedLayout("int8_per_token_head", role, 64))
        for cache, role in ((k_cache, "key"), (v_cache, "value"))
    )
    expected_k, expected_v = k_cache.clone(), v_cache.clone()
    start = 0
    with torch.no_grad():
        for n in (30, 7, 20, 64, 2):
            pos = torch.arange(start, start + n, device=device)
            q, k, v = (torch.randn(2, heads, n, 64, device=device) for heads in (4, 2, 2))
            mask = torch.arange(MAX_LEN, device=device)[None, :] <= pos[:, None]
            out = compiled(case, q, k, v, k_cache, v_cache, pos, mask)
            expected = step(case, q, k, v, expected_k, expected_v, pos, mask)
            torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
            start += n
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
