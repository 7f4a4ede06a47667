"""Attention agrees with the specification for every number of query heads of a KV head, on the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attention_case import BOTH, INT8, ONE, Case, hide_packed_form

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_outputs")]

ROTATED_INT4 = "int4_per_token_head"
PAIRS = [
    (INT8, INT8),
    (INT8, "int4_unrotated"),
    (ROTATED_INT4, ROTATED_INT4),
    ("turboquant_4bit", INT8),
    ("turboquant_4bit", "turboquant_4bit"),
    ("turboquant_3bit", "int3_unrotated"),
    ("int4_per_channel" + ONE, ROTATED_INT4),
    ("int8_per_channel" + ONE, INT8),
    ("turboquant_3bit" + BOTH, "turboquant_3bit" + BOTH),
    ("bfloat16", "bfloat16"),
    ("int4_per_group_64", "int4_per_group_32"),
    (ROTATED_INT4, "turboquant_3bit"),
    ("int8_per_channel" + ONE, "int2_per_group_32"),
    ("bfloat16", ROTATED_INT4),
]
"""Formats whose kernels have different configurations."""
GROUPS = [(5, 128), (8, 64), (8, 256), (12, 128), (16, 64), (16, 256), (4, 192), (40, 128)]
"""Query heads of a KV head, and channels."""
SOME_GROUPS = {
    ("turboquant_4bit", INT8): GROUPS[1:4],
    ("bfloat16", "bfloat16"): GROUPS[4:6],
    ("int4_per_group_64", "int4_per_group_32"): [*GROUPS[::2], (4, 128), (2, 256)],
    (ROTATED_INT4, "turboquant_3bit"): [(4, 128), (2, 256), (16, 64)],
    ("int8_per_channel" + ONE, "int2_per_group_32"): [(4, 128), (2, 256), (16, 128)],
    ("bfloat16", ROTATED_INT4): [(4, 64), (4, 128), (16, 128)],
}
"""Pairs that are tested with a part of GROUPS, or with others."""


def case_of(device, key, value, group_size, head_dim, **options) -> Case:
    case = Case(
        device, key, value, group_size=group_size, head_dim=head_dim, v_head_dim=head_dim, kv_len=450, **options
    )
    hide_packed_form(case)
    return case


@pytest.mark.parametrize(
    ("key", "value", "group_size", "head_dim"),
    [(*pair, *group) for pair in PAIRS for group in SOME_GROUPS.get(pair, GROUPS)],
)
def test_any_number_of_query_heads_share_a_kv_head(key, value, group_size, head_dim, device):
    case_of(device, key, value, group_size, head_dim).check()


@pytest.mark.parametrize(
    ("key", "value", "group_size", "q_len", "head_dim"),
    [
        (INT8, INT8, 4, 4, 128),
        (INT8, INT8, 8, 5, 64),
        (ROTATED_INT4, ROTATED_INT4, 4, 4, 128),
        (ROTATED_INT4, ROTATED_INT4, 4, 9, 128),
        ("turboquant_3bit" + BOTH, "int4_unrotated" + BOTH, 2, 3, 256),
        ("int4_per_channel" + ONE, ROTATED_INT4, 2, 2, 64),
        ("int4_per_channel" + ONE, ROTATED_INT4, 4, 4, 128),
        ("int4_per_channel" + ONE, "int4_unrotated", 4, 9, 256),
        ("int8_per_channel" + ONE, INT8, 8, 9, 128),
    ],
)
def test_several_tokens_of_many_query_heads_see_their_own_part_of_the_cache(
    key, value, group_size, q_len, head_dim, device
):
    case = case_of(device, key, value, group_size, head_dim, q_len=q_len, batch=2)
    seen = torch.arange(case.kv_len) < case.kv_len - q_len + torch.arange(q_len)[:, None]
    mask = torch.stack([seen, seen & (torch.arange(case.kv_len) >= 70)])[:, None]
    case.check(mask)
    case.check(torch.zeros(mask.shape).masked_fill(~mask, -torch.inf))


@pytest.mark.parametrize(
    ("key", "value", "head_dim"),
    [
        ("turboquant_3bit", "turboquant_4bit" + BOTH, 16),
        (ROTATED_INT4, "int8_per_token_head" + BOTH, 16),
        ("int4_per_channel" + ONE, ROTATED_INT4, 32),
        ("int4_per_channel" + ONE, "turboquant_4bit", 64),
        ("turboquant_3bit" + BOTH, "turboquant_2bit", 256),
    ],
)
@pytest.mark.parametrize("group_size", [2, 32])
def test_blocks_may_be_exact_for_keys_or_for_values_alone(key, value, head_dim, group_size, device):
    """The rows of the other operand are decoded: 16 channels, or 16 tokens, are the first operand of a product."""
    case_of(device, key, value, group_size, head_dim, batch=2, num_kv_heads=2).check()


@pytest.mark.parametrize("key", ["int4_per_channel", "int8_per_channel"])
@pytest.mark.parametrize(("group_size", "head_dim"), [(4, 64), (16, 128), (16, 256)])
def test_scales_per_channel_serve_float32_queries_of_many_heads(key, group_size, head_dim, device):
    case_of(device, key + ONE, INT8, group_size, head_dim, dtype=torch.float32).check()
