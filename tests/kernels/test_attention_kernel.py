"""The attention kernel agrees with the specification."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attention_case import BOTH, INT8, MASKS, NAN_BYTES, ONE, SINK, Case, hide_packed_form
from formats_of_every_kind import BY_TOKEN, SHAPES, in_turn

from kvcompile.kernels import launch
from kvcompile.kernels.attention.divisions import Division
from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.spec.packing import float_blocks, read_tokens, write_tokens_

every_format = pytest.mark.parametrize("format_name", BY_TOKEN)

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.parametrize(("format_name", "head_dim"), SHAPES)
def test_decoding_agrees_with_the_specification(format_name, head_dim, device):
    Case(device, format_name, format_name, head_dim=head_dim, v_head_dim=head_dim).check()


@pytest.mark.parametrize(("head_dim", "format_name"), in_turn([16, 48, 112], ["int4_per_token_head", INT8]))
def test_any_multiple_of_16_is_a_head_dim(format_name, head_dim, device):
    Case(device, format_name, format_name, head_dim=head_dim, v_head_dim=head_dim).check()


@pytest.mark.parametrize(
    ("q_len", "format_name"),
    in_turn([1, 3, 70], [INT8, "int4_per_token_head", "turboquant_3bit" + BOTH, "int4_per_channel" + ONE]),
)
def test_heads_of_512_channels_may_have_any_number_of_query_rows(q_len, format_name, device):
    value = format_name.replace("channel", "token_head")
    Case(device, format_name, value, group_size=4, q_len=q_len, head_dim=512, v_head_dim=512, scale=0.04).check(
        is_causal=q_len > 1
    )


@pytest.mark.parametrize(("format_name", "dtype"), in_turn(BY_TOKEN, [torch.float16, torch.float32]))
def test_queries_may_be_of_any_float_dtype(format_name, dtype, device):
    Case(device, format_name, format_name, dtype=dtype).check()


@pytest.mark.parametrize("key", BY_TOKEN)
def test_keys_and_values_may_have_different_formats_and_head_dims(key, device):
    value = {"turboquant_4bit": "int4_unrotated", "int8_per_token_head": "turboquant_4bit"}.get(key, INT8)
    Case(device, key, value, head_dim=128, v_head_dim=80).check()


@pytest.mark.parametrize(
    ("kv_len", "format_name"), in_turn([1, 63, 64, 65, 127, 128, 129, 300], [INT8, "int4_per_token_head"])
)
def test_every_length_of_the_cache_agrees_and_nothing_beyond_it_is_seen(kv_len, format_name, device):
    Case(device, format_name, format_name, kv_len=kv_len).check()


@pytest.mark.parametrize(
    ("group_size", "q_len"),
    [(1, 1), (4, 1), (8, 1), (4, 3), (1, 16), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in
     ((1, 3), (8, 3), (4, 16), (8, 16)))],
)  # fmt: skip
def test_query_heads_share_a_kv_head_at_every_q_len(group_size, q_len, device):
    Case(device, num_kv_heads=2, group_size=group_size, q_len=q_len).check()


@pytest.mark.parametrize(("format_name", "is_causal"), in_turn([INT8, "turboquant_4bit"], [False, True]))
def test_prefill_agrees_with_the_specification(format_name, is_causal, device):
    Case(device, format_name, format_name, q_len=70, kv_len=70).check(is_causal=is_causal)


@pytest.mark.parametrize("q_len", [1, 5, 70, pytest.param(200, marks=pytest.mark.slow)])
def test_a_causal_query_sees_the_keys_up_to_its_own_position(q_len, device):
    Case(device, q_len=q_len, group_size=1).check(is_causal=True)


@pytest.mark.parametrize(("mask", "q_len"), in_turn(list(MASKS), [1, 3]))
def test_masks_agree_with_the_specification(mask, q_len, device):
    case = Case(device, "int8_per_token_head", "int4_per_token_head", batch=2, q_len=q_len, kv_len=150)
    case.check(MASKS[mask](case.batch, case.query.shape[1], q_len, case.kv_len))


@pytest.mark.parametrize(("q_len", "hidden"), in_turn([1, 3], [torch.tensor(False), torch.tensor(-torch.inf)]))
def test_a_query_that_sees_no_key_gets_zeros(q_len, hidden, device):
    case = Case(device, batch=2, q_len=q_len)
    mask = hidden.expand(2, 1, q_len, case.kv_len).clone()
    mask[1] = 1
    out = case.kernel(mask)
    assert out[0].eq(0).all()
    torch.testing.assert_close(out.float(), case.expected(mask=mask), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mask_value", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_scores_far_below_zero_get_the_weights_of_the_specification(mask_value, device):
    case = Case(device, "int8_per_token_head", "turboquant_4bit", spread=0.01)
    case.check(torch.full((1, 1, 1, case.kv_len), mask_value))


@pytest.mark.parametrize("value", ["int8_per_token_head", "fp8_e4m3_unit", "bfloat16"])
def test_splits_whose_scores_are_all_far_below_zero_are_merged_by_their_sums(value, device, monkeypatch):
    """The last split has 5 tokens, the others have more. Near -1e9, all log-sums round to the same number."""
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    case = Case(device, "int8_per_token_head", value, spread=0.01, kv_len=325)
    mask = torch.full((1, 1, 1, case.kv_len), -1e9)
    case.check(mask)
    case.check(mask, sinks=torch.full((case.num_kv_heads * case.group_size,), -1e9))


@pytest.mark.parametrize(("format_name", "spread"), in_turn(BY_TOKEN, [1e-3, 1e3]))
def test_small_and_large_values_keep_their_precision(format_name, spread, device):
    Case(device, format_name, format_name, spread=spread, scale=0.2 / spread).check()


def test_many_faint_tokens_beside_one_strong_one_are_not_lost(device):
    """The strong token has half of the weight. Each faint token has less than one step of fp16 at that weight."""
    case = Case(device, group_size=1, kv_len=2000, scale=1.0, spread=1e-2)
    mask = torch.zeros(case.kv_len).index_fill(0, torch.tensor([700]), torch.tensor(2000.0).log().item())
    case.check(mask.expand(1, 1, 1, -1))


@every_format
def test_channels_where_formats_saturate_agree_with_the_specification(format_name, device):
    Case(device, format_name, format_name, spread=1e5, scale=1e-10).check()


@pytest.mark.parametrize("bad", ["key", "value"])
def test_a_token_that_is_not_finite_spoils_its_own_head_only(bad, device):
    case = Case(device, batch=2, num_kv_heads=2)
    x = torch.full((2, 2, 1, 64), torch.nan)
    x[0] = 0.0
    x[1, 1] = 0.0
    index = ["key", "value"].index(bad)
    write_tokens_(case.data[index], case.layouts[index], x, torch.tensor([17]))
    out = case.kernel()
    assert out[1, :2].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 2:].isnan().any()


@pytest.mark.parametrize("q_len", [1, 5, 40])
@pytest.mark.parametrize("hidden", [False, -torch.inf])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_hidden_key_that_is_not_finite_has_no_influence(number, hidden, q_len, device):
    clean, case = Case(device, batch=2, q_len=q_len), Case(device, batch=2, q_len=q_len)
    write_tokens_(case.data[0], case.layouts[0], torch.full((2, 1, 1, 64), number), torch.tensor([17]))
    visible = torch.ones(2, 1, q_len, case.kv_len, dtype=torch.tensor(hidden).dtype)
    mask = visible.index_fill(3, torch.tensor([17]), hidden)
    assert torch.equal(case.kernel(mask), clean.kernel(mask))


def test_queries_and_data_may_have_any_strides(device):
    case = Case(device, batch=2, num_kv_heads=2)
    query = case.query.transpose(1, 2).contiguous().to(device).transpose(1, 2)
    data = [torch.cat([data, data], 1).to(device)[:, : case.batch] for data in case.data]
    out = launch.attention(
        query, *data, None, None, case.kv_len, False, case.scale, 0.0, case.key, case.value, case.v_head_dim
    )
    assert torch.equal(out.cpu(), case.kernel())


@pytest.mark.parametrize("value", [INT8, "turboquant_4bit", "int4_unrotated[recent=2,sinks=1,bfloat16]"])
def test_keys_may_be_the_blocks_of_a_plain_tensor(value, device):
    """In a plain tensor the blocks of one head are neighbours; in packed data the heads of one block are neighbours."""
    case = Case(device, "bfloat16", value, batch=2, num_kv_heads=2, kv_len=192)
    layout = case.layouts[0]
    case.data[0] = float_blocks(layout, read_tokens(case.data[0], layout, case.kv_len).bfloat16())
    case.data[1] = case.data[1][: case.layouts[1].blocks(case.kv_len)]
    assert case.data[0].stride(0) < case.data[0].stride(2)
    case.check()


@pytest.mark.parametrize(("q_len", "value"), in_turn([1, 3, 20], [INT8, "int4_per_token_head"]))
def test_sinks_take_part_in_the_softmax_with_a_value_of_zero(value, q_len, device):
    case = Case(device, value=value, num_kv_heads=2, q_len=q_len)
    sinks = torch.tensor([0.5, -20.0, 8.0, float("-inf")])
    case.check(sinks=sinks, is_causal=q_len > 1)
    case.check((torch.arange(case.kv_len) > 99).expand(1, 1, 1, -1), sinks=sinks.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_bounds_scores_before_the_mask(dtype, device):
    case = Case(device, q_len=3, spread=5.0, dtype=dtype)
    case.check(softcap=5.0)
    bias = torch.randn(1, 1, 3, case.kv_len, generator=torch.Generator().manual_seed(4))
    case.check(bias.masked_fill(bias > 1, -torch.inf), softcap=5.0)


def test_nothing_to_attend_to_gives_zeros(device):
    case = Case(device)
    case.kv_len = 0
    assert case.kernel().eq(0).all()


@every_format
def test_every_code_has_the_level_of_the_specification(format_name, device):
    """A query head that sees one token returns its value. Codes are random, and each head sees another token."""
    case = Case(device, format_name, format_name, group_size=4, kv_len=64, dtype=torch.float16)
    codes = case.layouts[1].split(case.data[1])["codes"]
    generator = torch.Generator().manual_seed(3)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, generator=generator))
    if format_name == "fp8_e4m3":
        codes[codes & 0x7F == 0x7F] = 0  # NaN is never written, and its level depends on the GPU
    case.check((torch.arange(64) == torch.tensor([0, 5, 40, 63])[:, None])[None, :, None])


@pytest.mark.parametrize("num_sms", [1, 3, 64])
def test_the_number_of_splits_does_not_matter(num_sms, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: num_sms)
    case = Case(device, kv_len=400)
    case.check()
    case.check((torch.arange(case.kv_len) < 150).expand(1, 1, 1, -1))


@pytest.mark.parametrize(("splits", "value"), in_turn([16, 17, 64, 65, 128, 129], [INT8, "int4_per_token_head"]))
def test_any_number_of_splits_is_merged(splits, value, device, monkeypatch):
    monkeypatch.setattr(launch, "division_of", lambda *arguments: Division(0, splits))
    case = Case(device, value=value, kv_len=64 * splits - 3, head_dim=16, v_head_dim=80)
    case.check(sinks=torch.tensor([0.5, -1.0]))


@pytest.mark.parametrize("q_len", [1, 3, 17])
def test_positions_and_sequences_see_different_ranges_of_a_long_cache(q_len, device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    case = Case(device, batch=2, q_len=q_len, kv_len=450)
    begin = torch.tensor([[0], [250]]) + 7 * torch.arange(q_len)
    end = begin + torch.tensor([[70], [200 - 7 * q_len]])
    end[0, 0] = begin[0, 0]  # sees nothing
    token = torch.arange(case.kv_len)
    case.check(((token >= begin[..., None]) & (token < end[..., None]))[:, None])


def test_splits_behind_the_visible_tokens_are_not_merged(device, monkeypatch):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 64)
    launch_attention = launch.launch_attention
    splits = []

    def poisoned(grid, pointers, *arguments):
        launch_attention(grid, pointers, *arguments)
        splits.append(grid[2])
        for result in pointers[-2:]:
            result.view(grid[2], -1)[5:] = torch.nan

    monkeypatch.setattr(launch, "launch_attention", poisoned)
    Case(device, kv_len=700).check((torch.arange(700) < 300).expand(1, 1, 1, -1))
    assert min(splits) > 5


@pytest.fixture(params=[0, 1, 3])
def exact_programs(request, monkeypatch):
    """The programs of a KV head that attend to exact blocks alone; with 0 the programs of packed tokens do so."""
    monkeypatch.setattr(launch, "exact_programs_of", lambda config, items, *sizes: min(items, request.param))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (INT8, "int4_per_token_head"),
        ("turboquant_3bit", "turboquant_4bit"),
        ("int4_per_channel" + ONE, INT8 + BOTH),
        (INT8 + SINK, INT8 + SINK),
    ],
)
@pytest.mark.parametrize("division", [Division(2, 1), Division(1, 3), Division(2, 5), Division(5, 2), Division(5, 20)])
def test_heads_with_and_without_splits_share_a_launch(key, value, division, device, monkeypatch, exact_programs):
    """Programs of heads without splits, of splits, and of the merge, with several tiles of rows in the second case."""
    monkeypatch.setattr(launch, "division_of", lambda *arguments: division)
    monkeypatch.setattr(launch, "MANY_ROWS", 16 if division.num_splits < 5 else 2048)
    case = Case(device, key, value, batch=3, num_kv_heads=2, group_size=4, kv_len=330)
    case.check()
    lengths = torch.tensor([0, 70, 330])  # nothing, less than a tile for each split, and everything
    case.check((torch.arange(case.kv_len) < lengths[:, None])[:, None, None], sinks=torch.randn(8))
    case = Case(device, key, value, batch=3, num_kv_heads=2, group_size=4, q_len=5, kv_len=200)
    case.check((torch.arange(200) < 193 + torch.arange(5)[:, None])[None, None])


@pytest.mark.parametrize(
    ("key", "value", "kv_len"),
    [
        ("int4_per_channel" + ONE, INT8, 130),
        ("int4_per_channel" + BOTH, "int4_per_token_head", 300),
        ("int4_per_channel" + ONE, "int4_unrotated" + BOTH, 65),
        ("int8_per_channel" + BOTH, "int4_per_token_head" + ONE, 257),
        ("int2_per_channel" + ONE, "fp8_e5m2_scale0.37" + SINK, 128),
        ("fp8_e4m3_scale0.02" + BOTH, "fp8_e4m3_scale0.03" + BOTH, 100),
        (INT8, "turboquant_2.5bit" + BOTH, 300),
        ("int4_per_token_head" + ONE, "int4_per_token_head", 300),
        ("turboquant_3bit" + BOTH, "turboquant_3bit", 190),
        ("turboquant_4bit", "turboquant_4bit" + ONE, 100),
        ("turboquant_3.5bit" + ONE, "turboquant_3.5bit" + BOTH, 150),
        ("turboquant_4bit" + BOTH, "int2_per_group_32" + ONE, 100),
        ("int3_unrotated" + SINK, "int3_unrotated" + ONE, 64),
    ],
)
def test_exact_blocks_are_read_in_full_precision(key, value, kv_len, device, exact_programs):
    case = Case(device, key, value, kv_len=kv_len, dtype=torch.float16)
    hide_packed_form(case)
    case.check()


@pytest.mark.parametrize(
    ("key", "head_dim", "value"),
    [("int4_per_channel" + ONE, 64, "int4_unrotated"), ("int8_per_channel" + BOTH, 80, "int4_per_token_head" + BOTH)],
)
def test_tiles_of_several_blocks_have_scales_of_each(key, head_dim, value, device, monkeypatch):
    monkeypatch.setattr(launch, "attention_config", lambda *_: AttentionConfig(8, 256))
    case = Case(device, key, value, kv_len=610, head_dim=head_dim, dtype=torch.float16)
    hide_packed_form(case)
    case.check()


@pytest.mark.parametrize(
    ("key", "value", "head_dim"),
    [
        ("int4_per_group_64", "int2_per_group_32", 128),
        ("int4_per_group_32", "int4_per_group_32", 96),
        ("int8_per_group_32", "int4_per_group_128", 128),
        ("int2_per_group_64", "int8_per_group_64", 64),
        ("int4_per_channel" + ONE, "int4_per_group_32", 64),
        ("turboquant_3bit", "int2_per_group_32" + BOTH, 128),
    ],
)
@pytest.mark.parametrize(("group_size", "q_len"), [(2, 1), (5, 2)])
def test_groups_may_be_planes_parts_of_planes_or_whole_vectors(key, value, head_dim, group_size, q_len, device):
    """In the second case a group has channels of two planes."""
    case = Case(
        device, key, value, group_size=group_size, q_len=q_len, head_dim=head_dim, v_head_dim=head_dim,
        dtype=torch.float16,
    )  # fmt: skip
    case.check()
    case.check((torch.arange(case.kv_len) % 3 > 0).expand(1, 1, q_len, case.kv_len))


@pytest.mark.parametrize("key", ["int4_per_channel", "int8_per_channel"])
@pytest.mark.parametrize(("spread", "key_bias"), [(1.0, 300.0), (1e-3, 0.0), (1e3, 0.0)])
def test_scales_per_channel_keep_their_precision(key, spread, key_bias, device):
    case = Case(device, key + SINK.replace("recent=0", "recent=1"), INT8, kv_len=200, dtype=torch.float16,
                spread=spread, key_bias=key_bias, scale=0.2 / spread)  # fmt: skip
    case.query[..., ::8] /= max(1.0, key_bias)
    case.check()


@pytest.mark.parametrize("q_len", [1, 3, 100])
def test_masks_hide_exact_tokens_as_all_others(q_len, device, exact_programs):
    case = Case(device, "int4_per_channel" + BOTH, "bfloat16" + ONE, q_len=q_len, kv_len=220, group_size=1)
    hide_packed_form(case)
    if q_len == 100:
        case.check(is_causal=True)
        return
    case.check(torch.arange(220) % 3 > 0)
    case.check((torch.arange(220) > 5) & (torch.arange(220) < 150))
    case.check(torch.zeros(220).index_fill(0, torch.arange(200), torch.finfo(torch.float32).min), softcap=3.0)


@pytest.mark.parametrize("kv_len", [1, 70, 130])
@pytest.mark.parametrize("value", ["int4_unrotated" + ONE, "int4_unrotated" + BOTH])
def test_a_shorter_cache_does_not_see_the_entries_of_later_blocks(kv_len, value, device, exact_programs):
    case = Case(device, "int4_per_channel" + BOTH, value, kv_len=310)
    case.kv_len = kv_len
    case.check()


@pytest.mark.parametrize("num_sms", [1, 3])
@pytest.mark.parametrize("value", ["int4_per_token_head" + ONE, "int4_unrotated" + BOTH])
def test_exact_blocks_far_apart_are_shared_out_among_the_splits(num_sms, value, device, monkeypatch, exact_programs):
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: num_sms)
    case = Case(device, "int4_per_channel" + BOTH, value, kv_len=450)
    x = torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(8))
    for data, layout in zip(case.data, case.layouts, strict=True):
        write_tokens_(data, layout, x, torch.tensor([200, 400]))  # the blocks written last are exact
    hide_packed_form(case)
    case.check()


@pytest.mark.parametrize("is_key", [True, False])
def test_a_block_written_to_keys_alone_or_to_values_alone_is_decoded_for_the_other(is_key, device, exact_programs):
    case = Case(device, INT8 + BOTH, "int4_per_token_head" + BOTH, batch=2, num_kv_heads=2, kv_len=450)
    x = torch.randn(2, 2, 1, 64, generator=torch.Generator().manual_seed(8))
    write_tokens_(case.data[1 - is_key], case.layouts[1 - is_key], x, torch.tensor([200]))
    hide_packed_form(case)
    case.check()
    case.check(torch.arange(450) < 330)


@pytest.mark.parametrize("lengths", [[0, 64, 65], [127, 128, 129], [191, 192, 193], [1, 300, 450]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_of_every_length_see_their_exact_blocks(lengths, dtype, device, exact_programs):
    """The loop over packed tokens skips exact blocks at both ends, and hides those beyond an exact block."""
    case = Case(device, INT8 + BOTH, "int3_unrotated" + BOTH, batch=3, kv_len=450, dtype=dtype)
    hide_packed_form(case)
    case.check((torch.arange(450) < torch.tensor(lengths)[:, None])[:, None, None])
    for kv_len in lengths[1:]:
        case = Case(device, INT8 + BOTH, "int3_unrotated" + BOTH, kv_len=kv_len, dtype=dtype)
        hide_packed_form(case)
        case.check()
        case.check(torch.arange(kv_len) >= kv_len // 2)


def assert_a_nan_spoils_its_own_head_only(case, bad, position):
    """Write a token of NaN keys or values to one KV head of a sequence; each KV head serves two query heads."""
    x = torch.zeros(2, 2, 1, 64)
    x[1, 0] = torch.nan
    index = ["key", "value"].index(bad)
    write_tokens_(case.data[index], case.layouts[index], x, torch.tensor([position]))
    out = case.kernel()
    assert out[1, :2].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 2:].isnan().any()


@pytest.mark.parametrize("bad", ["key", "value"])
def test_an_exact_token_that_is_not_finite_spoils_its_own_head_only(bad, device):
    case = Case(device, "int4_per_channel" + ONE, "int4_unrotated" + ONE, batch=2, num_kv_heads=2)
    assert_a_nan_spoils_its_own_head_only(case, bad, 129)


def test_data_with_a_residual_may_have_any_strides(device):
    case = Case(device, "int4_per_channel" + ONE, "int4_unrotated" + BOTH, batch=2)
    data = [torch.cat([data, data], 1).to(device)[:, : case.batch] for data in case.data]
    expected = case.kernel()
    case.data = data
    assert torch.equal(case.kernel(), expected)


@pytest.mark.parametrize("format_name", ["float32", "bfloat16"])
def test_without_room_for_a_tile_tokens_are_dequantized(format_name, device, monkeypatch):
    monkeypatch.setattr(launcher, "capability_of", lambda device: 8)
    monkeypatch.setattr(launcher, "multiprocessor_of", lambda device: launcher.Multiprocessor(64 << 10, 64 << 10))
    case = Case(device, format_name, format_name, kv_len=70, head_dim=256, v_head_dim=256, dtype=torch.float32)
    monkeypatch.setattr(launch, "_attend_decode", None)
    case.check(torch.rand(1, case.kv_len) < 0.7)


@pytest.mark.gpu
@pytest.mark.parametrize(("key", "value"), [(INT8, INT8), ("int4_per_channel" + ONE, "int4_unrotated" + BOTH)])
def test_offsets_beyond_two_gigabytes_are_right(key, value):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    case = Case(torch.device("cuda"), key, value, group_size=1, head_dim=128, v_head_dim=128)
    plain = case.kernel()
    wide = []
    for data in case.data:
        buffer = torch.full((data.shape[0], 1, 100_000, data.shape[3]), NAN_BYTES, dtype=torch.uint8, device="cuda")
        assert buffer.numel() > 2**31
        buffer[:, :, -1:] = data.cuda()
        wide.append(buffer[:, :, -1:])
    query = case.query.cuda()
    out = launch.attention(query, *wide, None, None, case.kv_len, False, case.scale, 0.0, case.key, case.value, 128)
    assert torch.equal(out.cpu(), plain)
