"""Formats for parametrized tests: one of every kind that code treats differently, and combinations of two lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

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
"""The formats of BY_TOKEN that support a head_dim of 16."""

KINDS = [*BY_TOKEN, "int4_per_channel"]


def supports(name: str, head_dim: int) -> bool:
    """Whether the format supports keys and values of ``head_dim``."""
    return all(get_format(name).unsupported(head_dim, role) is None for role in ("key", "value"))


HEAD_DIMS = {64: BY_TOKEN, 80: BY_TOKEN, 128: ["int8_per_token_head", "turboquant_2.5bit", "int2_per_group_32"],
             96: ["int4_per_token_head"], 256: ["fp8_e4m3", "turboquant_4bit"],
             512: ["int8_per_token_head", "int4_per_token_head", "turboquant_2.5bit"]}  # fmt: skip
SHAPES = [(name, head_dim) for head_dim, names in HEAD_DIMS.items() for name in names if supports(name, head_dim)]
"""Every kind with a head_dim that is a power of two and with one that is not; some kinds with further head_dims."""


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All combinations of two lists. By default only some run: every element of both, combined in turn.

    The remaining combinations are marked ``slow``.
    """
    count = min(len(first), len(second))
    return [
        pytest.param(a, b, marks=() if i % count == j % count else pytest.mark.slow)
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
