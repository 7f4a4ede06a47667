"""The kernels compile for sm_80 and sm_90 with Triton's own compiler; no GPU is needed."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

import triton
from formats_of_every_kind import BY_TOKEN, in_turn
from packed_bytes import empty_packed
from triton.backends.compiler import GPUTarget
from triton.tools import disasm

from kvcompile.compat.versions import numbers
from kvcompile.kernels import launch
from kvcompile.kernels.attention import launch_prefill
from kvcompile.kernels.attention.configs import DECODE
from kvcompile.kernels.gather import kernel as gather_kernel
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.triton import INTERPRETED
from kvcompile.kernels.latent import launch as launch_latent
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.store import launch as launch_store

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs Triton's compiler")

CPU = torch.device("cpu")
INT8, ROTATED_INT4 = "int8_per_token_head", "int4_per_token_head"
RESIDUAL = "[recent=1,sinks=1,bfloat16]"


SHARED_MEMORY = {
    capability: kilobytes << 10
    for capability, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}
"""The most bytes of shared memory of a program, by compute capability (CUDA C++ Programming Guide, technical
specifications)."""


class CompileOnly:
    """Stands in for a kernel: compiles it for every new launch, and does not run it."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = []

    def __getitem__(self, grid):
        def compile_kernel(*arguments, **options):
            self.compiled.append(self.kernel.warmup(*arguments, grid=grid, **options))

        return compile_kernel


class CountOnly:
    """Stands in for a kernel whose versions are only counted: neither compiles nor runs it."""

    def __init__(self, kernel):
        self.compiled = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.compiled.append(arguments) or self


