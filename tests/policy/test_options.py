"""Every option reaches the policy or Inductor, and no option is ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._inductor import list_mode_options

import kvcompile
from kvcompile.errors import OptionsError, PolicyError
from kvcompile.options import BackendOptions
from kvcompile.policy.policy import Policy


def error_of(mode: str | None = None, options: dict[str, Any] | None = None) -> str:
    with pytest.raises(OptionsError) as caught:
        BackendOptions.parse(mode, options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_options_the_policy_is_int8_and_inductor_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    expected = BackendOptions(Policy.load("int8_per_token_head"), "warn", {})
    assert BackendOptions.parse() == BackendOptions.parse(None, {}) == expected


def test_our_options_are_taken_out_and_the_others_go_to_inductor() -> None:
    options = {"policy": "fp8_e4m3", "on_unsupported": "error", "max-autotune": True, "triton.cudagraphs": False}
    parsed = BackendOptions.parse(None, options)
    assert parsed.policy == Policy.load("fp8_e4m3")
    assert parsed.on_unsupported == "error"
    assert parsed.inductor_config == {"max_autotune": True, "triton.cudagraphs": False}
    assert len(options) == 4, "the dict of the caller is unchanged"


def test_on_unsupported_in_the_options_wins_over_the_policy() -> None:
    policy = {"default": {"dtype": "fp8_e4m3"}, "on_unsupported": "error"}
    assert BackendOptions.parse(None, {"policy": policy}).on_unsupported == "error"
    assert BackendOptions.parse(None, {"policy": policy, "on_unsupported": "ignore"}).on_unsupported == "ignore"


@pytest.mark.parametrize("mode", list(list_mode_options()))
def test_every_mode_of_torch_compile_becomes_its_inductor_settings(mode: str) -> None:
    assert BackendOptions.parse(mode).inductor_config == list_mode_options(mode)


def test_an_option_overrides_the_same_setting_of_the_mode() -> None:
    parsed = BackendOptions.parse("reduce-overhead", {"policy": "fp8_e4m3", "triton.cudagraphs": False})
    assert parsed == BackendOptions(Policy.load("fp8_e4m3"), "warn", {"triton.cudagraphs": False})


def test_an_unknown_mode_is_an_error_that_lists_the_modes() -> None:
    assert error_of("fast").startswith("unknown mode 'fast' (known: default, ")


def test_an_unknown_option_is_an_error_that_names_ours_and_what_comes_close() -> None:
    assert error_of(options={"polcy": "fp8_e4m3"}) == (
        "unknown option 'polcy'; did you mean 'policy'? "
        "(known: policy, on_unsupported, verify, context_parallel, merge_projections, and every name in "
        "torch._inductor.config)"
    )
    assert "did you mean 'max_autotune'" in error_of(options={"max_autotun": True})
    assert error_of(options={"xyzzy": 1}).startswith("unknown option 'xyzzy' (known: policy, on_unsupported,")


def test_an_option_of_the_wrong_type_is_an_error_that_says_which_is_right() -> None:
    assert error_of(options={"max_autotune": 3}) == "option max_autotune: expected bool, got 3"
    assert error_of(options={"on_unsupported": "raise"}) == (
        "option on_unsupported: expected error, warn, ignore, got 'raise'"
    )


def test_an_unknown_preset_is_a_policy_error() -> None:
    with pytest.raises(PolicyError, match="policy 'int9' is neither a preset nor a file"):
        BackendOptions.parse(None, {"policy": "int9"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": ["fast"]}, r"unknown mode \['fast'\] \(known: default"),
        ({"options": ["policy"]}, r"options: expected a dict of names and values, got \['policy'\]"),
        ({"options": "int4", "policy": "int4"}, "options: expected a dict of names and values, got 'int4'"),
        ({"dynamic": "yes"}, "option dynamic: expected None or True or False, got 'yes'"),
        ({"fullgraph": 1}, "option fullgraph: expected True or False, got 1"),
        ({"max_autotune": "y" * 10**6}, "option max_autotune: expected bool, got 'yyyy"),
    ],
)
def test_a_mode_or_options_of_another_kind_are_an_error_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionsError, match=message):
        kvcompile.compile(torch.nn.Identity(), **arguments)


@pytest.mark.parametrize(
    "default",
    [
        {"dtype": "int8", "granularity": "per_group", "group_size": 32},
        {"dtype": "int2", "granularity": "per_token_head"},
        {"dtype": "int4", "granularity": "per_token_head", "key": {"dtype": "int8", "granularity": "per_channel"}},
    ],
)
def test_a_type_of_elements_and_a_granularity_have_the_name_of_no_format(default: dict[str, Any]) -> None:
    backend = kvcompile.kvquant(policy={"default": default})
    assert repr(backend) == f"kvquant(policy='Policy {Policy.load({'default': default}).fingerprint()}')"
    assert callable(torch.compile(lambda x: x, backend=backend))


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        ("transform_4bit", "default"),
        ({"default": {"dtype": "int4", "value": {"dtype": "int4_per_token_head_mean"}}}, "default"),
        ({"default": {"dtype": "int4"}, "rules": [{"match": {"layers": 0}, "dtype": "transform_2.6bit"}]}, "rule 1"),
    ],
)
def test_a_calibrated_format_without_transforms_is_an_error_before_anything_is_compiled(
    policy: Any, place: str
) -> None:
    with pytest.raises(PolicyError, match=f"{place}: .* needs a calibration of the model: give `transforms: FILE`"):
        kvcompile.kvquant(policy=policy)
