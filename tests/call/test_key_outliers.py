"""The guard against keys with outlier channels warns where it should, and only there, and proposes a remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from small_models import MODULES, give_outlier_keys, small_model, some_bytes

import kvcompile
from kvcompile.call import key_outliers
from kvcompile.call.key_outliers import examine, promoted
from kvcompile.errors import PolicyError
from kvcompile.evaluation.calibrate import Calibration
from kvcompile.kernels.formats import FORMATS
from kvcompile.passes.site import Site
from kvcompile.policy.policy import Policy

TOKENS = torch.tensor(list(some_bytes(128)))
FIRES_FROM = {
    "int4_unrotated": 16,
    "turboquant_4bit_nc": 16,
    "turboquant_k3v4_nc": 16,
    "turboquant_3bit_nc": 16,
    "int4_per_token_head": 64,
    "int8_per_token_head": 64,
}
"""Maps each format to the smallest tested factor at which the guard fires.

The factor scales one RoPE pair of channels; all other channels have similar magnitudes.
"""
NEVER = ("fp8_e4m3", "turboquant_k8v4")


def normal_keys(tokens: int = 128, head_dim: int = 128) -> torch.Tensor:
    return torch.randn(1, 2, tokens, head_dim, generator=torch.Generator().manual_seed(2))


def with_outliers(keys: torch.Tensor, factor: float) -> torch.Tensor:
    keys = keys.clone()
    keys[:, 1, :, :2] *= factor
    return keys


def layers_with_outliers(model: Any, tokens: torch.Tensor, policies: Sequence[str]) -> dict[str, list[str]]:
    loaded = {name: Policy.load(name) for name in policies}
    calibration = Calibration(model, tokens, list(loaded.values()))
    return {name: [found.module for found in calibration.outliers(policy)] for name, policy in loaded.items()}


def test_a_rescaling_that_leaves_the_function_unchanged_makes_the_guard_fire_for_scales_per_token() -> None:
    original = small_model(num_layers=1)
    assert not any(layers_with_outliers(original, TOKENS, [*FIRES_FROM, *NEVER]).values())
    for factor in (16, 64):
        rescaled = give_outlier_keys(copy.deepcopy(original), factor, layers=(0,))
        assert torch.equal(rescaled(TOKENS[None]).logits, original(TOKENS[None]).logits)
        fires = [name for name, least in FIRES_FROM.items() if least <= factor]
        found = layers_with_outliers(rescaled, TOKENS, [*fires, *NEVER])
        assert found == {name: [MODULES[0]] for name in fires} | {name: [] for name in NEVER}


@pytest.mark.parametrize("name", [name for name in FORMATS if "_per_group_" not in name])
def test_keys_whose_channels_are_alike_suit_every_format(name: str) -> None:
    assert examine(normal_keys(), name) is None


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e4m3_unit", "bfloat16", "int4_per_channel", "int8_per_channel"])
def test_floats_and_scales_per_channel_hold_any_outliers(name: str) -> None:
    assert examine(with_outliers(normal_keys(), 100), name) is None


def test_a_rotation_or_more_bits_tolerate_larger_outliers() -> None:
    def least_factor(name: str) -> int:
        return next(2**n for n in range(10) if examine(with_outliers(normal_keys(), 2**n), name))

    for better in ("turboquant_4bit", "int8_per_token_head"):
        assert least_factor(better) > least_factor("int4_unrotated")


def test_a_warning_names_layer_ratio_and_remedy() -> None:
    found = examine(with_outliers(normal_keys(), 64), "turboquant_4bit", "model.layers.3.self_attn")
    assert found is not None
    assert found.ratio == pytest.approx(64, rel=0.2)
    assert found.remedy == "fp8_e4m3"
    assert str(found).startswith("model.layers.3.self_attn: its keys have outlier channels, ")
    assert f"{found.ratio:.0f} times the median channel" in str(found)
    assert "`key: {dtype: fp8_e4m3}`" in str(found)


def test_unwritten_slots_do_not_count() -> None:
    keys = with_outliers(normal_keys(80), 64)
    expected = examine(keys, "turboquant_4bit")
    padded = torch.cat([keys[:, :, :64], torch.zeros(1, 2, 500, 128), keys[:, :, 64:]], 2)
    assert examine(padded, "turboquant_4bit") == expected
    assert examine(torch.zeros(1, 2, 500, 128), "turboquant_4bit") is None
    padded[:, :, 70] = torch.nan
    assert examine(padded, "turboquant_4bit") == expected


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(("key_outliers", "num_layers"), [("warn", 2), ("ignore", 1)])
def test_a_cache_that_is_filled_by_eager_code_is_checked_when_it_is_packed(key_outliers: str, num_layers: int) -> None:
    model = give_outlier_keys(small_model(num_layers), 16, layers=(num_layers - 1,))
    policy = {"default": {"dtype": "turboquant_4bit_nc"}, "key_outliers": key_outliers}
    compiled = torch.compile(model, backend="kvquant", options={"policy": policy})
    cache = transformers.StaticCache(config=model.config, max_cache_len=100)
    with torch.no_grad(), kvcompile.collect_reports() as report:
        model(TOKENS[None, :70], past_key_values=cache)
        compiled(TOKENS[None, 70:71], past_key_values=cache)
    assert isinstance(cache.layers[-1].keys, kvcompile.PackedTensor)
    assert [note.split(":")[0] for note in report.notes] == [MODULES[1]] * (key_outliers == "warn")


WRITES: dict[str, tuple[Callable[..., Any], Any]] = {
    "index_copy_": (lambda cache, x, at: cache.index_copy_(2, at, x), torch.tensor([70])),
    "chunk": (lambda cache, x, at: cache.index_copy_(2, at, x.expand(-1, -1, 3, -1)), torch.tensor([70, 71, 72])),
    "counted from the end": (lambda cache, x, at: cache.__setitem__((..., at, slice(None)), x), torch.tensor([-30])),
    "number": (lambda cache, x, at: cache[:, :, at : at + 1].copy_(x), 70),
    "mask": (lambda cache, x, at: cache.copy_(torch.where(at[:, None], x, cache)), torch.arange(100) == 70),
    "each sequence": (
        lambda cache, x, at: cache.__setitem__((torch.arange(2), slice(None), at), x[:, :, 0]),
        torch.tensor([70, 20]),
    ),
    "beginning": (lambda cache, x, at: cache.index_copy_(2, at, x), torch.tensor([0])),
    "computed from values": (lambda cache, x, at: cache.index_copy_(2, at.long(), x), torch.tensor([70.0])),
}  # fmt: skip
LOOKED_AT = {"each sequence": [70, 20], "beginning": [0, 0], "computed from values": [0, 0]}
"""The number of tokens that are checked in each of two sequences; [70, 70] for all other writes."""


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("form", WRITES)
def test_only_tokens_before_the_first_written_position_are_checked(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, place = WRITES[form]

    def step(q: torch.Tensor, x: torch.Tensor, caches: list[torch.Tensor], at: Any) -> torch.Tensor:
        for cache in caches:
            write(cache, x, at)
        return torch.nn.functional.scaled_dot_product_attention(q, *caches)

    looked: list[list[int]] = []
    monkeypatch.setattr(
        key_outliers, "examine", lambda keys, *args: looked.append(keys[:, 0, :, 0].ne(0).sum(-1).tolist())
    )
    caches = [torch.randn(2, 2, 100, 64) for _ in range(2)]
    with torch.no_grad():
        torch.compile(step, backend="kvquant", options={"on_unsupported": "error"})(
            torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64), caches, place
        )
    assert looked == [LOOKED_AT.get(form, [70, 70])]


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("prefilled", [0, 70])
@pytest.mark.parametrize("factor", [1, 100])
def test_earlier_contents_of_the_memory_of_a_new_cache_do_not_count_as_keys(prefilled: int, factor: int) -> None:
    @torch.compile(backend="kvquant")
    def step(q: torch.Tensor, x: torch.Tensor, caches: list[torch.Tensor], at: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(100) <= at[:, None]
        keys, values = (cache.index_copy_(2, at, x) for cache in caches)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    garbage = with_outliers(normal_keys(100), 1000)
    caches = [garbage.clone(), garbage.clone()]
    caches[0][:, :, :prefilled] = with_outliers(normal_keys(prefilled), factor)
    with torch.no_grad(), kvcompile.collect_reports() as report:
        for token in range(prefilled, prefilled + 3):
            step(torch.randn(1, 2, 1, 128), normal_keys(1), caches, torch.tensor([token]))
    assert all(isinstance(cache, kvcompile.PackedTensor) for cache in caches)
    assert len(report.notes) == (prefilled > 0 and factor > 1)


@pytest.mark.usefixtures("without_code_generation")
def test_a_pool_is_not_checked_because_its_unwritten_slots_may_hold_anything() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, pools: list[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        keys, values = (pool.index_copy_(0, slots, k).index_select(0, slots).transpose(0, 1)[None] for pool in pools)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    pool, new = (with_outliers(normal_keys(tokens), 100)[0].transpose(0, 1).contiguous() for tokens in (128, 3))
    with torch.no_grad(), kvcompile.collect_reports() as report:
        torch.compile(step, backend="kvquant")(torch.randn(1, 2, 3, 128), new, [pool, pool.clone()], torch.arange(3))
    assert report.totals.rewritten == 1
    assert not report.notes


def test_by_default_a_policy_warns_of_outlier_keys() -> None:
    assert Policy.load("fp8_e4m3").key_outliers == "warn"
    with pytest.raises(PolicyError, match="key_outliers: input should be 'ignore', 'warn' or 'promote', got 'raise'"):
        Policy.load({"default": {"dtype": "fp8_e4m3"}, "key_outliers": "raise"})


def test_a_promoted_policy_changes_the_keys_of_those_layers_and_nothing_else() -> None:
    policy = Policy.from_text(
        "version: 1\n"
        "rules:\n"
        "  - {match: {layers: '0'}, dtype: auto}\n"
        "  - {match: {layers: '1-2'}, key: {dtype: turboquant_4bit}, value: {dtype: int4_unrotated}}\n"
        "default: {dtype: int4_per_token_head}\n"
        "strict: true\n"
    )
    sites = [Site(f"layers.{layer}.attn", layer, "sdpa") for layer in range(5)]
    keys = with_outliers(normal_keys(), 64)
    found = [examine(keys, "turboquant_4bit", f"layers.{layer}.attn") for layer in (2, 4)]
    raised = Policy.from_text(promoted(policy, sites, 5, found).to_yaml())
    formats = [raised.formats_for(site.module, site.layer, 5) for site in sites]
    before = [policy.formats_for(site.module, site.layer, 5) for site in sites]
    assert [formats[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)]
    assert [formats[i].key for i in (2, 4)] == ["fp8_e4m3"] * 2
    assert [formats[i].value for i in (2, 4)] == [before[i].value for i in (2, 4)]
    assert raised.strict
    raised.check_rules(sites, 5)


def test_the_usual_error_of_a_format_does_not_depend_on_the_default_device():
    key_outliers._usual_error.cache_clear()
    with torch.device("meta"):
        usual = key_outliers._usual_error("int4_per_token_head", 64)
    key_outliers._usual_error.cache_clear()
    assert usual == key_outliers._usual_error("int4_per_token_head", 64) > 0
