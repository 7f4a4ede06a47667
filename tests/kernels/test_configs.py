"""Configurations of decode attention, and the division of its work. No kernel runs."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("triton")

from attention_case import BOTH, INT8, ONE

from kvcompile.kernels.attention.configs import attention_config
from kvcompile.kernels.attention.divisions import Division, division_of, exact_programs_of, num_splits
from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.layout.operand import for_decode, packed_operand

ROTATED_INT4 = "int4_per_token_head"
HOPPER = launcher.Multiprocessor(227 << 10, 228 << 10)
GPUS = {
    "A100": (8, launcher.Multiprocessor(163 << 10, 164 << 10)),
    "RTX 4090": (8, launcher.Multiprocessor(99 << 10, 100 << 10)),
    "H100": (9, HOPPER._replace(bandwidth=25e9)),
    "H200": (9, HOPPER._replace(bandwidth=37e9)),
    "B200": (10, HOPPER),
    "RTX 5090": (12, launcher.Multiprocessor(99 << 10, 100 << 10)),
    "MI300": (0, launcher.Multiprocessor(64 << 10, 64 << 10, 1 << 17, 512, 64)),
}


@pytest.mark.parametrize(
    ("key", "value", "head_dim", "programs", "stages"),
    [
        ("turboquant_4bit", "turboquant_4bit", 128, (3, 2, 4, 4, 4, 2, 1), (2, 2, 3, 3, 3, 2, 2)),
        (INT8, INT8, 128, (3, 2, 2, 2, 2, 2, 1), (2, 2, 4, 4, 4, 2, 2)),
        ("turboquant_3bit", "turboquant_3bit", 128, (2, 2, 2, 8, 8, 2, 1), (2, 2, 3, 3, 3, 2, 2)),
        ("int4_per_channel" + ONE, "int4_per_token_head", 128, (3, 2, 4, 4, 4, 2, 1), (2, 2, 3, 3, 3, 2, 2)),
        ("int4_per_channel" + ONE, "int4_per_token_head", 64, (3, 3, 4, 8, 4, 3, 1), (2, 2, 3, 3, 3, 2, 2)),
        ("turboquant_4bit", "turboquant_4bit", 64, (3, 3, 4, 8, 4, 3, 1), (2, 2, 3, 3, 3, 2, 2)),
        (INT8, INT8, 96, (3, 2, 2, 3, 2, 2, 1), (2, 2, 4, 4, 4, 2, 2)),
        ("turboquant_3.5bit", "turboquant_3.5bit", 128, (2, 2, 6, 6, 5, 2, 1), (2, 2, 2, 2, 2, 2, 2)),
        ("turboquant_3.5bit", "turboquant_3.5bit", 96, (2, 2, 5, 5, 5, 2, 1), (2, 2, 2, 2, 2, 2, 2)),
        ("bfloat16", "bfloat16", 128, (2, 1, 1, 1, 1, 1, 1), (2, 2, 3, 3, 3, 2, 1)),
        ("bfloat16", "bfloat16", 256, (1, 1, 2, 2, 1, 1, None), (2, 1, 2, 2, 2, 1, None)),
        ("float32", "float32", 256, (1, None, 1, 1, 1, None, None), (1, None, 1, 1, 1, None, None)),
    ],
)
def test_programs_and_tiles_ahead_follow_from_the_shared_memory_of_a_multiprocessor(
    key, value, head_dim, programs, stages
):
    found = {}
    for name, (capability, multiprocessor) in GPUS.items():
        key_operand = packed_operand(key, "key", head_dim, False, capability)
        value_operand = packed_operand(value, "value", head_dim, False, capability)
        config = attention_config(capability, multiprocessor, key_operand, value_operand, 4, "none", False)
        found[name] = (None, None) if config is None else (config.programs_per_sm, config.num_stages)
    assert found == dict(zip(GPUS, zip(programs, stages, strict=True), strict=True))


def test_exact_tokens_and_float32_queries_are_dequantized_on_blackwell():
    """Triton 3.7 cannot compile the decode kernel for exact tokens and float32 queries."""
    both = (packed_operand(INT8 + BOTH, role, 128, True, 10) for role in ("key", "value"))
    assert attention_config(10, HOPPER, *both, 4, "none", True) is None


def test_every_split_has_a_tile():
    config = AttentionConfig(8, 64, programs_per_sm=2)
    for programs in (1, 8, 64, 150, 265, 1000):
        for kv_len in (0, 1, 64, 1000, 32768, 131072):
            tiles = max(1, -(-kv_len // config.tokens))
            for splits in (num_splits(config, programs, kv_len, 132), division_of(config, programs, 1, kv_len, 132)[1]):
                assert 1 <= splits <= tiles
                assert -(-tiles // splits) * (splits - 1) < tiles


@pytest.mark.parametrize(
    ("programs", "kv_len", "splits"),
    [
        pytest.param(1, 32768, 256, id="one program: 256 splits of two tiles run at once"),
        pytest.param(64, 32768, 4, id="as many splits as run at once"),
        pytest.param(132, 32768, 2, id="two splits fill the device"),
        pytest.param(160, 32768, 5, id="3.03 rounds of a fifth instead of 0.6 rounds"),
        pytest.param(264, 32768, 1, id="one full round"),
        pytest.param(320, 32768, 5, id="6.1 rounds of a fifth instead of 1.2 rounds"),
        pytest.param(528, 32768, 1, id="two full rounds"),
        pytest.param(525, 32768, 1, id="two rounds that are almost full"),
        pytest.param(640, 32768, 5, id="12.1 rounds of a fifth instead of 2.4 rounds"),
        pytest.param(264 * 20 + 1, 32768, 1, id="the last of 21 rounds is short"),
        pytest.param(320, 1024, 2, id="splits of eight tiles"),
        pytest.param(320, 64, 1, id="a single tile"),
        pytest.param(256, 1024, 1, id="one round that is almost full"),
    ],
)
def test_splits_leave_little_of_the_device_idle(programs, kv_len, splits):
    config = AttentionConfig(8, 64, programs_per_sm=2)
    assert num_splits(config, programs, kv_len, 132) == splits


@pytest.mark.parametrize(
    ("num_heads", "row_tiles", "kv_len", "division"),
    [
        pytest.param(64, 1, 32768, Division(0, 4), id="all programs run at once"),
        pytest.param(256, 1, 32768, Division(0, 1), id="one round that is almost full"),
        pytest.param(400, 1, 32768, Division(0, 5), id="less than two rounds: all heads are split"),
        pytest.param(528, 1, 32768, Division(1, 5), id="two full rounds: one is split"),
        pytest.param(900, 1, 32768, Division(2, 5), id="a third of 3.4 rounds is split"),
        pytest.param(896, 1, 32768, Division(1, 5), id="half of them, if heads cannot be divided by three"),
        pytest.param(5281, 1, 32768, Division(0, 5), id="a prime number of heads"),
        pytest.param(5280, 1, 32768, Division(19, 5), id="a twentieth of 20 rounds is split"),
        pytest.param(300, 3, 32768, Division(2, 5), id="tiles of rows count as programs"),
        pytest.param(900, 1, 1024, Division(2, 2), id="splits of eight tiles"),
        pytest.param(900, 1, 900, Division(0, 1), id="too few tiles for splits"),
    ],
)
def test_one_round_of_several_is_split(num_heads, row_tiles, kv_len, division):
    config = AttentionConfig(8, 64, programs_per_sm=2)
    assert division_of(config, num_heads, row_tiles, kv_len, 132) == division


@pytest.mark.parametrize(
    ("programs", "kv_len", "splits"),
    [
        pytest.param(64, 4096, 2, id="two splits of 32 tiles instead of four of 16"),
        pytest.param(64, 16384, 4, id="splits of 64 tiles"),
        pytest.param(200, 64, 1, id="a single tile"),
    ],
)
def test_short_splits_run_with_one_warp_per_scheduler(programs, kv_len, splits):
    config = AttentionConfig(8, 64, programs_per_sm=2, least_tiles=32)
    assert num_splits(config, programs, kv_len, 132) == splits


ONE_WARP = AttentionConfig(4, 64, num_warps=1, programs_per_sm=4, spare_programs=4)
TWO_WARPS = dataclasses.replace(ONE_WARP, programs_per_sm=8, spare_programs=1)


@pytest.mark.parametrize(
    ("config", "items", "num_heads", "packed_programs", "tiles", "programs"),
    [
        pytest.param(ONE_WARP, 0, 64, 512, 64, 0, id="no exact blocks"),
        pytest.param(dataclasses.replace(ONE_WARP, spare_programs=0), 12, 64, 512, 64, 0, id="no room"),
        pytest.param(ONE_WARP, 12, 8, 528, 31, 3, id="four items for each program"),
        pytest.param(ONE_WARP, 12, 64, 512, 64, 2, id="at most one program for each multiprocessor"),
        pytest.param(ONE_WARP, 12, 512, 512, 128, 0, id="no room for a program of each head"),
        pytest.param(ONE_WARP, 136, 64, 512, 64, 0, id="programs that would end after those of packed tokens"),
        pytest.param(ONE_WARP, 12, 1896, 2000, 128, 1, id="programs that do not run at once"),
        pytest.param(ONE_WARP, 12, 64, 512, 2, 6, id="two items for each program beside short programs"),
        pytest.param(ONE_WARP, 12, 2000, 2000, 2, 1, id="many short programs"),
        pytest.param(TWO_WARPS, 12, 64, 1024, 32, 3, id="two warps for each scheduler: four items for each program"),
        pytest.param(TWO_WARPS, 12, 512, 1024, 64, 1, id="two warps for each scheduler: many heads"),
    ],
)
def test_programs_of_exact_blocks_end_before_those_of_packed_tokens(
    config, items, num_heads, packed_programs, tiles, programs
):
    assert exact_programs_of(config, items, False, num_heads, packed_programs, tiles, 132) == programs


def test_items_that_are_decoded_have_a_program_each_beside_short_programs():
    assert exact_programs_of(ONE_WARP, 4, True, 64, 512, 2, 132) == 4
    assert exact_programs_of(ONE_WARP, 4, True, 8, 528, 31, 132) == 1


def config_of(gpu: str, key: str, value: str, head_dim: int, rows: int, row_mask: str = "none") -> AttentionConfig:
    capability, multiprocessor = GPUS[gpu]
    both = ((key, "key"), (value, "value"))
    operands = (for_decode(packed_operand(name, role, head_dim, False, capability)) for name, role in both)
    config = attention_config(capability, multiprocessor, *operands, rows, row_mask, False)
    assert config is not None
    return config


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200"])
@pytest.mark.parametrize("key", ["int8_per_channel" + ONE, "int4_per_channel" + BOTH])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_keys_with_scales_per_channel_are_no_operand_of_a_warpgroup(gpu, key, head_dim):
    """Its products, which have at least 16 rows and four warps, are wrong for them with 192 channels (Triton 3.6)."""
    for rows in (9, 16, 17, 33, 127):
        for value in (INT8, ROTATED_INT4, "turboquant_2.5bit"):
            for row_mask in ("none", "bool", "float"):
                assert config_of(gpu, key, value, head_dim, rows, row_mask).num_warps < 4


@pytest.mark.parametrize("pair", [(INT8, INT8), (INT8, "int4_unrotated"), (ROTATED_INT4, ROTATED_INT4),
                                  ("turboquant_3bit" + BOTH, "turboquant_3bit" + BOTH),
                                  ("int4_per_channel" + ONE, ROTATED_INT4)])  # fmt: skip
@pytest.mark.parametrize(("rows", "head_dim"), [(16, 64), (16, 128), (64, 128), (4, 256), (8, 192), (16, 256)])
def test_many_query_heads_or_channels_take_programs_of_at_most_two_warps_on_hopper(pair, rows, head_dim):
    assert config_of("H200", *pair, head_dim, rows).num_warps <= 2


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("pair", [(INT8 + BOTH, INT8 + BOTH), ("turboquant_3bit" + BOTH, "turboquant_3bit" + BOTH)])
def test_programs_with_exact_blocks_of_wide_heads_run_at_once(pair, rows):
    """Rows that are loaded ahead take more shared memory than a tile."""
    config = config_of("H200", *pair, 256, rows)
    shared = 16 * config.num_warps * 2 * (256 + 256 + 256) + 2 * max(8, rows) * 256  # rows and the query
    assert config.programs_per_sm * (shared + 1024) <= HOPPER.shared_memory


@pytest.mark.parametrize(("rows", "head_dim"), [(8, 128), (16, 128), (8, 256)])
def test_with_a_float_mask_for_each_row_a_warp_has_half_as_many_tokens(rows, head_dim):
    """The addresses of the mask would spill kilobytes otherwise."""
    for row_mask, tokens in (("bool", 64), ("float", 32)):
        config = config_of("H200", ROTATED_INT4, ROTATED_INT4, head_dim, rows, row_mask)
        assert config.tokens // config.num_warps <= tokens
