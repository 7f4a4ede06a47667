"""Prefill attention, which dequantizes first, agrees with the specification."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from attention_case import BOTH, INT8, MASKS, ONE, Case, hide_packed_form
from formats_of_every_kind import SHAPES, in_turn
from test_attention_kernel import assert_a_nan_spoils_its_own_head_only

from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.lang import launcher

# With queries in bfloat16, keys, values and weights are rounded to bfloat16, too.
PrefillCase = functools.partial(Case, bfloat16_tolerance=1e-2)

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "every_query_is_a_prefill")


@pytest.fixture
def every_query_is_a_prefill(monkeypatch):
    monkeypatch.setattr(launch_prefill, "PREFILL_ROWS", 1)


@pytest.mark.parametrize(
    ("shape", "dtype"), in_turn([*SHAPES, ("int4_per_channel" + ONE, 64)], [torch.float16, torch.bfloat16])
)
def test_every_format_is_dequantized_at_every_head_dim(shape, dtype, device):
    key, head_dim = shape
    value = key if "channel" not in key else INT8  # scales per channel are for keys
    PrefillCase(device, key, value, q_len=3, kv_len=70, head_dim=head_dim, v_head_dim=head_dim, dtype=dtype).check()


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(70, 70), (70, 130), (100, 70), pytest.param(200, 200, marks=pytest.mark.slow)]
)
def test_a_causal_query_sees_the_keys_up_to_its_own_position(q_len, kv_len, device):
    PrefillCase(device, "turboquant_4bit", "int4_unrotated", q_len=q_len, kv_len=kv_len).check(is_causal=True)


@pytest.mark.parametrize("kv_len", [1, 63, 64, 65, 200])
def test_nothing_beyond_the_cache_is_seen(kv_len, device):
    PrefillCase(device, "int4_per_token_head", INT8, q_len=3, kv_len=kv_len).check()


@pytest.mark.parametrize(("mask", "q_len"), in_turn(list(MASKS), [3, 40]))
def test_masks_agree_with_the_specification(mask, q_len, device):
    case = PrefillCase(device, INT8, "int4_unrotated", batch=2, q_len=q_len, kv_len=150)
    case.check(MASKS[mask](case.batch, case.query.shape[1], q_len, case.kv_len))


def test_a_query_that_sees_no_key_gets_zeros(device):
    case = PrefillCase(device, batch=2, q_len=40)
    mask = torch.zeros(2, 1, 40, case.kv_len, dtype=torch.bool)
    mask[1, :, 5:] = True
    out = case.kernel(mask)
    assert out[0].eq(0).all()
    assert out[1, :, :5].eq(0).all()
    torch.testing.assert_close(out.float(), case.expected(mask=mask), rtol=2e-2, atol=2e-2)


def test_sinks_and_softcap_agree_with_the_specification(device):
    case = PrefillCase(device, "int4_per_token_head", "turboquant_4bit", num_kv_heads=2, q_len=20, spread=3.0)
    case.check(sinks=torch.tensor([0.5, -20.0, 8.0, float("-inf")]), softcap=5.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [("int4_per_channel" + BOTH, "int4_per_token_head"), (INT8, "int8_per_channel" + ONE), ("bfloat16" + BOTH, INT8)],
)
def test_exact_blocks_are_read_in_full_precision(key, value, device):
    case = PrefillCase(device, key, value, q_len=20, kv_len=300, dtype=torch.float16)
    hide_packed_form(case)
    case.check()


# One split of all three tiles, a split of two tiles and one of one, three splits of one tile.
@pytest.mark.parametrize(("num_sms", "is_causal"), in_turn([1, 6, 64], [False, True]))
def test_the_number_of_splits_does_not_matter(num_sms, is_causal, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: num_sms)
    case = PrefillCase(device, "int4_per_token_head", "int4_per_token_head", q_len=150, kv_len=150, group_size=1)
    case.check(is_causal=is_causal)


def test_splits_whose_scores_are_all_far_below_zero_are_merged_by_their_sums(device, monkeypatch):
    """The last split has 5 tokens, the others have 64. Near -1e9, all log-sums round to the same number."""
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    PrefillCase(device, INT8, INT8, q_len=3, kv_len=325, spread=0.01).check(torch.full((1, 1, 3, 325), -1e9))


@pytest.mark.parametrize("config", [*launch_prefill.PORTABLE, launch_prefill.HOPPER_WIDEST, *launch_prefill.FLOAT32])
@pytest.mark.parametrize(("kv_len", "first"), [(65, 0), (96, 40), (130, 120)])
def test_tiles_that_are_smaller_than_blocks_cover_whole_blocks(config, kv_len, first, device, monkeypatch):
    """The first visible token may lie in any tile of its block."""
    monkeypatch.setattr(launch_prefill, "_config", lambda *args, **kwargs: config)
    dtype = torch.float32 if config in launch_prefill.FLOAT32 else torch.bfloat16
    monkeypatch.setattr(launch_prefill, "is_prefill", lambda call: True)
    mask = (torch.arange(kv_len) >= first).expand(2, 1, 3, kv_len) if first else None
    PrefillCase(device, INT8, INT8, batch=2, q_len=3, kv_len=kv_len, dtype=dtype).check(mask)


def test_kv_heads_that_do_not_fit_the_scratch_at_once_come_one_after_the_other(device, monkeypatch):
    monkeypatch.setattr(
        launch_prefill, "SCRATCH_NBYTES", 2 * 192 * 2 * 64 * 2
    )  # room for two of four KV heads in 16 bits
    case = PrefillCase(device, "turboquant_4bit", INT8, batch=2, num_kv_heads=2, q_len=5, kv_len=130)
    case.check(torch.arange(130) > 60)


@pytest.fixture
def by_cudnn(monkeypatch):
    """The shapes of the queries that PyTorch's attention gets in place of cuDNN."""
    served = []

    def attend(query, key, value, *, is_causal, scale):
        served.append(tuple(query.shape))
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)

    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 1)
    monkeypatch.setattr(launch_prefill, "has_fast_cudnn", lambda device: True)
    monkeypatch.setattr(launch_prefill, "CUDNN_FLOPS", 0)
    monkeypatch.setattr(launch_prefill, "cudnn_serves", lambda *args, **kwargs: True)
    monkeypatch.setattr(launch_prefill, "cudnn_attention", attend)
    return served


