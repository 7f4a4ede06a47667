"""The planner's figures match published tables and the formats; users, tokens and times follow from them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import sympy
import torch
from formats_of_every_kind import in_turn
from model_configs import (
    DEEPSEEK_V3,
    GEMMA_2_9B,
    GEMMA_3_4B,
    GIB,
    GPT_2,
    LLAMA_3_1_8B,
    LLAMA_3_1_405B,
    MISTRAL_7B_V0_1,
    QWEN_2_5_7B,
    QWEN_2_5_72B,
    QWEN_3_NEXT_80B,
    WHISPER_TINY,
    error_of,
    model_of,
    plan_of,
    write_config,
)

from kvcompile.kernels.formats import FORMATS
from kvcompile.kernels.formats.base import HEAD_DIM
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Residual, Role
from kvcompile.planning.capacity import bytes_at, longest_context
from kvcompile.planning.config_file import read_config
from kvcompile.planning.decode_time import payoff
from kvcompile.planning.devices import DEVICES, Bandwidth, read_bandwidth
from kvcompile.planning.errors import NoRoomError
from kvcompile.planning.model_caches import CONTEXT, read_model_caches
from kvcompile.planning.parameters import count_parameters
from kvcompile.planning.plan import Plan
from kvcompile.planning.storage import Measure, compressed
from kvcompile.planning.stored_caches import apply_policy, store_caches
from kvcompile.planning.units import format_context, format_size, parse_context, parse_rate, parse_size
from kvcompile.planning.weights import WEIGHT_FORMATS, read_weights
from kvcompile.policy.policy import Policy


def users(plan: Plan, measure: str = "payload") -> list[list[int]]:
    return [list(policy.capacity[measure].users.values()) for policy in plan.policies]  # type: ignore[index]


# Published figures


def test_74_gib_hold_the_published_number_of_users_of_llama_3_1_8b() -> None:
    plan = plan_of(LLAMA_3_1_8B, "bf16", "int4_per_token_head")
    assert users(plan) == [[296, 74, 18, 4], [1184, 296, 74, 18]]


def test_a_16_bit_scale_on_128_channels_of_4_bits_costs_about_3_percent() -> None:
    storage = compressed("turboquant_4bit")
    payload, stored = storage.payload.subs(HEAD_DIM, 128), storage.stored.subs(HEAD_DIM, 128)
    assert (payload, stored - payload) == (64, 2)


@pytest.mark.parametrize(
    ("config", "nbytes"), [(DEEPSEEK_V3, 70_272), (QWEN_2_5_72B, 327_680), (LLAMA_3_1_405B, 516_096)]
)
def test_bytes_of_a_token_in_bf16_equal_the_bytes_in_arxiv_2505_09343(config: dict[str, Any], nbytes: int) -> None:
    assert apply_policy("bf16", model_of(config)).bytes_per_token("stored") == nbytes


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_1_8B, 8_030_261_248),
        (QWEN_2_5_7B, 7_615_616_512),
        (MISTRAL_7B_V0_1, 7_241_732_096),
        (GEMMA_2_9B, 9_241_705_984),
        (GPT_2, 124_439_808),
        (DEEPSEEK_V3, 671_026_404_352),
    ],
)
def test_parameters_of_public_models_are_counted(config: dict[str, Any], parameters: int, tmp_path: Path) -> None:
    fields = read_config(write_config(tmp_path, config))
    assert count_parameters(fields, read_model_caches(fields)).count() == parameters


def test_int4_weights_of_llama_3_1_8b_take_what_awq_checkpoints_take(tmp_path: Path) -> None:
    fields = read_config(write_config(tmp_path, LLAMA_3_1_8B))
    linear, kept = 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096, 2 * 128256 * 4096 + 65 * 4096
    weights = read_weights("int4", fields, read_model_caches(fields))
    assert weights.nbytes == linear // 2 + linear // 128 * 5 // 2 + 2 * kept == 5_727_854_592


# Policies


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_allocated_bytes_equal_the_bytes_of_the_packed_layout(name: str, head_dim: int) -> None:
    for role in get_args(Role):
        if FORMATS[name].unsupported(head_dim, role):
            continue
        layout = PackedLayout(name, role, head_dim)
        for tokens in (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 1000):
            planned = compressed(name).nbytes(head_dim, CONTEXT, "allocated").subs(CONTEXT, tokens)
            assert planned == torch.Size(layout.shape(tokens, 1, 1)).numel()


@pytest.mark.parametrize(("sinks", "recent"), [(0, 1), (1, 0), (2, 3)])
@pytest.mark.parametrize("name", ["int4_per_channel", "fp8_e4m3"])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_tokens_in_full_precision_are_counted(name: str, head_dim: int, sinks: int, recent: int) -> None:
    residual = Residual(sinks, recent, torch.bfloat16)
    layout, storage = PackedLayout(name, "key", head_dim, residual), compressed(name, residual)
    for tokens in (0, 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 1000):
        nbytes = {
            measure: storage.nbytes(head_dim, CONTEXT, measure).subs(CONTEXT, tokens) for measure in get_args(Measure)
        }
        assert nbytes["allocated"] == torch.Size(layout.shape(tokens, 1, 1)).numel()
        assert nbytes["payload"] == compressed(name).nbytes(head_dim, CONTEXT, "payload").subs(CONTEXT, tokens)
        kept = (sinks + recent) * (BLOCK_TOKENS * head_dim * 2 + 4)
        assert nbytes["stored"] == compressed(name).nbytes(head_dim, CONTEXT, "stored").subs(CONTEXT, tokens) + kept


def test_the_preset_with_scales_per_channel_is_planned_with_its_recent_tokens() -> None:
    caches = apply_policy("int4", model_of(LLAMA_3_1_8B))
    heads = 32 * 8
    assert caches.bytes_per_token("stored") == heads * (72 + 68)
    allocated = caches.nbytes("allocated").subs(CONTEXT, 1000)
    assert allocated == heads * (4 * 64 * 72 + 16 * 64 * (72 + 68))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_payload_and_metadata_of_a_format_are_all_its_bytes(name: str) -> None:
    storage = compressed(name)
    fmt = FORMATS[name]
    assert storage.payload.subs(HEAD_DIM, 128) == sympy.Rational(fmt.bits) * 16
    assert storage.stored == fmt.bytes_per_token()
    assert storage.payload.subs(HEAD_DIM, 128) <= storage.stored.subs(HEAD_DIM, 128)


def test_a_policy_file_decides_layer_by_layer(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "rules:\n"
        '- {match: {layers: "0-1, -2:"}, dtype: auto}\n'
        '- {match: {module: "*.layers.2.self_attn"}, key: {dtype: fp8_e4m3}, value: {dtype: int4_per_token_head}}\n'
        "default: {dtype: int8_per_token_head}\n"
    )
    caches = apply_policy(str(path), model_of(LLAMA_3_1_8B))
    names = [(stored.key.name, stored.value.name) for stored in caches.caches]
    assert names[:2] == names[-2:] == [("bf16", "bf16")] * 2
    assert names[2] == ("fp8_e4m3", "int4_per_token_head")
    assert names[3:-2] == [("int8_per_token_head", "int8_per_token_head")] * 27
    payload = 4 * 512 + (128 + 64) + 27 * 256
    assert caches.nbytes("payload") == 8 * payload * CONTEXT
    assert caches.notes == ()


def test_a_rule_that_decides_nothing_is_noted_and_an_error_if_the_policy_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    text = "rules: [{match: {module: '*.cross_attn'}, dtype: auto}]\ndefault: {dtype: fp8_e4m3}\n"
    path.write_text(text)
    (note,) = apply_policy(str(path), model_of(LLAMA_3_1_8B)).notes
    assert "rule 1 (module '*.cross_attn') matches no attention site" in note
    path.write_text(text + "strict: true\n")
    assert "matches no attention site" in error_of(apply_policy, str(path), model_of(LLAMA_3_1_8B))


def test_a_cache_that_a_format_cannot_hold_stays_plain_like_in_the_backend(tmp_path: Path) -> None:
    latent = apply_policy("int4_per_token_head", model_of(DEEPSEEK_V3))
    assert latent.nbytes("allocated") == 70_272 * CONTEXT
    assert "61 of 61 caches stay bf16" in latent.notes[0]
    path = tmp_path / "policy.yaml"
    path.write_text("default: {dtype: int4_per_token_head}\non_unsupported: error\n")
    assert "on_unsupported: error" in error_of(apply_policy, str(path), model_of(DEEPSEEK_V3))


def test_an_unknown_policy_is_an_error_that_lists_presets_and_baselines() -> None:
    error = error_of(apply_policy, "int4_per_tokn_head", model_of(LLAMA_3_1_8B))
    assert "did you mean 'int4_per_token_head'" in error
    assert "bf16" in error


# Capacity


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, GEMMA_2_9B, QWEN_3_NEXT_80B, GEMMA_3_4B])
@pytest.mark.parametrize("measure", ["payload", "allocated"])
def test_the_longest_context_fits_and_one_more_token_does_not(config: dict[str, Any], measure: str) -> None:
    for policy in plan_of(config, "bf16", "int4_per_token_head").policies:
        nbytes = policy.caches.nbytes(measure)  # type: ignore[arg-type]
        nbytes += policy.caches.workspace if measure == "allocated" else 0
        longest = policy.capacity[measure].longest_context  # type: ignore[index]
        assert bytes_at(nbytes, longest) <= 74 * GIB < bytes_at(nbytes, longest + 1)


@pytest.mark.parametrize("config", [LLAMA_3_1_8B, GEMMA_2_9B, MISTRAL_7B_V0_1])
def test_so_many_users_fit_and_one_more_does_not(config: dict[str, Any]) -> None:
    for policy in plan_of(config, "bf16", "turboquant_4bit_nc").policies:
        for capacity in policy.capacity.values():
            for context, count in capacity.users.items():
                nbytes = capacity.bytes_per_user[context] + capacity.workspace_per_user[context]
                assert count * nbytes <= 74 * GIB < (count + 1) * nbytes


def test_plain_caches_with_fewer_kv_heads_need_room_for_repeated_heads() -> None:
    """Llama 3 8B in 75 GiB at 8192 tokens: measured, 51 users do not fit where the heads are repeated only once."""
    plan = plan_of(LLAMA_3_1_8B, "bf16", "bfloat16", "int4_per_token_head")
    plain, *packed = plan.policies
    assert plain.caches.workspace == 2 * 32 * (128 + 128) * 2 * CONTEXT
    assert plain.capacity["payload"].workspace_per_user[8192] == 0
    assert plain.capacity["allocated"].workspace_per_user[8192] == 2 * 32 * 256 * 2 * 8192
    assert plain.capacity["allocated"].users[8192] < plain.capacity["payload"].users[8192]
    for policy in packed:
        assert policy.caches.workspace == 0
    unpacked = {"version": 1, "default": {"dtype": "auto"}}
    caches = store_caches("auto", Policy.load(unpacked), model_of(LLAMA_3_1_8B))
    assert caches.workspace == plain.caches.workspace
    windows = apply_policy("bf16", model_of(MISTRAL_7B_V0_1)).workspace
    assert windows == 2 * 32 * 256 * 2 * sympy.Min(CONTEXT, 4096)
    assert apply_policy("bf16", model_of(LLAMA_3_1_8B | {"num_key_value_heads": 32})).workspace == 0


def test_sliding_windows_bound_the_cache() -> None:
    mistral = apply_policy("bf16", model_of(MISTRAL_7B_V0_1)).nbytes("stored")
    assert mistral == 131072 * sympy.Min(CONTEXT, 4096)
    assert longest_context(131072 * 4096, mistral) is None
    assert longest_context(131072 * 4096 - 1, mistral) == 4095
    gemma = apply_policy("bf16", model_of(GEMMA_2_9B)).nbytes("stored")
    assert bytes_at(gemma, 8192) == 21 * 8 * 512 * 2 * (4096 + 8192)


def test_the_budget_is_what_weights_and_reserve_leave() -> None:
    plan = plan_of(LLAMA_3_1_8B, "bf16", memory=80 * GIB, weights="4GiB", reserve=2 * GIB)
    assert plan.budget.nbytes == 74 * GIB
    assert users(plan) == [[296, 74, 18, 4]]
    counted = plan_of(LLAMA_3_1_8B, "bf16", memory=80 * GIB, reserve=2 * GIB)
    assert counted.budget.nbytes == 78 * GIB - 2 * 8_030_261_248
    with pytest.raises(NoRoomError, match=r"in 16\.00 GiB: the weights \(bf16\) take 14\.96 GiB"):
        plan_of(LLAMA_3_1_8B, "bf16", memory=16 * GIB, reserve=2 * GIB)


@pytest.mark.parametrize("name", sorted(WEIGHT_FORMATS))
def test_weights_in_fewer_bits_are_smaller(name: str, tmp_path: Path) -> None:
    fields = read_config(write_config(tmp_path, LLAMA_3_1_8B))
    weights = read_weights(name, fields, read_model_caches(fields))
    share = weights.nbytes / (2 * 8_030_261_248)
    assert share == pytest.approx({"fp32": 2, "bf16": 1, "fp16": 1}.get(name, share))
    assert name in ("fp32", "bf16", "fp16") or share < 0.6


@pytest.mark.parametrize(
    ("config", "weights", "reason"),
    [
        (LLAMA_3_1_8B, "int5", "'int5' is not a known format; did you mean 'int"),
        (LLAMA_3_1_8B, "5G", "'5G' is not a valid size"),
        ({**LLAMA_3_1_8B, "model_type": "novel"}, "int4", "cannot count the parameters of model_type 'novel'"),
        (GEMMA_3_4B, "int4", "describes parts outside text_config"),
        ({**LLAMA_3_1_8B, "quantization_config": {"bits": 4}}, None, "give the format or the size of these weights"),
        (WHISPER_TINY, "bf16", "cannot count the parameters of model_type 'whisper'; give the size"),
    ],
)
def test_weights_that_cannot_be_known_are_an_error(config: dict[str, Any], weights: str | None, reason: str) -> None:
    assert reason in error_of(plan_of, config, "bf16", memory=80 * GIB, weights=weights)


# Decode times


def test_a_step_reads_the_weights_once_and_the_cache_of_every_user_once() -> None:
    plan = plan_of(LLAMA_3_1_8B, "bf16", "int8_per_token_head", bandwidth=Bandwidth(10**12, ""), users=3)
    weights = 2 * (8_030_261_248 - 128256 * 4096)  # without the embedding: a step reads three rows of it
    for policy, per_token in zip(plan.policies, (131072, 67584), strict=True):
        for context, seconds in policy.seconds.items():
            assert seconds == pytest.approx((weights + 3 * per_token * context) / 1e12, rel=1e-12)


def test_efficiency_counts_by_what_is_read() -> None:
    efficiency = {"weights": Fraction(1, 2), "int8_per_token_head": Fraction(4, 5), "all": Fraction(9, 10)}
    plan = plan_of(
        LLAMA_3_1_8B, "bf16", "int8_per_token_head",
        bandwidth=Bandwidth(10**12, ""), weights="10GB", efficiency=efficiency,
    )  # fmt: skip
    assert plan.policies[0].seconds[8192] == pytest.approx(0.02 + 131072 * 8192 / 0.9e12)
    assert plan.policies[1].seconds[8192] == pytest.approx(0.02 + 67584 * 8192 / 0.8e12)
    assert "no policy reads 'fp8_e4m3'" in error_of(
        plan_of, LLAMA_3_1_8B, "bf16", bandwidth=Bandwidth(1, ""), efficiency={"fp8_e4m3": Fraction(1)}
    )


def test_weights_are_not_counted_without_the_fields_that_they_need() -> None:
    config = {name: value for name, value in LLAMA_3_1_8B.items() if name != "intermediate_size"}
    assert "no field intermediate_size" in error_of(plan_of, config, "bf16", memory=80 * GIB)


def test_few_tokens_read_few_experts(tmp_path: Path) -> None:
    fields = read_config(write_config(tmp_path, DEEPSEEK_V3))
    parameters = count_parameters(fields, read_model_caches(fields))
    assert parameters.experts_read(1) == Fraction(8, 256)
    assert parameters.experts_read(2) == 1 - Fraction(248, 256) ** 2
    assert parameters.experts_read(10_000) == pytest.approx(1)
    weights = read_weights("fp8", fields, read_model_caches(fields))
    assert weights.bytes_read(1) < weights.nbytes / 15  # a token uses 37 of 671 billion parameters


@pytest.mark.parametrize(
    ("config", "speedup"),
    in_turn([LLAMA_3_1_8B, GEMMA_2_9B, GEMMA_3_4B], [Fraction(11, 10), Fraction(3, 2), Fraction(3)]),
)
def test_a_policy_pays_from_the_first_context_at_which_it_is_so_many_times_as_fast(
    config: dict[str, Any], speedup: Fraction
) -> None:
    request = {"bandwidth": Bandwidth(10**12, ""), "weights": "5GB", "speedup": speedup}
    plan = plan_of(config, "bf16", "int4_per_token_head", **request)
    found = plan.policies[1].payoff
    assert found is not None
    assert plan.decode is not None
    assert found.context is not None
    costs = [plan.decode.cost(policy.caches) for policy in plan.policies]
    assert found.until is None
    before, at = ([cost.subs(CONTEXT, found.context - back) for cost in costs] for back in (1, 0))
    assert at[0] / at[1] >= speedup > before[0] / before[1]


def test_a_policy_may_pay_within_a_window_only_or_never() -> None:
    window = sympy.Min(CONTEXT, 100)
    baseline = 1000 + 10 * window + CONTEXT
    policy = 1000 + window + CONTEXT
    found = payoff(baseline, policy, Fraction(3, 2), (100,))
    assert found.context == 63  # 1000 + 11 * 63 >= 1.5 * (1000 + 2 * 63), and not at 62
    assert found.until == 700  # 2000 + 700 >= 1.5 * (1100 + 700), and not at 701
    assert found.greatest == pytest.approx(2100 / 1200)
    assert payoff(baseline, policy, Fraction(2), (100,)).context is None
    assert payoff(policy, baseline, Fraction(1), (100,)).context is None


def test_a_speedup_beyond_the_ratio_of_the_caches_is_never_reached() -> None:
    plan = plan_of(LLAMA_3_1_8B, "bf16", "int8_per_token_head", bandwidth=Bandwidth(10**12, ""), speedup=Fraction(2))
    found = plan.policies[1].payoff
    assert found is not None
    assert found.context is None
    assert found.greatest == pytest.approx(131072 / 67584)


def test_bandwidth_is_a_rate_or_the_name_of_a_device() -> None:
    assert read_bandwidth("4.35TB/s") == Bandwidth(4_350_000_000_000, "as given")
    assert read_bandwidth("H200").bytes_per_second == 4_800_000_000_000
    assert all("NVIDIA" in device.source for device in DEVICES.values())
    assert "did you mean 'h100-sxm'" in error_of(read_bandwidth, "h100-sx")


# Units


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GiB", 80 * 2**30),
        ("80 GB", 80 * 10**9),
        ("1.5TB", 1_500_000_000_000),
        ("512MiB", 512 * 2**20),
        ("100B", 100),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, nbytes: int) -> None:
    assert parse_size(text, "--memory") == nbytes


@pytest.mark.parametrize(
    ("text", "tokens"), [("2k", 2048), ("128K", 131072), ("1M", 2**20), ("5000", 5000), ("1.5k", 1536)]
)
def test_contexts_count_in_1024(text: str, tokens: int) -> None:
    assert parse_context(text, "--contexts") == tokens
    assert parse_context(format_context(tokens), "--contexts") == tokens


@pytest.mark.parametrize("text", ["", "80", "80G", "80gib", "GiB", "-1GiB", "1e3GB", "80 Gb", "nan"])
def test_an_invalid_size_is_an_error_that_quotes_it_and_says_how_to_write_one(text: str) -> None:
    error = error_of(parse_size, text, "--memory")
    assert error.startswith(f"--memory: {text!r} is not a valid size")
    assert "80GiB (2**30 bytes), 80GB (10**9 bytes)" in error


def test_a_unit_in_the_wrong_case_is_corrected() -> None:
    assert "did you mean '80GiB'" in error_of(parse_size, "80gib", "--memory")
    assert "did you mean" not in error_of(parse_context, "9" * 20 + "k", "--contexts")  # too long, in a known unit


@pytest.mark.parametrize("text", ["", "0", "k", "2kb", "1.0001k", "-5", "2 000"])
def test_an_invalid_context_is_an_error_that_quotes_it(text: str) -> None:
    assert f"--contexts: {text!r} is not a valid context" in error_of(parse_context, text, "--contexts")


@pytest.mark.parametrize("text", ["4.35TB", "TB/s", "0TB/s", "4.35Tb/s"])
def test_an_invalid_bandwidth_is_an_error(text: str) -> None:
    assert "is not a valid bandwidth" in error_of(parse_rate, text, "--bandwidth")


def test_sizes_are_written_in_binary_units() -> None:
    assert [format_size(n) for n in (100, 131072, 74 * GIB, 2**41)] == ["100 B", "128.0 KiB", "74.00 GiB", "2.00 TiB"]