class NoDriver:
    """Answers what Triton asks a driver before it compiles, for a GPU that does not exist."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return f"sm_{self.capability}"

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def capability(request):
    return getattr(request, "param", 90)


@pytest.fixture
def compiled(capability, monkeypatch):
    """The kernels that launchers have compiled for ``capability``, by name."""
    return stand_ins(CompileOnly, capability, monkeypatch)


@pytest.fixture
def counted(capability, monkeypatch):
    """One item for each version of a kernel that launchers would have compiled for ``capability``, by name."""
    return stand_ins(CountOnly, capability, monkeypatch)


def stand_ins(stand_in, capability, monkeypatch):
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDriver(capability))
    # Triton's pattern of a line takes addresses of four digits only, and so ends the code after 64 KiB.
    monkeypatch.setattr(disasm, "FLINE_RE", re.compile(disasm.FLINE_RE.pattern.replace(r"\w{4}", r"\w{4,}", 1)))
    monkeypatch.setattr(launcher, "capability_of", lambda device: capability // 10)
    monkeypatch.setattr(launcher, "num_sms_of", lambda device: 108)
    monkeypatch.setattr(launcher, "shared_memory_of", lambda device: SHARED_MEMORY[capability])
    monkeypatch.setattr(launcher, "INTERPRETED", True)  # there is no device to switch to
    kernels = {}
    for module, names in (
        (launch, "attention combine visible_range"),
        (launch_store, "store store_pair store_few store_few_pair place_tokens copy_tags store_blocks"),
        (launch_prefill, "dequantize prefill_attention"),
        (launch_latent, "latent_attention hopper_latent_attention store_latents"),
        (gather_kernel, "gather"),
    ):
        for name in names.split():
            kernel = stand_in(getattr(module, f"{name}_kernel"))
            monkeypatch.setattr(module, f"launch_{name}", launcher.Launcher(kernel))
            kernels[name] = kernel.compiled
    return kernels


def attend(key, value, *, q_len=1, kv_len=1000, group_size=4, head_dim=128, dtype=torch.bfloat16, mask=None,
           is_causal=False, sinks=None, softcap=0.0):  # fmt: skip
    """Launch attention with these arguments."""
    layouts = PackedLayout.parse(key, "key", head_dim), PackedLayout.parse(value, "value", head_dim)
    data = [empty_packed(layout, kv_len, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 2 * group_size, q_len, head_dim, dtype=dtype)
    launch.attention(query, *data, mask, sinks, kv_len, is_causal, 0.1, softcap, key, value, head_dim)


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


def count(instructions, name):
    return sum(bool(re.search(rf"\b{name}\b", instruction)) for instruction in instructions)


def uses(instructions, name):
    return count(instructions, name) > 0


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


@pytest.mark.parametrize(
    ("key", "q_len", "multiplies_integers"),
    [
        ("turboquant_3bit", 1, True),
        ("int4_unrotated", 1, False),  # a query that is not rotated may have outliers
        (ROTATED_INT4, 2, False),  # eight rows fill the columns
        pytest.param(ROTATED_INT4, 1, True, marks=pytest.mark.slow),
        pytest.param("turboquant_4bit", 1, True, marks=pytest.mark.slow),
    ],
)
def test_integer_keys_of_a_rotated_format_are_multiplied_as_integers_if_a_query_has_spare_columns(
    key, q_len, multiplies_integers, compiled
):
    attend(key, "int4_unrotated", q_len=q_len)
    (kernel,) = compiled["attention"]
    assert uses(main_loop(kernel), r"IMMA\S*") == multiplies_integers


@pytest.mark.parametrize(
    "key",
    ["turboquant_3bit", *(pytest.param(key, marks=pytest.mark.slow) for key in ("turboquant_4bit", ROTATED_INT4))],
)
@pytest.mark.parametrize("value", ["int4_unrotated", pytest.param("int3_unrotated", marks=pytest.mark.slow)])
def test_codes_become_floats_in_registers_and_only_weights_pass_through_shared_memory(key, value, compiled):
    attend(key, value)
    (kernel,) = compiled["attention"]
    loop = kernel.asm["ttgir"].split("scf.for")[1].split("scf.yield %new_maximum")[0]
    written = re.findall(r"ttg.local_alloc %\w+ ?(?:#\d+)? :|ttg.local_alloc %.* : \(", loop)
    assert len(written) == 1


@pytest.mark.parametrize(
    "key", ["int4_per_channel", pytest.param("int4_per_channel" + RESIDUAL, marks=pytest.mark.slow)]
)
def test_scales_per_channel_are_copied_asynchronously_and_multiply_queries_in_registers(key, compiled):
    attend(key, "int4_per_token_head")
    attend("int4_unrotated", "int4_per_token_head")
    # The loop over exact blocks has products, too, but no asynchronous copies.
    loop, loop_per_token = (main_loop(kernel, also="LDGSTS") for kernel in compiled["attention"])
    assert not uses(loop, "STL")  # values that the loop does not change may be loaded again
    assert sum("HMMA" in line for line in loop) == sum("HMMA" in line for line in loop_per_token) + 8  # zero points
    assert sum("BAR.SYNC" in line for line in loop) == sum("BAR.SYNC" in line for line in loop_per_token)
    if key == "int4_per_channel":
        assert not uses(loop, "LDG")
        assert len(loop) < 1.1 * len(loop_per_token)


@pytest.mark.parametrize(("key", "value"), in_turn([INT8, "turboquant_4bit"], [INT8, "int4_per_token_head"]))
def test_a_hopper_multiprocessor_has_room_for_as_many_decode_programs_as_configured(key, value, compiled):
    attend(key, value)
    (kernel,) = compiled["attention"]
    config = DECODE[9, 8 if key == INT8 else 4, 8 if value == INT8 else 4]
    programs, threads = config.programs_per_sm, 32 * config.num_warps
    assert programs * (kernel.metadata.shared + 1024) <= 228 * 1024  # a program reserves a kilobyte
    assert programs * threads * (kernel.metadata.maxnreg or 255) <= 64 * 1024


FITS = [
    (key, head_dim, q_len, capability)
    for capability in SHARED_MEMORY
    for key in ("float32", "bfloat16", INT8, "turboquant_3bit", "int4_per_channel" + RESIDUAL)
    for head_dim, q_len in ((64, 1), (96, 1), (128, 1), (256, 1), (128, 64), (256, 64))
    if (key, head_dim, q_len) != ("float32", 256, 1) or SHARED_MEMORY[capability] >= 148 << 10
]
WIDE_ON_SMALL = [(INT8, 256, 64, 89), ("float32", 256, 1, 90), ("bfloat16", 256, 1, 86)]


@pytest.mark.parametrize(
    ("key", "head_dim", "q_len", "capability"),
    [*WIDE_ON_SMALL, *(pytest.param(*case, marks=pytest.mark.slow) for case in FITS if case not in WIDE_ON_SMALL)],
    indirect=["capability"],
)
def test_every_chosen_configuration_fits_into_the_shared_memory_of_the_device(
    key, head_dim, q_len, capability, compiled
):
    attend(key, key.replace("channel", "token_head"), head_dim=head_dim, q_len=q_len, is_causal=q_len > 1)
    for kernels in compiled.values():
        for kernel in kernels:
            assert kernel.metadata.shared <= SHARED_MEMORY[capability]


@pytest.mark.parametrize(("format_name", "capability"), in_turn(BY_TOKEN, [90, 80]), indirect=["capability"])
def test_storing_compiles_for_every_format_and_spills_nothing_for_one_token(format_name, capability, compiled):
    role, tokens = ("key", 1) if capability == 90 else ("value", 64)
    data = empty_packed(PackedLayout(format_name, role, 128), 64, 1, 2, CPU)
    x = torch.zeros(1, tokens, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
    launch.store(data, x, torch.arange(tokens), None, format_name, role)
    (kernel,) = compiled["store"]
    instructions = kernel.asm["sass"].splitlines()
    # A rotated block of 64 tokens leaves few registers. The number of spills depends on the version of Triton.
    assert count(instructions, "LDL") + count(instructions, "STL") <= (0 if tokens == 1 else len(instructions) // 20)


@pytest.mark.parametrize(
    ("key", "value", "v_head_dim", "tokens", "launches"),
    [
        ("int4_per_token_head", "turboquant_4bit", 80, 1, {"store_pair": 1}),
        ("turboquant_4bit", "int4_unrotated", 64, 100, {"store_pair": 1}),
        (INT8, "int4_unrotated", 80, 100, {"store": 2}),  # their register limits differ
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


@pytest.mark.parametrize(
    ("format_name", "role", "tokens"),
    [("int4_per_channel", "key", 16), ("int8_per_channel", "key", 16), ("int4_per_token_head", "value", 64)],
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


SINKS_AND_SOFTCAP = {"sinks": torch.zeros(8), "softcap": 30.0}
VARIANTS = {
    "causal": {"q_len": 16, "is_causal": True},
    "several tokens, sinks and softcap": {
        "q_len": 3, "mask": torch.ones(3, 1000, dtype=torch.bool), **SINKS_AND_SOFTCAP,
    },
    "padded head and float mask": {"head_dim": 80, "dtype": torch.float16, "mask": torch.ones(1, 1000)},
}  # fmt: skip
SLOW_VARIANTS = {
    "float32": {"dtype": torch.float32},
    "several tokens": {"q_len": 3, "mask": torch.ones(3, 1000, dtype=torch.bool)},
    "bool mask": {"mask": torch.ones(1, 1000, dtype=torch.bool)},
    "float mask": {"mask": torch.ones(1, 1000)},
    "sinks and softcap": SINKS_AND_SOFTCAP,
    "padded head": {"head_dim": 80, "dtype": torch.float16},
    "wide head": {"head_dim": 256},
    "narrow head": {"head_dim": 16},
}
every_variant = pytest.mark.parametrize(
    "options",
    [*(pytest.param(options, id=name) for name, options in VARIANTS.items()),
     *(pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in SLOW_VARIANTS.items())],
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turboquant_2.5bit", "fp8_e5m2_unit"),
        pytest.param("int2_per_group_32", INT8, marks=pytest.mark.slow),
        pytest.param("turboquant_3bit", "int3_unrotated", marks=pytest.mark.slow),
    ],
)
def test_formats_of_few_bits_compile(key, value, compiled):
    attend(key, value)
    assert len(compiled["attention"]) == 1


def test_layers_with_different_static_scales_share_their_kernels(counted):
    for key, value in ((0.0123, 1.5), (3.7e-05, 0.2)):
        attend(f"fp8_e4m3_scale{key}", f"fp8_e4m3_scale{value}")
        layout = PackedLayout.parse(f"fp8_e4m3_scale{key}", "key", 128)
        data = empty_packed(layout, 64, 1, 2, CPU)
        launch.store(data, torch.zeros(1, 2, 1, 128), torch.arange(1), None, layout.spec, "key")
    assert len(launch.launch_attention.compiled) == len(launch_store.launch_store.compiled) == 1


@pytest.mark.parametrize(
    "options", [VARIANTS["causal"], pytest.param(SLOW_VARIANTS["float mask"], marks=pytest.mark.slow)]
)
def test_attention_to_exact_blocks_compiles(options, compiled):
    attend("int8_per_channel" + RESIDUAL, "turboquant_2.5bit" + RESIDUAL, **options)
    assert len(compiled["attention"]) == 1


@pytest.mark.parametrize(("q_len", "group_size"), [(3, 2), (2, 4)])
def test_keys_with_scales_per_channel_and_a_mask_for_each_row_compile(q_len, group_size, compiled):
    mask = torch.ones(1, 1, q_len, 1000, dtype=torch.bool)
    attend("int4_per_channel" + RESIDUAL, "int4_per_token_head", q_len=q_len, group_size=group_size, mask=mask)
    assert len(compiled["attention"]) == 1


@every_variant
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


def test_prefill_attention_compiles_with_a_mask(compiled):
    attend("turboquant_4bit", INT8, q_len=512, mask=torch.ones(512, 1000, dtype=torch.bool))
    assert len(compiled["prefill_attention"]) == 1


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90], indirect=True)
def test_causal_prefill_attention_compiles_and_hardly_spills(compiled):
    attend("turboquant_4bit", INT8, q_len=512, is_causal=True)
    (kernel,) = compiled["prefill_attention"]
    instructions = kernel.asm["sass"].splitlines()
    assert re.search("HGMMA|HMMA", kernel.asm["sass"])
    assert count(instructions, "LDL") + count(instructions, "STL") < len(instructions) / 100


@pytest.mark.parametrize(
    "format_name",
    [
        "turboquant_3bit",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("int4_per_channel" + RESIDUAL, "int2_per_group_32")),
    ],
)
def test_dequantizing_compiles(format_name, compiled):
    attend(format_name, format_name.replace("channel", "token_head"), q_len=64, head_dim=96)
    assert len(compiled["dequantize"]) == 2


def attend_to_latents(num_heads, mask=None, kv_len=1000, **query_options):
    data = empty_packed(PackedLayout("fp8_ds_mla", "key", 512), kv_len, 1, 1, CPU)
    query = torch.zeros(1, num_heads, 1, 512, **{"dtype": torch.bfloat16, **query_options})
    launch.attention(query, data, None, mask, None, kv_len, False, 0.1, 0.0, "fp8_ds_mla", "fp8_ds_mla", 512)


@pytest.mark.parametrize(
    ("num_heads", "capability", "programs", "shared_kilobytes"),
    [(16, 90, 2, 228), pytest.param(128, 90, 1, 228, marks=pytest.mark.slow), (128, 80, 1, 100)],
    indirect=["capability"],
)
def test_programs_that_attend_to_latents_fit_a_multiprocessor(
    num_heads, programs, shared_kilobytes, compiled, monkeypatch
):
    monkeypatch.setattr(launch_latent, "launch_hopper_latent_attention", None)
    attend_to_latents(num_heads, torch.zeros(1000))
    (kernel,) = compiled["latent_attention"]
    assert programs * (kernel.metadata.shared + 1024) <= shared_kilobytes * 1024  # a program reserves a kilobyte
    loop = main_loop(kernel)
    assert count(loop, "LDL") + count(loop, "STL") < len(loop) // 50


@pytest.mark.parametrize("mask", [None, pytest.param(torch.ones(1000, dtype=torch.bool), marks=pytest.mark.slow)])
def test_on_hopper_warpgroups_multiply_latents(mask, compiled):
    attend_to_latents(128, mask)
    (kernel,) = compiled["hopper_latent_attention"]
    assert kernel.metadata.num_warps == 12
    assert kernel.metadata.shared <= 227 * 1024
    loop = main_loop(kernel)
    assert count(loop, "HGMMA") == 512 // 16 + 2 * 64 // 16  # weighs one tile, accumulates two
    if mask is None:
        assert count(loop, "LDL") + count(loop, "STL") < len(loop) // 50


@pytest.mark.parametrize("kv_len", [pytest.param(1000, marks=pytest.mark.slow), 10000])
def test_many_splits_of_wide_vectors_are_merged_in_registers(kv_len, compiled):
    attend_to_latents(128, kv_len=kv_len)
    (kernel,) = compiled["combine"]
    instructions = kernel.asm["sass"].splitlines()
    assert count(instructions, "LDL") + count(instructions, "STL") == 0


def test_the_portable_kernel_computes_products_of_latents_in_float32(counted):
    attend_to_latents(16, dtype=torch.float32)
    assert len(counted["latent_attention"]) == 1
    assert not counted["hopper_latent_attention"]


def test_storing_latents_compiles_without_spills(compiled):
    data = empty_packed(PackedLayout("fp8_ds_mla", "key", 512), 128, 1, 1, CPU)
    x = torch.zeros(1, 1, 100, 512, dtype=torch.bfloat16)
    launch.store(data, x, torch.arange(100), None, "fp8_ds_mla", "key")
    (kernel,) = compiled["store_latents"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


def test_one_tensor_of_keys_and_values_compiles(compiled):
    data = empty_packed(PackedLayout(INT8, "key", 128), 1000, 1, 2, CPU)
    query = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    launch.attention(query, data, None, None, None, 1000, False, 0.1, 0.0, INT8, INT8, 128)
    (kernel,) = compiled["attention"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


@pytest.mark.parametrize("capability", [80, 90], indirect=True)
def test_row_major_tokens_are_gathered_in_words_of_16_bytes(compiled):
    for role, width in (("key", "128"), ("value", "U8")):
        layout = PackedLayout(INT8, role, 128)
        gather_kernel.gather(empty_packed(layout, 100, 1, 2, CPU), layout, torch.zeros(2, 100, dtype=torch.int64))
        instructions = compiled["gather"][-1].asm["sass"].splitlines()
        assert uses(instructions, rf"LDG\.E\.{width}")
        assert not uses(instructions, "LDL")


@pytest.mark.skipif(numbers(triton.__version__) < (3, 7), reason="Triton 3.6 keeps two registers in local memory")
@pytest.mark.parametrize(
    ("key", "head_dim", "value", "v_head_dim"),
    [
        ("lloyd_max_4321", 128, "lloyd_max_42", 64),
        pytest.param("lloyd_max_5421", 128, "lloyd_max_52", 64, marks=pytest.mark.slow),
        pytest.param("lloyd_max_6543", 128, "lloyd_max_642", 96, marks=pytest.mark.slow),
        pytest.param("lloyd_max_6433", 128, "lloyd_max_53", 64, marks=pytest.mark.slow),
    ],
)
def test_attention_on_words_compiles_without_spills(key, head_dim, value, v_head_dim, compiled):
    layouts = PackedLayout(key, "key", head_dim), PackedLayout(value, "value", v_head_dim)
    data = [empty_packed(layout, 1000, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 8, 1, head_dim, dtype=torch.bfloat16)
    launch.attention(query, *data, None, None, 1000, False, 0.1, 0.0, key, value, v_head_dim)
    (kernel,) = compiled["attention"]
    assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"])


@pytest.mark.parametrize(("role", "tokens"), [("key", 1), ("value", 64)])
def test_storing_words_compiles(role, tokens, compiled):
    layout = PackedLayout("lloyd_max_4321", role, 128)
    data, x = empty_packed(layout, 64, 1, 2, CPU), torch.zeros(1, 2, tokens, 128)
    launch.store(data, x, torch.arange(tokens), None, layout.spec, role)
    (kernel,) = compiled["store"]
    instructions = kernel.asm["sass"].splitlines()
    assert count(instructions, "LDL") + count(instructions, "STL") <= (0 if tokens == 1 else len(instructions) // 20)


def test_prefill_on_words_compiles(compiled):
    layouts = PackedLayout("lloyd_max_432", "key", 96), PackedLayout("lloyd_max_42", "value", 64)
    data = [empty_packed(layout, 1000, 1, 2, CPU) for layout in layouts]
    query = torch.zeros(1, 8, 512, 96, dtype=torch.bfloat16)
    launch.attention(query, *data, None, None, 1000, True, 0.1, 0.0, "lloyd_max_432", "lloyd_max_42", 64)
    assert len(compiled["dequantize"]) == 2
    assert len(compiled["prefill_attention"]) == 1
