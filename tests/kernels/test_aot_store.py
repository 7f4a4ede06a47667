"""The kernels that store and gather tokens compile for sm_80 and sm_90 with Triton's own compiler; no GPU is needed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from aot_compilation import CPU, INT8, RESIDUAL, count, uses
from aot_devices import Resources
from formats_of_every_kind import BY_TOKEN
from packed_bytes import empty_packed

from kvcompile.kernels import launch
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.store import launch as store_launch

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")


STORED = [("int8_per_token_head", 90), ("turboquant_2.5bit", 90), ("int4_per_token_head", 80)]
"""A format of whole bytes, one with two planes of codes and one with zero points; the others are slow."""


@pytest.mark.parametrize(
    ("format_name", "capability"),
    [
        pytest.param(*case, marks=() if case in STORED else pytest.mark.slow)
        for case in itertools.product(BY_TOKEN, (90, 80))
    ],
    indirect=["capability"],
)
def test_storing_compiles_for_every_format_and_spills_nothing_for_one_token(format_name, capability, compiled):
    role, tokens = ("key", 1) if capability == 90 else ("value", 64)
    data = empty_packed(PackedLayout(format_name, role, 128), 64, 1, 2, CPU)
    x = torch.zeros(1, tokens, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    launch.store(data, x, torch.arange(tokens), None, format_name, role)
    (kernel,) = compiled["store"]
    instructions = kernel.asm["sass"].splitlines()
    # A rotated block of 64 tokens leaves few registers. The number of spills depends on the version of Triton.
    assert count(instructions, "LDL") + count(instructions, "STL") <= (0 if tokens == 1 else len(instructions) // 20)


@pytest.mark.parametrize("capability", [100], indirect=True)
@pytest.mark.parametrize(
    "head_dim", [96, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
def test_a_rotated_block_is_stored_with_few_spills_for_compute_capability_10(head_dim, compiled):
    data = empty_packed(PackedLayout("turboquant_3bit", "key", head_dim), 64, 1, 2, CPU)
    x = torch.zeros(1, 64, 2, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    launch.store(data, x, torch.arange(64), None, "turboquant_3bit", "key")
    (kernel,) = compiled["store"]
    assert Resources.of(kernel).spilled <= 32


@pytest.mark.parametrize(
    ("key", "value", "v_head_dim", "tokens", "launches"),
    [
        ("int4_per_token_head", "turboquant_4bit", 80, 1, {"store_pair": 1}),
        ("turboquant_4bit", "int4_unrotated", 64, 100, {"store_pair": 1}),
        (INT8, "int4_unrotated", 80, 100, {"store_pair": 1}),
        (INT8, "int4_unrotated", 256, 100, {"store": 2}),  # a program for 256 channels has more warps
        (INT8, "int4_per_group_32", 96, 100, {"store": 2}),  # groups with padding have another limit of registers
        ("int4_per_channel" + RESIDUAL, "int4_unrotated", 80, 1, {"store_few_pair": 1}),
        (
            "int4_per_channel" + RESIDUAL,
            "int4_unrotated",
            80,
            17,
            {"place_tokens": 1, "copy_tags": 1, "store_blocks": 1, "store": 1},
        ),
    ],
)
def test_keys_and_values_are_stored_by_one_kernel_if_they_have_the_same_tiles(
    key, value, v_head_dim, tokens, launches, counted
):
    layouts = PackedLayout.parse(key, "key", 128), PackedLayout.parse(value, "value", v_head_dim)
    data = [empty_packed(layout, 128, 1, 2, CPU) for layout in layouts]
    x = [torch.zeros(1, 2, tokens, layout.head_dim, dtype=torch.bfloat16) for layout in layouts]
    launch.store_pair(*data, *x, torch.arange(tokens), None, *(layout.spec for layout in layouts))
    assert {name: len(kernels) for name, kernels in counted.items() if kernels} == launches


def test_a_whole_cache_and_its_header_are_stored_with_few_spills(compiled):
    layout = PackedLayout.parse("int4_per_channel" + RESIDUAL, "key", 128)
    data = empty_packed(layout, 128, 1, 2, CPU)
    x = torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    store_launch.store_whole_blocks(data[layout.header_blocks :], x, replace(layout, residual=None))
    store_launch.store_header(data, x, None, layout)
    for name, share in (("store", 1 / 20), ("last_token", 0), ("store_header", 0)):
        (kernel,) = compiled[name]
        instructions = kernel.asm["sass"].splitlines()
        # The number of spills depends on the version of Triton; 3.6 has none.
        assert count(instructions, "LDL") + count(instructions, "STL") <= share * len(instructions)


@pytest.mark.parametrize(
    ("format_name", "role", "tokens"),
    [
        ("int4_per_channel", "key", 16),
        pytest.param("int4_per_token_head", "value", 64, marks=pytest.mark.slow),
        pytest.param("int8_per_channel", "key", 16, marks=pytest.mark.slow),
    ],
)
def test_storing_with_a_residual_compiles(format_name, role, tokens, compiled):
    layout = PackedLayout.parse(format_name + RESIDUAL, role, 128)
    data = empty_packed(layout, 64, 1, 2, CPU)
    x = torch.zeros(1, tokens, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    launch.store(data, x, torch.arange(tokens), None, layout.spec, role)
    kernels = [*compiled["store_few"], *compiled["place_tokens"], *compiled["store_blocks"]]
    assert len(kernels) == (1 if tokens <= 16 else 2)
    for kernel in kernels:
        assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


def test_storing_latents_compiles_without_spills(compiled):
    data = empty_packed(PackedLayout("fp8_ds_mla", "key", 512), 128, 1, 1, CPU)
    x = torch.zeros(1, 1, 100, 512, dtype=torch.bfloat16)
    launch.store(data, x, torch.arange(100), None, "fp8_ds_mla", "key")
    (kernel,) = compiled["store_latents"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)], indirect=True)
def test_row_major_tokens_are_gathered_in_words_of_16_bytes(compiled):
    for role, width in (("key", "128"), ("value", "U8")):
        layout = PackedLayout(INT8, role, 128)
        gather_kernel.gather(empty_packed(layout, 100, 1, 2, CPU), layout, torch.zeros(2, 100, dtype=torch.int64))
        instructions = compiled["gather"][-1].asm["sass"].splitlines()
        assert uses(instructions, rf"LDG\.E\.{width}")
        assert not uses(instructions, "LDL")


@pytest.mark.parametrize(("role", "tokens"), [("key", 1), pytest.param("value", 64, marks=pytest.mark.slow)])
def test_storing_words_compiles(role, tokens, compiled):
    layout = PackedLayout("uniform_4321", role, 128)
    data, x = empty_packed(layout, 64, 1, 2, CPU), torch.zeros(1, 2, tokens, 128)
    launch.store(data, x, torch.arange(tokens), None, layout.spec, role)
    (kernel,) = compiled["store"]
    instructions = kernel.asm["sass"].splitlines()
    assert count(instructions, "LDL") + count(instructions, "STL") <= (0 if tokens == 1 else len(instructions) // 20)