@pytest.mark.parametrize(
    ("key_and_value", "pairs_at_once", "rounds"),
    [
        (("turboquant_4bit", INT8), 6, [(3, 4, 70, 64)]),
        (("int4_per_channel" + BOTH, "int4_per_token_head"), 5, [(1, 4, 70, 64)] * 3),
        ((INT8, "int4_per_token_head"), 1, [(1, 2, 70, 64)] * 6),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_takes_as_many_heads_at_a_time_as_fit_the_scratch(
    key_and_value, pairs_at_once, rounds, is_causal, by_cudnn, device, monkeypatch
):
    monkeypatch.setattr(launch_prefill, "SCRATCH_NBYTES", pairs_at_once * 128 * 2 * 64 * 2)
    case = PrefillCase(device, *key_and_value, batch=3, num_kv_heads=2, group_size=2, q_len=70, kv_len=70)
    case.check(is_causal=is_causal)
    assert by_cudnn == rounds


def test_cudnn_gets_no_mask_softcap_or_sinks_and_no_causal_mask_that_is_not_square(by_cudnn, device):
    case = PrefillCase(device, INT8, INT8, q_len=20, kv_len=70)
    case.check(torch.arange(70) > 6)
    case.check(softcap=5.0)
    case.check(sinks=torch.zeros(case.query.shape[1]))
    PrefillCase(device, INT8, INT8, q_len=90, kv_len=70).check(is_causal=True)
    assert by_cudnn == []


def test_cudnn_gets_large_calls_only(by_cudnn, device, monkeypatch):
    case = PrefillCase(device, INT8, INT8, batch=1, q_len=70, kv_len=70)
    operations = 4 * case.query.numel() * 70
    monkeypatch.setattr(launch_prefill, "CUDNN_FLOPS", operations)
    case.check(is_causal=True)
    assert by_cudnn == []
    case.check()
    assert len(by_cudnn) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_itself_agrees_with_the_specification(is_causal, monkeypatch):
    monkeypatch.setattr(launch_prefill, "CUDNN_FLOPS", 0)
    case = PrefillCase(
        torch.device("cuda"), "int4_per_token_head", "turboquant_4bit", batch=2, num_kv_heads=4, q_len=1200, kv_len=1200
    )
    case.check(is_causal=is_causal)


@pytest.mark.parametrize(
    ("format_name", "bad_and_dtype"),
    in_turn(
        [INT8, "int4_per_token_head", "int4_per_group_32", "bfloat16"],
        [("key", torch.bfloat16), ("value", torch.float16), ("key", torch.float16), ("value", torch.bfloat16)],
    ),
)
def test_a_token_that_is_not_finite_spoils_its_own_head_only(format_name, bad_and_dtype, device):
    bad, dtype = bad_and_dtype
    case = PrefillCase(device, format_name, format_name, batch=2, num_kv_heads=2, q_len=3, dtype=dtype)
    assert_a_nan_spoils_its_own_head_only(case, bad, 17)


def test_values_that_fp16_cannot_hold_become_the_largest_that_it_can(device):
    case = PrefillCase(device, INT8, "int4_per_token_head", q_len=20, dtype=torch.float16, spread=1e4, scale=2e-9)
    assert case.kernel().isfinite().all()
