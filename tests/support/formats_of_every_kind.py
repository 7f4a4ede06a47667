"""One format of every kind that code treats differently, for tests that are too slow for all formats."""

from __future__ import annotations

from kvcompile.kernels.formats import get_format

BY_TOKEN = [
    "int8_per_token_head",
    "int4_per_token_head",
    "int4_unrotated",
    "int3_unrotated",
    "int2_per_group_32",
    "fp8_e4m3",
    "fp8_e5m2_scale0.37",
    "turboquant_2.5bit",
    "turboquant_3bit",
    "turboquant_3.5bit_seed7",
    "turboquant_4bit",
    "bfloat16",
]
"""Formats whose tokens are written one by one."""

BY_TOKEN_AT_16 = [name for name in BY_TOKEN if "group" not in name]
"""The token-wise formats that support a head_dim of 16."""

KINDS = [*BY_TOKEN, "int4_per_channel"]


def supports(name: str, head_dim: int) -> bool:
    """Whether keys and values of ``head_dim`` can have the format."""
    return all(get_format(name).unsupported(head_dim, role) is None for role in ("key", "value"))


HEAD_DIMS = {64: BY_TOKEN, 80: BY_TOKEN, 128: ["int8_per_token_head", "turboquant_2.5bit", "int2_per_group_32"],
             96: ["int4_per_token_head"], 256: ["fp8_e4m3", "turboquant_4bit"]}  # fmt: skip
SHAPES = [(name, head_dim) for head_dim, names in HEAD_DIMS.items() for name in names if supports(name, head_dim)]
"""(format, head_dim) of every kind, with a power of two, with another size, and with further sizes for some."""
