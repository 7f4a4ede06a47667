"""Attention of long queries, which dequantizes first, computes what the specification computes."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton")

from formats_of_every_kind import KINDS, SHAPES
from test_attention_kernel import BOTH, INT8, MASKS, ONE, Case, hide_packed_form

from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.spec.packing import write_tokens_

# Keys, values and weights are rounded to bfloat16 where queries are.
PrefillCase = functools.partial(Case, bfloat16_tolerance=1e-2)

RESIDUAL_FORMATS = [name + ONE if name.endswith("per_channel") else name for name in KINDS]

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "every_query_is_a_prefill")


@pytest.fixture
def every_query_is_a_prefill(monkeypatch):
    monkeypatch.setattr(launch_prefill, "PREFILL_ROWS", 1)


@pytest.mark.parametrize("format_name", RESIDUAL_FORMATS)
def test_every_format_is_dequantized_for_long_queries(format_name, device):
    PrefillCase(device, format_name, format_name, q_len=40, batch=1, dtype=torch.float16).check()


@pytest.mark.parametrize(("format_name", "head_dim"), SHAPES)
def test_every_head_dim_is_dequantized(format_name, head_dim, device):
    PrefillCase(device, format_name, format_name, batch=1, kv_len=70, head_dim=head_dim, v_head_dim=head_dim).check()


@pytest.mark.parametrize(("q_len", "kv_len"), [(100, 100), (200, 200), (100, 130), (200, 150)])
def test_a_causal_query_sees_the_keys_up_to_its_own_position(q_len, kv_len, device):
    PrefillCase(device, "turboquant_4bit", "int4_unrotated", q_len=q_len, kv_len=kv_len, batch=1).check(is_causal=True)


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 200])
def test_nothing_beyond_the_cache_is_seen(kv_len, device):
    PrefillCase(device, "int4_per_token_head", INT8, q_len=3, kv_len=kv_len, batch=1).check()


@pytest.mark.parametrize("q_len", [3, 40])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_mean_what_they_mean_to_the_specification(mask, q_len, device):
    case = PrefillCase(device, INT8, "int4_unrotated", q_len=q_len, kv_len=300)
    case.check(MASKS[mask](case.batch, case.query.shape[1], q_len, case.kv_len))


def test_a_query_that_sees_no_key_gets_zeros(device):
    case = PrefillCase(device, q_len=40)
    mask = torch.zeros(2, 1, 40, case.kv_len, dtype=torch.bool)
    mask[1, :, 5:] = True
    out = case.kernel(mask)
    assert out[0].eq(0).all()
    assert out[1, :, :5].eq(0).all()
    torch.testing.assert_close(out.float(), case.expected(mask=mask), rtol=2e-2, atol=2e-2)


def test_sinks_and_softcap_mean_what_they_mean_to_the_specification(device):
    case = PrefillCase(device, "int4_per_token_head", "turboquant_4bit", q_len=40, spread=3.0)
    case.check(sinks=torch.tensor([0.5, -20.0, 8.0, float("-inf")]), softcap=5.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("int4_per_channel" + BOTH, "int4_per_token_head"), (INT8, "int8_per_channel" + ONE), ("bfloat16" + BOTH, INT8)],
)
def test_blocks_that_slots_hold_are_read_as_they_are(key, value, device):
    case = PrefillCase(device, key, value, q_len=20, batch=1, kv_len=300, dtype=torch.float16)
    hide_packed_form(case)
    case.check()


@pytest.mark.parametrize("num_sms", [1, 16, 64])  # one split of all tiles, splits of two tiles, of one
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_number_of_splits_does_not_matter(num_sms, is_causal, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: num_sms)
    heads = {"batch": 1, "num_kv_heads": 1, "group_size": 1}
    case = PrefillCase(device, "int4_per_token_head", "int4_per_token_head", q_len=300, kv_len=300, **heads)
    case.check(is_causal=is_causal)


def test_splits_whose_keys_are_all_far_below_zero_are_merged_by_what_they_sum(device, monkeypatch):
    """The last split has 5 tokens, the others 64: no digits of -1e9 are left for how many."""
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    PrefillCase(device, INT8, INT8, q_len=3, kv_len=325, batch=1, spread=0.01).check(torch.full((1, 1, 3, 325), -1e9))


def test_kv_heads_that_do_not_fit_the_scratch_at_once_come_one_after_the_other(device, monkeypatch):
    monkeypatch.setattr(launch_prefill, "SCRATCH_NBYTES", 2 * 192 * 2 * 64 * 2)  # two of the four in 16 bits
    case = PrefillCase(device, "turboquant_4bit", INT8, q_len=5, kv_len=130)
    case.check(torch.arange(130) > 60)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", ["key", "value"])
@pytest.mark.parametrize("format_name", [INT8, "int4_per_token_head", "int4_per_group_32", "bfloat16"])
def test_a_token_that_is_not_finite_spoils_its_own_head_only(format_name, bad, dtype, device):
    case = PrefillCase(device, format_name, format_name, q_len=20, dtype=dtype)
    x = torch.zeros(2, 2, 1, 64)
    x[1, 0] = torch.nan
    index = ["key", "value"].index(bad)
    write_tokens_(case.data[index], case.layouts[index], x, torch.tensor([17]))
    out = case.kernel()
    assert out[1, :2].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 2:].isnan().any()


def test_values_that_fp16_cannot_hold_become_the_largest_that_it_can(device):
    case = PrefillCase(
        device, INT8, "int4_per_token_head", q_len=20, batch=1, dtype=torch.float16, spread=1e4, scale=2e-9
    )
    assert case.kernel().isfinite().all()
