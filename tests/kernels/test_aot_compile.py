"""The kernels of attention compile for sm_80 and sm_90 with Triton's own compiler; no GPU is needed."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton
from aot_compilation import CPU, GPUS, INT8, RESIDUAL, CountOnly, count, uses
from aot_devices import Resources
from formats_of_every_kind import in_turn
from packed_bytes import empty_packed

from kvcompile.compat.versions import numbers
from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.attention.tuned import HOPPER
from kvcompile.kernels.formats import get_format
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.spec.key_factors import KeyFactors
from kvcompile.kernels.store import launch as launch_store

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")

ROTATED_INT4 = "int4_per_token_head"

keeps_operands_in_registers = pytest.mark.skipif(
    numbers(triton.__version__)[:2] == (3, 8),
    reason="Triton 3.8 stores the operand of several products in shared memory",
)

loads_keys_in_pieces = pytest.mark.skipif(
    numbers(triton.__version__)[:2] >= (3, 8), reason="with Triton 3.8 and 3.9 a plane of keys is not loaded in pieces"
)


def without_compiling(monkeypatch, *launchers):
    """Only count the kernels of ``launchers``, pairs of a module and the name of a kernel that other tests compile."""
    for module, name in launchers:
        monkeypatch.setattr(module, f"launch_{name}", launcher.Launcher(CountOnly(None)))


@pytest.fixture
def attending(compiled, monkeypatch):
    """``compiled`` without the kernel that merges splits, which other tests of this folder compile."""
    without_compiling(monkeypatch, (launch, "combine"))
    return compiled


def attend(key, value, *, q_len=1, kv_len=1000, group_size=4, head_dim=128, dtype=torch.bfloat16, mask=None,
           is_causal=False, sinks=None, softcap=0.0, has_factors=False):  # fmt: skip
    """Launch attention with these arguments; ``has_factors`` multiplies keys by factors."""
    layouts = PackedLayout.parse(key, "key", head_dim), PackedLayout.parse(value, "value", head_dim)
    data = [empty_packed(layout, kv_len, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 2 * group_size, q_len, head_dim, dtype=dtype)
    factors = KeyFactors(query.clone(), torch.zeros(2, kv_len, head_dim, dtype=dtype)) if has_factors else None
    launch.attention(
        query, *data, mask, sinks, kv_len, is_causal, 0.1, softcap, key, value, head_dim, key_factors=factors
    )


def main_loop(kernel, also="MMA"):
    """The machine instructions of the first loop with tensor core products and with the instruction ``also``."""
    lines = [line.split("\t")[-1] for line in kernel.asm["sass"].splitlines()]
    labels = {line[:-1]: index for index, line in enumerate(lines) if re.fullmatch(r"\w+:", line)}
    for end, line in enumerate(lines):
        branch = re.search(r"BRA (\w+);", line)
        if branch and labels.get(branch[1], end) < end:
            loop = lines[labels[branch[1]] : end]
            if all(any(name in instruction for instruction in loop) for name in ("MMA", also)):
                return loop
    raise AssertionError(f"no loop with tensor core products and {also}")


def allocated_in_loop(kernel):
    """The tiles that the loop of a decode kernel writes to shared memory, besides asynchronous copies."""
    loop = kernel.asm["ttgir"].split("scf.for")[1].split("scf.yield %new_maximum")[0]
    return re.findall(r"ttg.local_alloc %\w+ ?(?:#\d+)? :|ttg.local_alloc %.* : \(", loop)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("format_name", "capability"),
    [(INT8, 80), ("turboquant_4bit", 90), *(pytest.param(*case, marks=pytest.mark.slow) for case in
     (("fp8_e4m3", 90), (INT8, 90), ("int4_unrotated", 80), ("bfloat16", 90)))],
    indirect=["capability"],
)  # fmt: skip
def test_decoding_compiles_to_a_loop_without_spills_and_stalling_loads(format_name, compiled):
    attend(format_name, format_name)
    (kernel,) = compiled["attention"]
    loop = main_loop(kernel)
    assert not uses(loop, "LDL")
    assert not uses(loop, "STL")
    assert uses(loop, "LDGSTS")  # asynchronous copies
    assert not uses(loop, "LDG")


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize(
    "format_name", [INT8, *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4_unrotated", "fp8_e4m3"))]
)
def test_factors_of_keys_are_loaded_ahead_and_multiply_keys_in_registers(format_name, attending):
    attend(format_name, format_name, has_factors=True)
    assert not attending["attention"]
    (kernel,) = attending["attention_with_factors"]
    loop = main_loop(kernel)
    assert not any(uses(loop, name) for name in ("LDL", "STL"))
    assert uses(loop, "LDGSTS")
    assert uses(loop, "LDG") == (format_name == "int4_unrotated")  # a scale of 16 bits is too small for such a copy
    # Only softmax weights are written to shared memory by threads: no decoded key passes through it.
    assert count(loop, r"STS\S*") <= 4


@pytest.mark.parametrize("residual", ["", pytest.param("[recent=1,sinks=1,bfloat16]", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "format_name",
    [
        "int3_unrotated",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("int8_per_channel", "turboquant_4bit", "turboquant_3bit", "int4_per_token_head")
        ),
    ],
)
def test_keys_with_factors_compile_in_any_format_and_with_exact_blocks(format_name, residual, attending):
    attend(format_name + residual, INT8 + residual, has_factors=True)
    assert len(attending["attention_with_factors"]) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turboquant_4bit", "turboquant_4bit"),
        *(
            pytest.param(key, INT8, marks=pytest.mark.slow)
            for key in ("turboquant_4bit", "int4_unrotated", "turboquant_3bit")
        ),
        pytest.param("int4_unrotated", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_on_hopper_codes_that_become_operands_in_registers_are_multiplied_by_single_warps(key, value, attending):
    attend(key, value)
    (kernel,) = attending["attention"]
    assert "HGMMA" not in kernel.asm["sass"]
    assert not uses(main_loop(kernel), "LDL|STL")


@pytest.mark.parametrize(
    ("key", "q_len", "multiplies_integers"),
    [
        ("turboquant_3bit", 1, True),
        pytest.param("int4_unrotated", 1, False, marks=pytest.mark.slow),  # a query without a rotation has outliers
        pytest.param(ROTATED_INT4, 1, True, marks=pytest.mark.slow),
        pytest.param(ROTATED_INT4, 2, True, marks=pytest.mark.slow),
        pytest.param(ROTATED_INT4, 5, True, marks=pytest.mark.slow),  # two programs of 16 rows
        pytest.param("turboquant_4bit", 1, True, marks=pytest.mark.slow),
    ],
)
def test_integer_keys_are_multiplied_as_integers_if_the_format_is_rotated(key, q_len, multiplies_integers, attending):
    attend(key, "int4_unrotated", q_len=q_len)
    (kernel,) = attending["attention"]
    assert uses(main_loop(kernel), r"IMMA\S*") == multiplies_integers


@pytest.mark.parametrize(
    ("key", "value", "group_size", "head_dim"),
    [
        (ROTATED_INT4, ROTATED_INT4, 16, 128),
        (ROTATED_INT4, ROTATED_INT4, 4, 256),
        pytest.param(INT8, INT8, 16, 128, marks=pytest.mark.slow),
        pytest.param("turboquant_3bit", "int3_unrotated", 16, 128, marks=pytest.mark.slow),
        pytest.param(INT8, INT8, 8, 256, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_many_query_heads_or_channels_take_no_products_of_warpgroups_and_do_not_spill(
    key, value, group_size, head_dim, attending
):
    attend(key, value, group_size=group_size, head_dim=head_dim)
    (kernel,) = attending["attention"]
    assert "HGMMA" not in kernel.asm["sass"]
    assert not uses(main_loop(kernel), "LDL|STL")


@pytest.mark.skipif(
    numbers(triton.__version__)[:2] >= (3, 8), reason="with Triton 3.8 and 3.9 a program has two warps, which spill"
)
@pytest.mark.parametrize("format_name", [ROTATED_INT4, pytest.param(INT8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_heads_of_512_channels_do_not_spill(format_name, attending):
    attend(format_name, format_name, group_size=8, head_dim=512)
    (kernel,) = attending["attention"]
    assert not uses(main_loop(kernel), "LDL|STL")


@pytest.mark.parametrize(
    "key",
    ["turboquant_3bit", *(pytest.param(key, marks=pytest.mark.slow) for key in ("turboquant_4bit", ROTATED_INT4))],
)
@pytest.mark.parametrize("value", ["int4_unrotated", pytest.param("int3_unrotated", marks=pytest.mark.slow)])
def test_codes_become_floats_in_registers_and_only_weights_pass_through_shared_memory(key, value, attending):
    attend(key, value)
    (kernel,) = attending["attention"]
    assert len(allocated_in_loop(kernel)) == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("turboquant_3bit", "int4_unrotated"), *(pytest.param(*case, marks=pytest.mark.slow) for case in
     (("turboquant_3bit", "turboquant_2bit"), ("turboquant_4bit", "turboquant_4bit")))],
)  # fmt: skip
def test_tables_of_levels_stay_in_registers(key, value, attending):
    attend(key, value)
    (kernel,) = attending["attention"]
    copies = [line for line in main_loop(kernel) if re.match(r"(MOV|IMAD\S*) \w+, (RZ, RZ, )?UR\d+;", line)]
    assert len(copies) < 10  # tables in uniform registers take 49 to 173 copies


@pytest.mark.parametrize("name", ["turboquant_3.5bit", pytest.param("turboquant_2.5bit", marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_planes_of_unequal_bits_are_looked_up_in_tables_without_spills(name, attending):
    attend(name, name)
    (kernel,) = attending["attention"]
    loop = main_loop(kernel)
    assert not uses(loop, "LDL|STL")
    assert count(loop, "PRMT") > 4 * count(loop, "FFMA")  # a polynomial for each level takes three FFMA


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, torch.ones(1, 1, 1, 1000, dtype=torch.bool)], ids=["unmasked", "masked"])
@pytest.mark.parametrize("value", ["int4_unrotated", "int3_unrotated", "turboquant_3bit", "turboquant_2bit"])
def test_a_hopper_multiprocessor_with_less_bandwidth_gets_one_warp_per_scheduler_without_spills(
    value, mask, compiled, monkeypatch
):
    narrow = GPUS[90].multiprocessor._replace(bandwidth=25e9)
    monkeypatch.setattr(launcher, "multiprocessor_of", lambda device: narrow)
    attend("turboquant_3bit", value, mask=mask)
    (kernel,) = compiled["attention"]
    assert kernel.metadata.num_warps in (1, 2)
    assert not uses(main_loop(kernel), "LDL|STL")


@pytest.mark.parametrize(
    "key", ["int4_per_channel", pytest.param("int4_per_channel" + RESIDUAL, marks=pytest.mark.slow)]
)
def test_scales_per_channel_are_copied_asynchronously_and_multiply_queries_in_registers(key, attending):
    attend(key, "int4_unrotated")
    attend("int4_unrotated", "int4_unrotated")
    # The loop over exact blocks has products, too, but no asynchronous copies.
    loop, loop_per_token = (main_loop(kernel, also="LDGSTS") for kernel in attending["attention"])
    assert not uses(loop, "STL")  # values that the loop does not change may be loaded again
    assert sum("HMMA" in line for line in loop) == sum("HMMA" in line for line in loop_per_token) + 8  # zero points
    assert sum("BAR.SYNC" in line for line in loop) <= sum("BAR.SYNC" in line for line in loop_per_token)
    if key == "int4_per_channel":
        assert not uses(loop, "LDG")
        assert len(loop) < 1.1 * len(loop_per_token)


@pytest.mark.parametrize(("key", "value"), in_turn([INT8, "turboquant_4bit"], [INT8, "turboquant_4bit"]))
def test_a_hopper_multiprocessor_has_room_for_as_many_decode_programs_as_configured(key, value, compiled):
    attend(key, value)
    (kernel,) = compiled["attention"]
    config = HOPPER[128, 8][8 if key == INT8 else 4, 8 if value == INT8 else 4]
    programs, threads = config.programs_per_sm, 32 * config.num_warps
    assert programs * (kernel.metadata.shared + 1024) <= 228 * 1024  # a program reserves a kilobyte
    assert programs * threads * (kernel.metadata.maxnreg or 255) <= 64 * 1024


SINKS_AND_SOFTCAP = {"sinks": torch.zeros(8), "softcap": 30.0}
VARIANTS = {
    "causal": {"q_len": 16, "is_causal": True},
    "several tokens, sinks and softcap": {
        "q_len": 3, "mask": torch.ones(3, 1000, dtype=torch.bool), **SINKS_AND_SOFTCAP,
    },
    "padded head and float mask": {"head_dim": 80, "dtype": torch.float16, "mask": torch.ones(1, 1000)},
    "float32": {"dtype": torch.float32},
    "several tokens": {"q_len": 3, "mask": torch.ones(3, 1000, dtype=torch.bool)},
    "bool mask": {"mask": torch.ones(1, 1000, dtype=torch.bool)},
    "float mask": {"mask": torch.ones(1, 1000)},
    "sinks and softcap": SINKS_AND_SOFTCAP,
    "padded head": {"head_dim": 80, "dtype": torch.float16},
    "wide head": {"head_dim": 256},
    "narrow head": {"head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("int4_per_group_64", "int4_per_group_32"),
        pytest.param("int8_per_group_32", "int8_per_group_64", marks=[pytest.mark.slow, keeps_operands_in_registers]),
    ],
)
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_scales_per_group_are_loaded_ahead_and_multiply_products(key, value, attending):
    """No scale is loaded for each code: the loop has fewer instructions than 32 for each token."""
    attend(key, value)
    (kernel,) = attending["attention"]
    loop = main_loop(kernel, "LDGSTS")
    assert len(loop) < 32 * 64
    assert not any(uses(loop, name) for name in ("LDG", "LDL", "STL"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turboquant_2.5bit", "fp8_e5m2_unit"),
        pytest.param("int2_per_group_32", INT8, marks=pytest.mark.slow),
        pytest.param("turboquant_3bit", "int3_unrotated", marks=pytest.mark.slow),
    ],
)
def test_formats_of_few_bits_compile(key, value, attending):
    attend(key, value)
    assert len(attending["attention"]) == 1


@pytest.mark.parametrize("group_size", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "head_dim", [64, 96, *(pytest.param(head_dim, marks=pytest.mark.slow) for head_dim in (32, 48, 80, 128, 192, 256))]
)
def test_planes_in_two_pieces_compile_for_all_vectors(head_dim, group_size, attending):
    attend("turboquant_3bit", "int3_unrotated", head_dim=head_dim, group_size=group_size)
    assert len(attending["attention"]) == 1


@loads_keys_in_pieces
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_codes_of_three_bits_take_three_quarters_of_the_copies_of_four_bits(attending):
    for name in ("turboquant_3bit", "turboquant_4bit"):
        attend(name, name)
    three, four = (count(main_loop(kernel), r"LDGSTS\S*128") for kernel in attending["attention"])
    assert three == 0.75 * four


@loads_keys_in_pieces
def test_rows_of_3_bit_keys_are_copied_whole(attending):
    attend("turboquant_3bit", "int3_unrotated")
    (kernel,) = attending["attention"]
    copies = [line for line in main_loop(kernel) if "LDGSTS" in line and ".128" in line]
    offsets = [int(offset, 16) for line in copies for offset in re.findall(r"\.64\+(-?0x[0-9a-f]+)\]", line)]
    assert copies
    assert all(offset % 32 == 0 for offset in offsets)  # a second copy of a sector would begin in its middle


def test_digits_of_a_query_do_not_pass_through_shared_memory_as_single_bytes(attending):
    attend("int4_per_token_head", "int4_per_token_head")
    (kernel,) = attending["attention"]
    assert not re.findall(r"(?:STS|LDS)\.U8", kernel.asm["sass"])


def test_layers_with_different_static_scales_share_their_kernels(counted):
    for key, value in ((0.0123, 1.5), (3.7e-05, 0.2)):
        attend(f"fp8_e4m3_scale{key}", f"fp8_e4m3_scale{value}")
        layout = PackedLayout.parse(f"fp8_e4m3_scale{key}", "key", 128)
        data = empty_packed(layout, 64, 1, 2, CPU)
        launch.store(data, torch.zeros(1, 2, 1, 128), torch.arange(1), None, layout.spec, "key")
    assert len(launch.launch_attention.compiled) == len(launch_store.launch_store.compiled) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "options"),
    [
        (INT8, VARIANTS["causal"]),
        pytest.param("turboquant_2.5bit", VARIANTS["causal"], marks=pytest.mark.slow),
        pytest.param("turboquant_2.5bit", VARIANTS["float mask"], marks=pytest.mark.slow),
    ],
)
def test_attention_to_exact_blocks_compiles(value, options, compiled):
    attend("int8_per_channel" + RESIDUAL, value + RESIDUAL, **options)
    assert len(compiled["attention"]) == 1


@pytest.mark.parametrize(
    ("key", "value", "head_dim"),
    [
        ("turboquant_3bit", "turboquant_3bit" + RESIDUAL, 16),
        ("int4_per_channel" + RESIDUAL, ROTATED_INT4, 64),
    ],
)
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_rows_that_are_decoded_beside_exact_blocks_may_have_sixteen_columns(key, value, head_dim, attending):
    """With 16 channels, or with the 16 tokens of one warp; :class:`CompileOnly` checks the columns of operands."""
    attend(key, value, head_dim=head_dim)
    (kernel,) = attending["attention"]
    assert kernel.metadata.num_warps == 1
    assert re.search(r"tt\.dot .* : tensor<\d+x16x", kernel.asm["ttgir"])


FETCHED_AT_LAUNCH = 64 << 10
"""Bytes of a kernel that a device fetches when it launches the kernel."""


@pytest.mark.parametrize(
    "format_name",
    [
        "turboquant_4bit",
        *(pytest.param(name, marks=pytest.mark.slow) for name in (ROTATED_INT4, "turboquant_3bit", INT8)),
    ],
)
@pytest.mark.parametrize("capability", [90], indirect=True)
def test_the_code_that_attention_to_exact_blocks_runs_is_fetched_at_launch(format_name, attending):
    """Code for keys and values that hold different exact blocks is a function after the code of the kernel."""
    mask = torch.ones(1, 1, 1, 1000, dtype=torch.bool)
    attend(*(f"{format_name}[recent=3,sinks=1,bfloat16]",) * 2, mask=mask)
    (kernel,) = attending["attention"]
    instructions = [line for line in kernel.asm["sass"].splitlines() if line.rstrip().endswith(";")]
    last_exit = max(i for i, line in enumerate(instructions) if re.search(r"\bEXIT\b", line))
    assert any("CALL.REL" in line for line in instructions[:last_exit])
    assert 16 * last_exit <= 1.05 * FETCHED_AT_LAUNCH
    assert count(main_loop(kernel, "LDGSTS"), "LDL") == count(main_loop(kernel, "LDGSTS"), "STL") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("q_len", "group_size"), [(3, 2), (2, 4)])
def test_keys_with_scales_per_channel_and_a_per_row_mask_compile(q_len, group_size, compiled):
    mask = torch.ones(1, 1, q_len, 1000, dtype=torch.bool)
    attend("int4_per_channel" + RESIDUAL, "int4_per_token_head", q_len=q_len, group_size=group_size, mask=mask)
    assert len(compiled["attention"]) == 1


@pytest.mark.slow  # test_causal_prefill_attention_compiles_and_hardly_spills compiles one kind by default
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_attention_compiles(options, compiled):
    attend("turboquant_4bit", INT8, **options)
    assert len(compiled["attention"]) == 1


def test_longer_caches_and_more_queries_do_not_recompile(counted):
    for kv_len in (1000, 1001, 1024, 5000):
        attend(INT8, INT8, kv_len=kv_len)
    assert len(launch.launch_attention.compiled) == 1
    for q_len in (20, 21, 30):
        attend(INT8, INT8, q_len=q_len, is_causal=True)
    assert len(launch.launch_attention.compiled) == 2
    for q_len in (32, 33, 100, 1000):
        attend(INT8, INT8, q_len=q_len, is_causal=True)
    assert len(launch.launch_attention.compiled) == 2
    assert len(launch_prefill.launch_prefill_attention.compiled) == 2  # for several splits, and for one


@pytest.mark.slow
def test_prefill_attention_compiles_with_a_mask(compiled):
    attend("turboquant_4bit", INT8, q_len=512, mask=torch.ones(512, 1000, dtype=torch.bool))
    assert len(compiled["prefill_attention"]) == 1


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90], indirect=True)
def test_causal_prefill_attention_compiles_and_hardly_spills(attending, monkeypatch):
    without_compiling(monkeypatch, (launch_prefill, "dequantize"))
    attend("turboquant_4bit", INT8, q_len=512, is_causal=True)
    (kernel,) = attending["prefill_attention"]
    instructions = kernel.asm["sass"].splitlines()
    assert re.search("HGMMA|HMMA", kernel.asm["sass"])
    assert count(instructions, "LDL") + count(instructions, "STL") < len(instructions) / 100


@pytest.mark.parametrize(
    "format_name",
    [
        "turboquant_3bit",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("turboquant_4bit", "int4_per_channel" + RESIDUAL, "int2_per_group_32")
        ),
    ],
)
def test_dequantizing_compiles(format_name, attending, monkeypatch):
    without_compiling(monkeypatch, (launch_prefill, "prefill_attention"))
    attend(format_name, format_name.replace("channel", "token_head"), q_len=64, head_dim=96)
    assert len(attending["dequantize"]) == 2


@pytest.mark.parametrize("capability", [80, pytest.param(90, marks=pytest.mark.slow)], indirect=True)
@pytest.mark.parametrize("head_dim", [256, pytest.param(128, marks=pytest.mark.slow)])
def test_rotated_vectors_are_dequantized_in_registers(head_dim, compiled):
    layout = PackedLayout("turboquant_4bit", "value", head_dim)
    data = empty_packed(layout, 1000, 1, 2, CPU)
    launch.dequantize(data, 1000, torch.bfloat16, layout.spec, "value", head_dim)
    (kernel,) = compiled["dequantize"]
    assert Resources.of(kernel).spilled <= 32


def attend_to_latents(num_heads, mask=None, kv_len=1000, **query_options):
    data = empty_packed(PackedLayout("fp8_ds_mla", "key", 512), kv_len, 1, 1, CPU)
    query = torch.zeros(1, num_heads, 1, 512, **{"dtype": torch.bfloat16, **query_options})
    launch.attention(query, data, None, mask, None, kv_len, False, 0.1, 0.0, "fp8_ds_mla", "fp8_ds_mla", 512)


@pytest.mark.parametrize(
    ("num_heads", "capability", "programs", "shared_kilobytes"),
    [
        (16, 90, 2, 228),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((128, 90, 1, 228), (128, 80, 1, 100))),
    ],
    indirect=["capability"],
)
def test_programs_that_attend_to_latents_fit_a_multiprocessor(
    num_heads, programs, shared_kilobytes, attending, monkeypatch
):
    monkeypatch.setattr(launch_latent, "launch_hopper_latent_attention", None)
    attend_to_latents(num_heads, torch.zeros(1000))
    (kernel,) = attending["latent_attention"]
    assert programs * (kernel.metadata.shared + 1024) <= shared_kilobytes * 1024  # a program reserves a kilobyte
    loop = main_loop(kernel)
    assert count(loop, "LDL") + count(loop, "STL") < len(loop) // 50


@pytest.mark.parametrize("mask", [None, pytest.param(torch.ones(1000, dtype=torch.bool), marks=pytest.mark.slow)])
def test_on_hopper_warpgroups_multiply_latents(mask, attending):
    attend_to_latents(128, mask)
    (kernel,) = attending["hopper_latent_attention"]
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared <= 227 * 1024
    loop = main_loop(kernel)
    assert count(loop, "HGMMA") == 512 // 16 + 2 * 64 // 16  # scores of one tile, outputs of two
    if mask is None:
        assert count(loop, "LDL") + count(loop, "STL") < len(loop) // 50


@pytest.mark.parametrize("kv_len", [pytest.param(1000, marks=pytest.mark.slow), 10000])
def test_many_splits_of_wide_vectors_are_merged_in_registers(kv_len, compiled, monkeypatch):
    without_compiling(monkeypatch, (launch_latent, "hopper_latent_attention"))
    attend_to_latents(128, kv_len=kv_len)
    (kernel,) = compiled["combine"]
    instructions = kernel.asm["sass"].splitlines()
    assert count(instructions, "LDL") + count(instructions, "STL") == 0


def test_the_portable_kernel_computes_products_of_latents_in_float32(counted):
    attend_to_latents(16, dtype=torch.float32)
    assert len(counted["latent_attention"]) == 1
    assert not counted["hopper_latent_attention"]


def test_one_tensor_of_keys_and_values_compiles(attending):
    data = empty_packed(PackedLayout(INT8, "key", 128), 1000, 1, 2, CPU)
    query = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    launch.attention(query, data, None, None, None, 1000, False, 0.1, 0.0, INT8, INT8, 128)
    (kernel,) = attending["attention"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


@pytest.mark.parametrize(
    ("key", "head_dim", "value", "v_head_dim"),
    [
        ("uniform_4321", 128, "uniform_42", 64),
        pytest.param("uniform_5421", 128, "uniform_52", 64, marks=pytest.mark.slow),
        pytest.param("uniform_6543", 128, "uniform_642", 96, marks=pytest.mark.slow),
        pytest.param("uniform_6433", 128, "uniform_53", 64, marks=pytest.mark.slow),
    ],
)
def test_words_become_levels_in_registers_without_spills(key, head_dim, value, v_head_dim, attending):
    layouts = PackedLayout(key, "key", head_dim), PackedLayout(value, "value", v_head_dim)
    data = [empty_packed(layout, 1000, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 8, 1, head_dim, dtype=torch.bfloat16)
    launch.attention(query, *data, None, None, 1000, False, 0.1, 0.0, key, value, v_head_dim)
    (kernel,) = attending["attention"]
    assert not uses(main_loop(kernel), "LDL|STL")
    num_planes = get_format(value).num_planes
    assert len(allocated_in_loop(kernel)) <= num_planes, "only the weights of each plane pass through shared memory"


@pytest.mark.slow
def test_prefill_on_words_compiles(compiled):
    layouts = PackedLayout("uniform_432", "key", 96), PackedLayout("uniform_42", "value", 64)
    data = [empty_packed(layout, 1000, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 8, 512, 96, dtype=torch.bfloat16)
    launch.attention(query, *data, None, None, 1000, True, 0.1, 0.0, "uniform_432", "uniform_42", 64)
    assert len(compiled["dequantize"]) == 2
    assert len(compiled["prefill_attention"]) == 1
