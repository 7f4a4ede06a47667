"""The policy decides formats by layer and module, and reports each fault in one line."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from kvcompile.errors import PolicyError
from kvcompile.kernels.formats import FORMATS
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy.layers import LayerSet
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import PRESETS, preset_names

INT8 = FormatPair("int8_per_token_head", "int8_per_token_head")
FP8 = FormatPair("fp8_e4m3", "fp8_e4m3")

EXAMPLE = """
version: 1
rules:
  - {match: {layers: "0-1, -2:"}, dtype: fp8_e4m3}
  - {match: {module: "re:.*cross_attn"}, dtype: auto}
  - match: {layers: "2:-2"}
    key: {dtype: turboquant_4bit}
    value: {dtype: int4_per_token_head}
default: {dtype: int8_per_token_head}
on_unsupported: error
strict: true
"""


def policy_with(**rule: object) -> Policy:
    return Policy.load({"rules": [rule], "default": {"dtype": "int8_per_token_head"}})


def error_of(spec: object) -> str:
    with pytest.raises(PolicyError) as caught:
        Policy.load(spec)  # type: ignore[arg-type]
    return str(caught.value)


# Layers


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("5", {5}),
        ("-1", {7}),
        ("-2", {6}),
        ("0-1", {0, 1}),
        ("-2:", {6, 7}),
        (":2", {0, 1}),
        ("2:-2", {2, 3, 4, 5}),
        (":", set(range(8))),
        ("0-1, -2:", {0, 1, 6, 7}),
        (" 3 ,4", {3, 4}),
        ("6-20", {6, 7}),
        ("8", set()),
        ("-9", set()),
    ],
)
def test_layer_ranges_mean_what_python_means(text: str, layers: set[int]) -> None:
    listed = LayerSet.parse(text)
    assert {layer for layer in range(9) if listed.contains(layer, 8)} == layers


@pytest.mark.parametrize("text", ["", "a", "1,", "1:2:3", "0--1", "1.5", "3-1", "5:2", "-1:-2"])
def test_a_malformed_layer_range_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(PolicyError, match=r"layer range|is empty"):
        LayerSet.parse(text)


def test_layers_may_be_a_number_or_a_list() -> None:
    assert policy_with(match={"layers": 3}, dtype="fp8_e4m3").formats_for("", 3, 8) == FP8
    assert policy_with(match={"layers": [0, "-1"]}, dtype="fp8_e4m3").formats_for("", 7, 8) == FP8


def test_an_unquoted_slice_in_yaml_is_not_read_as_a_base_60_number() -> None:
    policy = Policy.from_text("rules: [{match: {layers: 2:10}, dtype: auto}]\ndefault: {dtype: fp8_e4m3}")
    assert policy.rules[0].match.layers == "2:10"


# Rules


def test_the_first_matching_rule_wins_and_default_serves_the_rest() -> None:
    policy = Policy.from_text(EXAMPLE)

    def formats(module: str, layer: int | None) -> FormatPair | None:
        return policy.formats_for(module, layer, 8)

    assert formats("layers.0.cross_attn", 0) == FP8
    assert formats("layers.7.self_attn", 7) == FP8
    assert formats("layers.2.cross_attn", 2) is None
    assert formats("layers.2.self_attn", 2) == FormatPair("turboquant_4bit", "int4_per_token_head")
    assert formats("attn", None) == INT8


def test_a_site_without_layer_index_matches_no_rule_with_layers() -> None:
    assert policy_with(match={"layers": ":"}, dtype="auto").formats_for("attn", None, 1) == INT8


def test_layers_and_module_in_one_rule_must_both_match() -> None:
    policy = policy_with(match={"layers": "0", "module": "*.self_attn"}, dtype="fp8_e4m3")
    assert policy.formats_for("layers.0.self_attn", 0, 2) == FP8
    assert policy.formats_for("layers.0.cross_attn", 0, 2) == INT8
    assert policy.formats_for("layers.1.self_attn", 1, 2) == INT8


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("model.layers.1.self_attn", True),
        ("model.layers.1", False),
        ("*.1.self_attn", True),
        ("model.layers.?.self_attn", True),
        ("re:.*self_attn", True),
        (r"re:model\.layers\.1", False),
        (r"re:model\.layers\.\d+\.self_attn", True),
    ],
)
def test_module_patterns_describe_the_whole_name(pattern: str, matches: bool) -> None:
    formats = policy_with(match={"module": pattern}, dtype="fp8_e4m3").formats_for("model.layers.1.self_attn", 1, 4)
    assert formats == (FP8 if matches else INT8)


def test_key_and_value_take_their_half_of_a_preset() -> None:
    policy = Policy.load({"default": {"key": {"dtype": "turboquant_4bit_nc"}, "value": {"dtype": "fp8_e4m3"}}})
    assert policy.formats_for("", 0, 1) == FormatPair("turboquant_4bit", "fp8_e4m3")
    policy = Policy.load({"default": {"dtype": "fp8_e4m3", "value": {"dtype": "turboquant_4bit_nc"}}})
    assert policy.formats_for("", 0, 1) == FormatPair("fp8_e4m3", "int4_unrotated")


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_names_formats_that_exist(name: str) -> None:
    assert Policy.load(name).formats_for("", 0, 1) == PRESETS[name]
    assert {PRESETS[name].key, PRESETS[name].value} <= FORMATS.keys()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_can_serve_keys_and_values_alike_unless_its_scales_are_per_channel(name: str) -> None:
    spec = {"default": {"dtype": name}}
    if FORMATS[name].granularity == "channel":
        assert f"values cannot have scales per channel ({name})" in error_of(spec)
    else:
        assert Policy.load(spec).formats_for("", 0, 1) == FormatPair(name, name)


# Formats by their properties, and exact tokens


@pytest.mark.parametrize(
    ("half", "name"),
    [
        ({"dtype": "int4", "granularity": "per_channel"}, "int4_per_channel"),
        ({"dtype": "int8", "granularity": "per_channel", "group_size": 64}, "int8_per_channel"),
        ({"dtype": "int2", "granularity": "per_group", "group_size": 32}, "int2_per_group_32"),
        ({"dtype": "int4", "granularity": "per_token_head"}, "int4_per_token_head"),
        ({"dtype": "fp8_e5m2", "granularity": "per_token_head"}, "fp8_e5m2"),
        ({"dtype": "int4"}, "int4_per_channel"),
        ({"dtype": "fp8_e4m3", "granularity": "per_tensor", "scales": 1}, "fp8_e4m3_unit"),
        ({"dtype": "fp8_e5m2", "granularity": "per_tensor", "scales": 0.05}, "fp8_e5m2_scale0.05"),
        ({"dtype": "turboquant_2.5bit", "rotation_seed": 7}, "turboquant_2.5bit_seed7"),
        ({"dtype": "int4", "granularity": "per_token_head", "rotation_seed": 7}, "int4_per_token_head_seed7"),
    ],
)
def test_a_format_may_be_described_by_its_elements_and_what_shares_a_scale(half: dict[str, object], name: str) -> None:
    spec = {"default": {"key": half, "value": {"dtype": "fp8_e4m3"}}}
    assert Policy.load(spec).formats_for("", 0, 1) == FormatPair(name, "fp8_e4m3")


@pytest.mark.parametrize(
    ("half", "message"),
    [
        ({"dtype": "int8", "group_size": 64}, "group_size needs a granularity"),
        ({"dtype": "int4", "granularity": "per_channel", "group_size": 32}, "a group is a block of 64 tokens"),
        ({"dtype": "int4", "granularity": "per_group"}, "granularity per_group needs a group_size (32, 64, 128)"),
        ({"dtype": "int4", "granularity": "per_group", "group_size": 48}, "there is no format int4 per_group of 48"),
        ({"dtype": "int4", "granularity": "per_token_head", "group_size": 64}, "there are no groups; drop it"),
        ({"dtype": "int3", "granularity": "per_channel"}, "there is no format int3 per_channel (per_channel: "),
        ({"dtype": "auto", "granularity": "per_channel"}, "there is no format auto per_channel"),
        ({"dtype": "fp8_e4m3", "granularity": "per_tensor"}, "per_tensor and scales go together"),
        ({"dtype": "fp8_e4m3", "scales": 1}, "per_tensor and scales go together"),
        (
            {"dtype": "int8", "granularity": "per_tensor", "scales": 1},
            "there is no format int8 per_tensor (per_tensor: ",
        ),
        ({"dtype": "fp8_e5m2", "granularity": "per_tensor", "scales": 0}, "must be a number between 2**-40 and 2**40"),
        ({"dtype": "int4_unrotated", "rotation_seed": 7}, "int4_unrotated is not rotated"),
    ],
)
def test_a_description_of_no_format_says_what_there_is(half: dict[str, object], message: str) -> None:
    error = error_of({"default": {"key": half, "value": {"dtype": "fp8_e4m3"}}})
    assert error.startswith("policy: default.key: ")
    assert message in error


def test_a_description_beside_the_dtype_of_a_cache_is_for_keys_and_values() -> None:
    policy = Policy.from_text("default: {dtype: fp8_e4m3, granularity: per_tensor, scales: 0.05}")
    assert policy.formats_for("", 0, 1) == FormatPair("fp8_e4m3_scale0.05", "fp8_e4m3_scale0.05")
    assert Policy.from_text(policy.to_yaml()) == policy
    policy = policy_with(match={"layers": 0}, dtype="int8", granularity="per_channel", value={"dtype": "fp8_e4m3"})
    assert policy.formats_for("", 0, 1) == FormatPair("int8_per_channel", "fp8_e4m3")


@pytest.mark.parametrize("seed", [0, -1, 1_000_000_000, "x", True])
def test_a_seed_is_a_positive_whole_number(seed: object) -> None:
    assert "default.rotation_seed: " in error_of({"default": {"dtype": "turboquant_4bit", "rotation_seed": seed}})


def test_rules_may_be_empty() -> None:
    assert Policy.from_text("rules:\ndefault: {dtype: int4}") == Policy.from_text("default: {dtype: int4}")


def test_a_rule_may_keep_other_tokens_than_the_policy() -> None:
    policy = Policy.load(
        {
            "rules": [
                {"match": {"layers": "0"}, "dtype": "fp8_e4m3", "sink_tokens": 0},
                {"match": {"layers": "1"}, "dtype": "fp8_e4m3", "residual_length": 256},
                {"match": {"layers": "2"}, "dtype": "auto", "residual_length": 256},
            ],
            "default": {"dtype": "fp8_e4m3"},
            "residual_length": 128,
            "sink_tokens": 4,
        }
    )
    formats = [policy.formats_for(f"layers.{layer}", layer, 4) for layer in range(4)]
    kept = [pair and (pair.residual_length, pair.sink_tokens) for pair in formats]
    assert kept == [(128, 0), (256, 4), None, (128, 4)]


def test_a_preset_keeps_its_tokens_unless_the_policy_or_the_rule_gives_another_number() -> None:
    def kept(**fields: object) -> list[int]:
        policy = Policy.load({"default": {"dtype": "turboquant_3bit_r128"}, **fields})
        pairs = [policy.formats_for(f"layers.{layer}", layer, 2) for layer in range(2)]
        assert all(pair is not None and pair.key == "turboquant_3bit" for pair in pairs)
        return [pair.residual_length for pair in pairs if pair is not None]

    def rule(**fields: object) -> list[dict[str, object]]:
        return [{"match": {"layers": "0"}, **fields}]

    both = {role: {"dtype": "turboquant_3bit_r128"} for role in ("key", "value")}
    assert kept() == [128, 128]
    assert kept(residual_length=64) == [64, 64]
    assert kept(residual_length=0) == [0, 0]
    assert kept(rules=rule(dtype="turboquant_3bit")) == [0, 128]
    assert kept(rules=rule(dtype="turboquant_3bit_r128", residual_length=0)) == [0, 128]
    assert kept(rules=rule(dtype="turboquant_3bit_r128", residual_length=256), residual_length=0) == [256, 0]
    assert kept(rules=rule(**both)) == [0, 128], "a preset stands for its format of keys or of values"
    policy = Policy.load("turboquant_3bit_r128")
    assert Policy.from_text(policy.to_yaml()) == policy


def test_kept_tokens_are_whole_blocks_and_scales_per_channel_keep_one_at_least() -> None:
    def kept(**fields: int) -> list[str]:
        pair = Policy.load({"default": {"dtype": "int4"}, **fields}).formats_for("", 0, 1)
        assert pair is not None
        return [pair.layout(role, 64, torch.bfloat16).spec for role in ("key", "value")]

    assert kept() == ["int4_per_channel[recent=1,sinks=0,bfloat16]", "int4_per_token_head"]
    assert kept(residual_length=65, sink_tokens=4) == [
        "int4_per_channel[recent=2,sinks=1,bfloat16]",
        "int4_per_token_head[recent=2,sinks=1,bfloat16]",
    ]
    assert kept(sink_tokens=64) == [
        "int4_per_channel[recent=1,sinks=1,bfloat16]",
        "int4_per_token_head[recent=0,sinks=1,bfloat16]",
    ]


@pytest.mark.parametrize("field", ["residual_length", "sink_tokens"])
@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_number_of_tokens_is_a_whole_number(field: str, count: object) -> None:
    assert field in error_of({"default": {"dtype": "fp8_e4m3"}, field: count})


# Sources


def test_a_policy_comes_from_a_preset_a_file_a_dict_or_a_policy(tmp_path: Path) -> None:
    expected = Policy.from_text(EXAMPLE)
    (tmp_path / "p.yaml").write_text(EXAMPLE)
    (tmp_path / "p.json").write_text(json.dumps(expected.model_dump(exclude_none=True), indent="\t"))
    assert Policy.load(tmp_path / "p.yaml") == expected
    assert Policy.load(str(tmp_path / "p.json")) == expected
    assert Policy.load(expected.model_dump(exclude_none=True)) == expected
    assert Policy.load(expected) is expected
    assert Policy.load("auto").formats_for("", 0, 1) is None


def test_without_a_policy_the_environment_variable_decides_and_then_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    assert Policy.load().formats_for("", 0, 1) == INT8
    monkeypatch.setenv("KVQUANT_POLICY", "fp8_e4m3")
    assert Policy.load().formats_for("", 0, 1) == FP8
    monkeypatch.setenv("KVQUANT_POLICY", "fp8")
    assert error_of(None).startswith("KVQUANT_POLICY='fp8' is neither a preset nor a file; did you mean 'fp8_e4m3'?")


def test_a_policy_survives_the_round_trip_through_yaml() -> None:
    policy = Policy.from_text(EXAMPLE)
    assert Policy.from_text(policy.to_yaml()) == policy


def test_the_fingerprint_is_equal_for_equal_policies_in_every_process() -> None:
    policy = Policy.from_text(EXAMPLE)
    assert policy.fingerprint() == Policy.from_text(policy.to_yaml()).fingerprint() == "79862e0787d84e3c"
    assert policy.fingerprint() != Policy.load("fp8_e4m3").fingerprint()


# Errors


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int4_per_tokn", "policy 'int4_per_tokn' is neither a preset nor a file; did you mean 'int4_per_token_head'?"),
        (
            "missing.yaml",
            "policy 'missing.yaml' is neither a preset nor a file (presets: int8_per_token_head, fp8_e4m3,",
        ),
        (7, "policy: expected a preset name, a path, a dict or a Policy, got int"),
        ({}, "policy: default: is required"),
        ({"defualt": {"dtype": "int4"}}, "policy: unknown field 'defualt'; did you mean 'default'? (known: "),
        (
            {"default": "fp8_e4m3"},
            "policy: default: expected fields (dtype, granularity, group_size, scales, rotation_seed, transforms, key, "
            "value), got",
        ),
        (
            {"default": {"dtype": "fp8_e4m9"}},
            "policy: default.dtype: unknown dtype 'fp8_e4m9'; did you mean 'fp8_e4m3'?",
        ),
        (
            {"default": {"key": {"dtype": "fp8_e4m3"}}},
            "policy: default: no format for the value; give dtype, or key and",
        ),
        ({"default": {"dtype": "auto", "key": {"dtype": "fp8_e4m3"}}}, "policy: default: dtype: auto leaves the whole"),
        ({"default": {"dtype": "fp8_e4m3", "key": {"dtype": "auto"}}}, "policy: default.key: dtype: auto is for whole"),
    ],
)
def test_a_wrong_policy_is_one_line_that_names_place_and_remedy(spec: object, message: str) -> None:
    error = error_of(spec)
    assert error.startswith(message)
    assert "\n" not in error


@pytest.mark.parametrize("field", ["residual_lenght", "window"])
def test_a_field_that_does_not_exist_is_rejected_with_the_list_of_known_fields(field: str) -> None:
    error = error_of({"default": {"dtype": "fp8_e4m3"}, field: 4})
    assert error.startswith(f"policy: unknown field {field!r}")
    assert (
        "(known: version, rules, default, residual_length, sink_tokens, prefill, on_unsupported, key_outliers, strict)"
        in error
    )


def test_every_fault_of_a_file_has_a_line_with_file_rule_and_field(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        """
version: 2
rules:
  - {match: {layer: 3}, dtype: auto}
  - {match: {layers: "9-3"}, key: {dtype: fp8_e4m3, group_size: 64}, value: {dtype: fp8_e4m3}}
  - {match: {module: "re:("}, dtype: auto}
  - {match: {}, dtype: auto}
