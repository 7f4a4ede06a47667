"""Bad policies, configs and texts end soon, with a short message that says what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from valid_files import CONFIG, POLICY

from kvcompile import PolicyError
from kvcompile.errors import MAX_MESSAGE, InputError, cut, shown
from kvcompile.files.reading import MAX_TEXT, read_file
from kvcompile.planning.config_file import read_config
from kvcompile.planning.errors import PlanError
from kvcompile.planning.model_caches import read_model_caches
from kvcompile.planning.units import parse_context, parse_size
from kvcompile.policy.layers import LayerSet
from kvcompile.policy.policy import MAX_FAULTS, Policy

DEFAULT = "default: {dtype: int8_per_token_head}\n"


def growing_aliases(levels: int) -> str:
    lines = ["rules:", "  - &a0 [x, x]"]
    lines += [f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n" + DEFAULT


BAD_POLICIES = {
    "aliases that grow": growing_aliases(30),
    "an alias to itself": "rules: &a [*a]\n" + DEFAULT,
    "many rules": "rules:\n" + "  - {match: {layers: 0}, dtype: int4}\n" * 50_000 + DEFAULT,
    "deep lists": "rules: " + "[" * 50_000,
    "deep mappings": "rules: " + "{a: " * 50_000,
    "a repetition of repetitions": "rules: [{match: {module: 're:(a|a)*\\1(a*)*b'}, dtype: int4, size: 0}]\n" + DEFAULT,
    "a long pattern": f"rules: [{{match: {{module: 're:{'a' * 2000}'}}, dtype: int4}}]\n" + DEFAULT,
    "a pattern of many copies": "rules: [{match: {module: 're:((((a{100}){100}){100}){100})'}, dtype: int4}]\n"
    + DEFAULT,
    "a pattern that contains itself": "rules: [{match: {module: 're:(?R)*a'}, dtype: int4}]\n" + DEFAULT,
    "a pattern with errors allowed": "rules: [{match: {module: 're:(?:model){e<=900}'}, dtype: int4}]\n" + DEFAULT,
    "a file with a long name": f"default: {{dtype: fp8_e4m3, granularity: per_tensor, scales: {'s' * 9000}}}\n",
    "a wrong pattern": "rules: [{match: {module: 're:('}, dtype: int4}]\n" + DEFAULT,
    "a long name": f"default: {{dtype: {'x' * 100_000}}}\n",
    "a long field": f"{'x' * 100_000}: 1\n" + DEFAULT,
    "a number of many digits": f"residual_length: {'9' * 10_000}\n" + DEFAULT,
    "a large number": f"residual_length: {10**30}\n" + DEFAULT,
    "a float": "residual_length: 1e30\n" + DEFAULT,
    "digits of another script": "residual_length: ٦٤\n" + DEFAULT,
    "layers in digits of another script": "rules: [{match: {layers: '٣'}, dtype: int4}]\n" + DEFAULT,
    "layers of many digits": f"rules: [{{match: {{layers: '{'9' * 5000}'}}, dtype: int4}}]\n" + DEFAULT,
    "a bool as version": "version: true\n" + DEFAULT,
    "a date": "residual_length: 2026-13-45\n" + DEFAULT,
    "an empty number with a tag": "residual_length: !!int ''\n" + DEFAULT,
    "a word that a tag calls a bool": "strict: !!bool maybe\n" + DEFAULT,
    "a word that a tag calls a date": "strict: !!timestamp x\n" + DEFAULT,
    "a number to base 60 with a tag": "residual_length: !!int 1:10\n" + DEFAULT,
    "many slices of layers": f"rules: [{{match: {{layers: '{','.join([':'] * 50_000)}'}}, dtype: int4}}]\n" + DEFAULT,
    "many ranges of letters": "rules: [{match: {module: 're:(?i)"
    + "[ -\ufffd]" * 180
    + "('}, dtype: int4}]\n"
    + DEFAULT,
    "many groups in one another": "rules: [{match: {module: 're:"
    + "(" * 450
    + ")" * 450
    + "'}, dtype: int4}]\n"
    + DEFAULT,
    "a scale with an underscore": "default: {dtype: fp8_e4m3, granularity: per_tensor, scales: 1_0}\n",
    "an object": "default: !!python/object/apply:os.system ['false']\n",
    "a key that is a list": "? [a, b]\n: 1\n" + DEFAULT,
}


def rules_as_json(count: int, **match: Any) -> str:
    return json.dumps({"rules": [{"match": match, "dtype": "int4"}] * count, "default": {"dtype": "int4"}})


BAD_JSON = {
    "many rules": rules_as_json(501, layers=0),
    "many long patterns": rules_as_json(100, module="re:" + "[a-b]" * 150),
    "many layers in many rules": rules_as_json(20, layers=[0] * 150),
    "deep lists": "[" * 100_000,
    "deep objects": '{"a": ' * 100_000,
    "a number of many digits": '{"residual_length": 1' + "0" * 10_000 + "}",
    "many faults": '{"rules": [' + "{}," * 1000 + "{}]}",
    "a bool as version": '{"version": true, "default": {"dtype": "int4"}}',
    "a field twice": '{"version": 1, "version": 1}',
}


def assert_short(error: Exception) -> None:
    message = str(error)
    assert 0 < len(message) <= MAX_MESSAGE
    assert len(message.splitlines()) == 1


BAD_FILES = [
    pytest.param(suffix, text, id=f"{suffix}, {what}")
    for suffix, texts in (("yaml", BAD_POLICIES), ("json", BAD_JSON))
    for what, text in texts.items()
]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("suffix", "text"), BAD_FILES)
def test_a_bad_policy_gets_one_short_line(suffix: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / f"policy.{suffix}"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert_short(caught.value)
    assert 1 <= len(caught.value.faults) <= MAX_FAULTS + 1
    assert all(len(fault) <= MAX_MESSAGE for fault in caught.value.faults)


@pytest.mark.parametrize("rules", ["{match: {layers: 0}, dtype: auto}", "int4", "3"])
def test_rules_that_are_no_list_are_told_how_to_become_one(rules: str) -> None:
    with pytest.raises(PolicyError, match=r"^policy: rules: expected a list of rules, with a dash before each, got "):
        Policy.from_text(f"rules: {rules}\n{DEFAULT}")


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_byte_order_mark_and_ends_of_lines_do_not_matter(start: bytes, end: bytes, tmp_path: Path) -> None:
    yaml_file, json_file, config = (tmp_path / name for name in ("policy.yaml", "policy.json", "config.json"))
    yaml_file.write_bytes(start + b"version: 1" + end + b"default: {dtype: fp8_e4m3}" + end)
    json_file.write_bytes(start + b'{"version": 1,' + end + b'"default": {"dtype": "fp8_e4m3"}}')
    config.write_bytes(start + json.dumps(CONFIG, indent=1).encode().replace(b"\n", end))
    assert Policy.load(yaml_file) == Policy.load(json_file) == Policy.load({"default": {"dtype": "fp8_e4m3"}})
    assert len(read_model_caches(read_config(config)).caches) == 2


def test_ranges_of_letters_of_all_scripts_match_names() -> None:
    policy = Policy.from_text("rules: [{match: {module: 're:[Ā-\ufffd]+[.][\\u0100x]'}, dtype: auto}]\n" + DEFAULT)
    assert policy.formats_for("注意.x", 0, 1) is None
    assert policy.formats_for("attn.x", 0, 1) is not None


@pytest.mark.timeout(20)
def test_a_pattern_that_takes_too_long_is_an_error_where_it_is_used() -> None:
    policy = Policy.from_text("rules: [{match: {module: 're:(a|aa)+$b'}, dtype: int4}]\n" + DEFAULT)
    with pytest.raises(PolicyError, match="takes too long"):
        policy.formats_for("a" * 60, 0, 1)
    rules = "".join(f"  - {{match: {{module: 're:((a+)+)+x{i}'}}, dtype: int4}}\n" for i in range(450))
    many = Policy.from_text("rules:\n" + rules + DEFAULT)
    with pytest.raises(PolicyError, match="takes too long"):
        assert all(many.formats_for("a" * length, 0, 1) for length in range(20, 60))


def test_patterns_match_as_in_python_and_a_known_name_takes_no_time() -> None:
    policy = Policy.from_text("rules: [{match: {module: 're:.*[.](0|1)[.]attn.{0,3}'}, dtype: auto}]\n" + DEFAULT)
    for _ in range(10_000):
        assert policy.formats_for("layers.1.attn_2", 1, 3) is None
    assert policy.formats_for("layers.2.attn", 2, 3) is not None
    assert policy == Policy.from_text(policy.to_yaml())


def test_an_alias_counts_as_a_copy_and_is_allowed() -> None:
    rule = "  - {match: {layers: 0}, key: &int4 {dtype: int4_per_token_head}, value: *int4}\n"
    formats = Policy.from_text("rules:\n" + rule + DEFAULT).formats_for("layers.0", 0, 2)
    assert formats is not None
    assert formats.key == formats.value == "int4_per_token_head"


@pytest.mark.parametrize("name", ["~no_such_user/policy.yaml", "a\0b", "x" * 5000, "/dev/zero", "."])
def test_a_name_that_is_no_file_is_a_policy_error(name: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.load(name)
    assert_short(caught.value)


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_pipes_devices_and_huge_files_are_not_read(tmp_path: Path) -> None:
    pipe, huge = tmp_path / "pipe", tmp_path / "huge.yaml"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    for path in (pipe, Path("/dev/zero"), huge, tmp_path):
        with pytest.raises(PolicyError, match="cannot be read"):
            Policy.from_file(path)
        with pytest.raises(OSError, match=r"regular|bytes"):
            read_file(path, MAX_TEXT)


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_files_that_a_policy_names_are_no_pipes(tmp_path: Path) -> None:
    for name in ("calibration.json", "calibration.safetensors"):
        os.mkfifo(tmp_path / name)
    transforms = {"dtype": "transform_2.2bit", "transforms": str(tmp_path / "calibration.safetensors")}
    scales = {"dtype": "fp8_e4m3", "granularity": "per_tensor"}
    for default in (transforms, *({**scales, "scales": str(path)} for path in tmp_path.iterdir())):
        with pytest.raises(PolicyError, match="it is not a regular file"):
            Policy.load({"default": default})


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 10**9}, {"num_hidden_layers": True}, {"hidden_size": 10**30}, {"num_attention_heads": 0},
     {"num_key_value_heads": "2"}, {"num_hidden_layers": None}, {"head_dim": -1},
     {"num_hidden_layers": 1001}, {"per_layer_config": {"0": 5}},
     {"model_type": "llama4_text", "attention_chunk_size": 5, "no_rope_layers": 5},
     {"model_type": "llama4_text", "attention_chunk_size": 5, "no_rope_layers": [1]},
     {"layer_types": [{"a": 1}] * 2}, {"layer_types": ["x" * 10**5] * 2}, {"model_type": ["llama"]},
     {"model_type": "x" * 10**5}],
)  # fmt: skip
def test_a_bad_config_gets_one_short_line(change: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | change), encoding="utf-8")
    with pytest.raises(PlanError) as caught:
        read_model_caches(read_config(path))
    assert_short(caught.value)


def test_a_key_that_is_no_number_of_a_layer_changes_no_layer(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    caches = []
    for keys in ([], ["²", "\u0660", "x"]):
        path.write_text(json.dumps(CONFIG | {"per_layer_config": {key: {"head_dim": 2} for key in keys}}), "utf-8")
        caches.append(read_model_caches(read_config(path)).caches)
    assert caches[0] == caches[1]


@pytest.mark.timeout(20)
def test_a_checkpoint_with_a_huge_header_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    with path.open("wb") as file:
        file.write((1 << 26).to_bytes(8, "little"))
        file.truncate(1 << 27)
    transforms = {"dtype": "transform_2.2bit", "transforms": str(path)}
    scales = {"dtype": "fp8_e4m3", "granularity": "per_tensor", "scales": str(path)}
    for default in (transforms, scales):
        with pytest.raises(PolicyError, match="its header has 67108864 bytes, and at most 8388608 are read"):
            Policy.load({"default": default})


@pytest.mark.parametrize("text", ["٣٢k", "9" * 5000 + "GiB", "1e9", "x" * 5000, "-1k"])
def test_sizes_are_written_in_ascii_digits(text: str) -> None:
    for parse in (parse_size, parse_context):
        with pytest.raises(PlanError) as caught:
            parse(text, "--memory")
        assert_short(caught.value)


def test_layers_are_written_in_ascii_digits() -> None:
    with pytest.raises(PolicyError, match="not a valid layer range"):
        LayerSet.parse("٣")


@pytest.mark.parametrize("error", [InputError, *InputError.__subclasses__()])
def test_a_message_about_input_is_one_line_of_bounded_length(error: type[InputError]) -> None:
    assert_short(error("x\n" * 10**5))
    assert str(error("short")) == "short"


def test_the_first_fault_of_a_policy_is_its_message_and_all_are_kept() -> None:
    error = PolicyError("first", "second", "third")
    assert (str(error), error.faults) == ("first (and 2 more faults)", ("first", "second", "third"))
    assert str(PolicyError("first", "second")) == "first (and 1 more fault)"


def test_a_long_value_is_shown_by_its_ends() -> None:
    assert cut("ab" * 500, 20) == "abababa ... bababab"
    assert len(shown("x" * 10**6)) <= 60
    assert shown("int4") == "'int4'"


# Random changes of valid files


Edits = list[tuple[int, int, str]]


def changed(text: str, edits: Edits) -> str:
    for place, length, new in edits:
        place %= len(text) + 1
        text = text[:place] + new + text[place + length :]
    return text


edits = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.integers(0, 40),
        st.sampled_from(["", "[", "{", "*a", "&a ", ": ", "- ", "\n", "'", "1e999", "-9", "null", "true", "\x00", "😀"])
        | st.text(max_size=5),
    ),
    min_size=1,
    max_size=4,
)


def message_of(error: type[Exception], function: Callable[[], Any]) -> str:
    """The message of the error that ``function`` raises; empty if it succeeds. Any other error passes."""
    try:
        function()
    except error as raised:
        return str(raised)
    return ""


@given(edits)
@settings(max_examples=100, deadline=None)
def test_a_changed_policy_is_a_policy_or_a_policy_error(edits: Edits) -> None:
    text = changed(POLICY, edits)
    message = message_of(PolicyError, lambda: Policy.from_text(text).formats_for("model.layers.0.self_attn", 0, 4))
    assert len(message) <= MAX_MESSAGE


@given(edits)
@settings(max_examples=200, deadline=None)
def test_a_changed_config_gives_caches_or_a_plan_error(tmp_path_factory: pytest.TempPathFactory, edits: Edits) -> None:
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(changed(json.dumps(CONFIG), edits).encode("utf-8", "surrogatepass"))
    message = message_of(PlanError, lambda: read_model_caches(read_config(path)))
    assert len(message) <= MAX_MESSAGE