default: {dtype: fp8_e4m3}
on_unsupported: raise
"""
    )
    with pytest.raises(PolicyError, match=r"policy.yaml: version.* \(and 6 more faults\)$") as caught:
        Policy.load(path)
    assert sorted(caught.value.faults) == sorted(
        [
            f"{path}: version: input should be 1, got 2",
            f"{path}: rule 1: match: unknown field 'layer'; did you mean 'layers'? (known: layers, module)",
            f"{path}: rule 2: match.layers: '9-3' is empty: it ends before it starts",
            f"{path}: rule 2: key: group_size needs a granularity: per_group, or per_channel",
            f"{path}: rule 3: match.module: 're:(' is not a regular expression: missing ), unterminated subpattern at "
            "position 0",
            f"{path}: rule 4: match: give layers or module; formats for all layers belong in default",
            f"{path}: on_unsupported: input should be 'error', 'warn' or 'ignore', got 'raise'",
        ]
    )


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.yaml", "default: [", "line 1, column 11: expected the node content, but found '<stream end>'"),
        ("p.yaml", "default: {dtype: auto}\ndefault: {dtype: fp8_e4m3}", "line 2, column 1: 'default' is given twice"),
        ("p.json", '{"default": }', "line 1, column 13: Expecting value"),
        ("p.json", '{"strict": 1, "strict": 0}', "'strict' is given twice"),
        (
            "p.yaml",
            "",
            "expected fields (version, rules, default, residual_length, sink_tokens, prefill, on_unsupported, "
            "key_outliers, strict), got None",
        ),
    ],
)
def test_a_file_that_is_no_policy_is_an_error_with_its_name_and_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    error = error_of(tmp_path / name)
    assert error.startswith(str(tmp_path / name))
    assert message in error


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('dtype = "int4"', ": it has no fields in YAML"),
        ('[default]\ndtype = "int4"', ", line 2, column 1: "),
        ("", ": it has no fields in YAML"),
    ],
)
def test_a_file_with_another_ending_that_is_not_yaml_is_told_what_policy_files_are(
    tmp_path: Path, text: str, what: str
) -> None:
    (tmp_path / "p.toml").write_text(text)
    error = error_of(tmp_path / "p.toml")
    assert error.startswith(f"{tmp_path}/p.toml{what}")
    assert error.endswith(
        "; policy files are YAML, or JSON if the name ends in .json: write this one as YAML, such as "
        "`default: {dtype: int4}`"
    )


def test_yaml_is_read_from_a_file_with_any_ending(tmp_path: Path) -> None:
    (tmp_path / "p.policy").write_text("default: {dtype: int4}")
    assert Policy.load(tmp_path / "p.policy") == Policy.load({"default": {"dtype": "int4"}})
    (tmp_path / "p.policy").write_text("default: {dtyp: int4}")
    assert "unknown field 'dtyp'; did you mean 'dtype'?" in error_of(tmp_path / "p.policy")


# Rules that match nothing

SITES = [Site(f"model.layers.{i}.self_attn", i, "sdpa") for i in range(4)]


def test_a_rule_that_matches_nothing_is_reported_with_the_sites_there_are() -> None:
    policy = policy_with(match={"module": "model.layer.*"}, dtype="auto")
    assert policy.unmatched_rules(SITES, 4) == [
        "policy: rule 1 (module 'model.layer.*') matches no attention site (sites: model.layers.0.self_attn, "
        "model.layers.1.self_attn, model.layers.2.self_attn, ...)"
    ]


def test_a_rule_that_earlier_rules_leave_nothing_to_is_reported() -> None:
    rules = [{"match": {"layers": ":"}, "dtype": "auto"}, {"match": {"layers": "1"}, "dtype": "fp8_e4m3"}]
    (line,) = Policy.load({"rules": rules, "default": {"dtype": "auto"}}).unmatched_rules(SITES, 4)
    assert line.startswith("policy: rule 2 (layers '1') decides nothing: earlier rules take every site it matches")


@pytest.mark.parametrize(
    ("layers", "layer", "what"),
    [
        ("0", None, "does not tell its layer"),
        ("-1", None, "does not tell its layer"),
        ("-1", 3, "does not tell the number of layers"),
        ("0-1, -2:", 3, "does not tell the number of layers"),
        ("0-1, -2:", 1, None),
        ("2:", 3, None),
        ("0", 3, None),
    ],
)
def test_a_rule_that_a_single_layer_cannot_decide_is_reported(layers: str, layer: int | None, what: str | None) -> None:
    policy = policy_with(match={"layers": layers}, dtype="auto")
    lines = policy.unmatched_rules([Site("self_attn", layer, "sdpa")], None)
    assert [line.partition(" alone ")[2].partition(";")[0] for line in lines] == ([] if what is None else [what])


@pytest.mark.parametrize(
    ("layers", "matched"),
    [("0-1", [0, 1]), ("2:", [2, 3]), (":", [0, 1, 2, 3]), ("-1", []), (":-1", []), ("1, -1", [1])],
)
def test_without_the_number_of_layers_no_negative_index_matches(layers: str, matched: list[int]) -> None:
    assert [layer for layer in range(4) if LayerSet.parse(layers).contains(layer, None)] == matched


def test_an_unmatched_rule_warns_and_is_an_error_in_strict_mode(caplog: pytest.LogCaptureFixture) -> None:
    rules = [{"match": {"layers": "9"}, "dtype": "auto"}]
    with caplog.at_level(logging.WARNING, "kvcompile"):
        Policy.load({"rules": rules, "default": {"dtype": "auto"}}).check_rules(SITES, 4)
    assert "rule 1 (layers '9') matches no attention site" in caplog.text
    with pytest.raises(PolicyError, match=r"rule 1 \(layers '9'\) matches no attention site"):
        Policy.load({"rules": rules, "default": {"dtype": "auto"}, "strict": True}).check_rules(SITES, 4)


def test_a_policy_whose_rules_all_apply_passes_the_strict_check() -> None:
    rules = [{"match": {"layers": "0-1, -1"}, "dtype": "auto"}]
    Policy.load({"rules": rules, "default": {"dtype": "auto"}, "strict": True}).check_rules(SITES, 4)
