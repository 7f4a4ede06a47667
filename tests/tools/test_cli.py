"""The command line: its output, its exit codes, and its messages about mistakes."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documented_commands import runs_elsewhere
from model_configs import GEMMA_2_9B, GEMMA_3_4B, LLAMA_3_1_8B, T5_SMALL, write_config
from typer.testing import CliRunner

from kvcompile.cli.app import COMMANDS, app
from kvcompile.cli.policy_schema import policy_schema
from kvcompile.errors import PolicyError
from kvcompile.policy.policy import Policy
from kvcompile.tables import WIDTH, table

POLICY = """\
version: 1
rules:
  - {match: {layers: "0-1, -2:"}, dtype: auto}
  - match: {module: "*.self_attn", layers: [2, "3-4"]}
    key: {dtype: fp8_e4m3}
    value: {dtype: int4_per_token_head}
default: {dtype: int8_per_token_head}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a config and a policy."""
    write_config(tmp_path, LLAMA_3_1_8B)
    (tmp_path / "policy.yaml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    return tmp_path


def run(command: str, code: int = 0) -> tuple[str, str]:
    """The output of a command on stdout and stderr."""
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def run_json(command: str, code: int = 0) -> Any:
    out, _ = run(f"{command} --json", code)
    return json.loads(out)


def help_of(*command: str) -> str:
    return run(shlex.join([*command, "--help"]))[0]


@pytest.mark.parametrize("command", ["e" * 5000, "plan --conf" + "g" * 5000, "-" + "x" * 5000])
def test_a_long_mistake_gets_a_short_message(command: str) -> None:
    _, err = run(command, code=2)
    message = err.splitlines()[-1]
    assert message.startswith("Error: No such ")
    assert len(message) < 200


def cells(text: str) -> list[list[str]]:
    """The cells of all rows of all tables in a text."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


# The command line as a whole


def test_the_module_runs_as_a_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = "plan --config config.json --kv-budget 74GiB --policies bf16,int4_per_token_head"
    monkeypatch.setattr(sys, "argv", ["kvcompile", *command.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("kvcompile", run_name="__main__")
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert ["bf16", "131072", "606208", "296", "74", "18", "4"] in cells(out)
    assert err == ""


def test_the_help_needs_neither_torch_nor_sympy() -> None:
    program = "import sys, kvcompile.cli.app; sys.exit(bool({'torch', 'sympy', 'pydantic_core'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_every_command_is_a_module_that_registers_itself() -> None:
    out = help_of()
    for name in COMMANDS:
        assert callable(importlib.import_module(f"kvcompile.cli.{name}").register)
        assert re.search(rf"^  {name} ", out, re.MULTILINE)


PAGES = [
    (),
    ("plan",),
    ("policy",),
    ("policy", "show"),
    ("policy", "validate"),
    ("policy", "schema"),
    ("eval",),
    ("compare",),
    ("tune",),
    ("explain",),
    ("verify",),
    ("bench",),
    ("calibrate",),
    ("doctor",),
]


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_help_fits_the_width_and_is_plain_ascii(page: tuple[str, ...]) -> None:
    out = help_of(*page)
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= WIDTH


EXAMPLES = [
    line.strip().removeprefix("python -m kvcompile ")
    for page in PAGES
    for line in CliRunner().invoke(app, [*page, "--help"]).stdout.splitlines()
    if line.startswith("    python -m kvcompile ")
]


@pytest.mark.usefixtures("without_code_generation", "dumps_in_tmp_path")
@pytest.mark.parametrize("example", [example for example in EXAMPLES if not runs_elsewhere(example)])
def test_the_examples_of_the_help_run(example: str) -> None:
    command, _, _ = example.partition(" > ")
    out, err = run(command)
    assert out
    assert err == ""


@pytest.mark.slow
def test_doctor_compiles_and_runs_a_small_attention() -> None:
    assert re.search(r"ok +trial on cpu +packed, largest error", run("doctor --try")[0])


def test_every_command_has_examples() -> None:
    assert {example.split()[0] for example in EXAMPLES} == set(COMMANDS)


def test_the_version_is_the_version_of_the_package() -> None:
    assert re.fullmatch(r"kvcompile \d+\.\d+\.\d+\n", run("--version")[0])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("plan --config nowhere --kv-budget 1GiB", "nowhere: no such file"),
        ("plan --config config.json", "give --memory, or --kv-budget"),
        ("plan --config config.json --memory 80G", "--memory: '80G' is not a valid size"),
        ("plan --config config.json --kv-budget 74gib", "did you mean '74GiB'"),
        ("plan --config config.json --kv-budget 1GiB --contexts 2kb", "--contexts: '2kb' is not a valid context"),
        ("plan --config config.json --kv-budget 1GiB --contexts ,", "--contexts: ',' is an empty list"),
        ("plan --config config.json --kv-budget 1GiB --policies bf16,int4_per_tokn_head", "did you mean 'int4_per_"),
        ("plan --config config.json --kv-budget 1GiB --link 1GB/s", "--link has no effect without --bandwidth and"),
        ("plan --config config.json --kv-budget 1GiB --tensor-parallel 3", "3 does not divide the 8 KV heads"),
        ("plan --config config.json --kv-budget 1GiB --memory 2GiB", "--memory has no effect together with --kv-"),
        ("plan --config config.json --kv-budget 1GiB --reserve 2GiB", "--reserve has no effect together with --kv-"),
        ("plan --config config.json --kv-budget 1GiB --weights int4", "--weights has no effect"),
        ("plan --config config.json --kv-budget 1GiB --users 4", "--users has no effect without --bandwidth"),
        ("plan --config config.json --kv-budget 1GiB --speedup 2", "--speedup has no effect without --bandwidth"),
        ("plan --config config.json --kv-budget 1GiB --bandwidth h300", "--bandwidth: 'h300' is not a known device"),
        ("plan --config config.json --kv-budget 1GiB --bandwidth 1TB", "--bandwidth: '1TB' is not a valid bandwidth"),
        ("plan --config config.json --kv-budget 1GiB --bandwidth l4 --speedup 0", "'0' is not a positive number"),
        *(
            (
                f"plan --config config.json --kv-budget 1GiB --bandwidth l4 --speedup {number}",
                "is not a positive number",
            )
            for number in ("1e999999999", "1e-999999999", "1/0", "nan", "٣")
        ),
        (f"plan --config config.json --kv-budget 1GiB --contexts {','.join(map(str, range(1, 102)))}", "at most 100"),
        ("plan --config config.json --kv-budget 1GiB --bandwidth l4 --efficiency 1.1", "is at most 1"),
        ("plan --config config.json --kv-budget 1GiB --bandwidth l4 --efficiency fp7=0.5", "no policy reads"),
        ("plan --config config.json --memory 80GiB --weights int3", "'int3' is not a known format; did you mean 'int"),
        ("policy show nowhere.yaml", "'nowhere.yaml' is neither a preset nor a file"),
        ("policy validate nowhere.yaml", "nowhere.yaml: cannot be read: No such file or directory"),
        ("policy validate .", ".: cannot be read: it is not a regular file"),
        ("policy validate /dev/zero", "/dev/zero: cannot be read: it is not a regular file"),
        ("policy show policy.yaml --config nowhere", "nowhere: no such file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(command: str, message: str) -> None:
    out, err = run(command, code=2)
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvcompile: error: ")
    assert message in line


def test_an_error_about_a_rule_names_the_policy_file(folder: Path) -> None:
    (folder / "policy.yaml").write_text(POLICY + "strict: true\n")
    write_config(folder, {**LLAMA_3_1_8B, "num_hidden_layers": 2})
    _, err = run("policy show policy.yaml --config config.json", code=2)
    assert err.startswith("kvcompile: error: policy.yaml: ")


def test_the_formats_of_an_encoder_decoder_are_shown_without_the_length_of_its_source(folder: Path) -> None:
    write_config(folder, T5_SMALL)
    modules = [layer["module"] for layer in run_json("policy show int4 --config config.json")["layers"]]
    assert any("EncDecAttention" in module for module in modules)


@pytest.mark.parametrize("command", ["plan", "plan --confg x", "plam", "policy validate", "doctor now"])
def test_wrong_usage_is_explained_on_stderr_with_exit_code_2(command: str) -> None:
    out, err = run(command, code=2)
    assert out == ""
    assert "Usage: kvcompile" in err
    assert "Error: " in err


def test_a_defect_of_the_program_is_not_taken_for_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.planning.make_plan.read_config", lambda path: 1 / 0)
    result = CliRunner().invoke(app, shlex.split("plan --config config.json --kv-budget 1GiB"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_tables_that_are_too_wide_go_on_below_each_other() -> None:
    header = ["policy", *(f"column{i}" for i in range(30))]
    rows = [["a name that is much longer than a label can be", *(f"{i}" * 9 for i in range(10, 40))], ["x", *"y" * 30]]
    text = table(header, rows)
    assert max(map(len, text.splitlines())) <= WIDTH
    shown = [cell for row in cells(text) for cell in row]
    assert all(shown.count(title) == 1 for title in header[1:])
    assert all(shown.count(cell) == 1 for cell in rows[0][1:])
    assert shown.count("x") == shown.count("policy") > 1


# plan


def test_plan_prints_users_for_each_policy_and_context() -> None:
    out, err = run("plan --config config.json --kv-budget 74GiB --policies bf16,int4_per_token_head")
    rows = cells(out)
    assert rows[0] == ["policy", "B/token", "tokens", "2k", "8k", "32k", "128k"]
    assert rows[2] == ["bf16", "131072", "606208", "296", "74", "18", "4"]
    int4 = ["int4_per_token_head", "32768", "2424832", "1184 (4.0x)", "296 (4.0x)", "74 (4.1x)", "18 (4.5x)"]
    assert rows[3] == int4
    assert err == ""


def test_plan_in_json_says_what_the_tables_say() -> None:
    command = "plan --config config.json --memory 80GiB --weights 4GiB --reserve 2GiB --bandwidth 1TB/s --users 100"
    data = run_json(f"{command} --policies bf16,int4_per_token_head")
    assert data["budget"] == {"kv_bytes": 74 * 2**30, "memory_bytes": 80 * 2**30, "reserve_bytes": 2 * 2**30}
    assert data["weights"] == {"name": "4GiB", "bytes": 4 * 2**30, "parameters": None}
    bf16, int4 = data["policies"]
    assert [entry["users"] for entry in bf16["payload"]["contexts"]] == [296, 74, 18, 4]
    assert [entry["users"] for entry in int4["payload"]["contexts"]] == [1184, 296, 74, 18]
    assert bf16["payload"]["formula"] == "131072*context"
    assert int4["bytes_per_token"] == {"payload": 32768, "stored": 34816}
    assert [entry["fits"] for entry in bf16["decode"]["contexts"]] == [True, False, False, False]
    assert [entry["fits"] for entry in int4["decode"]["contexts"]] == [True, True, False, False]
    assert bf16["decode"]["payoff"] is None
    assert int4["decode"]["payoff"]["speedup"] == 1.5


def test_plan_explains_its_formulas() -> None:
    command = "plan --config config.json --memory 80GiB --weights int4 --bandwidth h200 --explain"
    out, _ = run(f"{command} --policies bf16,turboquant_4bit_nc")
    assert "key turboquant_4bit: head_dim/2 + 2 = 64 + 2 bytes, 3.12 % metadata" in out
    assert "payload   = 32768*context" in out
    assert "attention = hidden_size*num_layers*(2*head_dim*num_heads + 2*head_dim*num_kv_heads) = 1342177280" in out
    assert "8030261248 parameters, 5727854592 bytes" in out
    assert "seconds of a step =" in out


def test_plan_marks_steps_that_do_not_fit_and_says_where_a_policy_pays() -> None:
    command = "plan --config config.json --kv-budget 80GiB --weights 16GB --bandwidth 3.35TB/s --users 16"
    out, _ = run(f"{command} --policies bf16,int8_per_token_head --speedup 3 --contexts 32k,128k")
    bf16, int8 = cells(out)[-2:]
    assert "*" not in bf16[1]
    assert bf16[2].endswith("*")
    assert int8[-1] == "never (<= 1.94x)"
    assert "*: 16 users do not fit into the KV budget" in out


def test_plan_for_several_gpus_shows_one_of_them_and_what_it_receives() -> None:
    command = "plan --config config.json --kv-budget 10GiB --weights 16GB --tensor-parallel 2 --context-parallel 2"
    out, _ = run(f"{command} --policies int4_per_token_head --bandwidth 3TB/s --latency 5 --link 100GB/s")
    assert "one of 4 GPUs, tensor parallel 2 x context parallel 2; all of them serve the same users" in out
    assert "32 x 4 KV heads, 128 + 128 channels, all tokens" in out
    assert "int4_per_token_head: 64 x all-reduce of hidden states, 8.0 KiB each: 0.325 ms" in out
    assert "int4_per_token_head: 32 x all-gather of outputs, 8.1 KiB each: 0.163 ms" in out
    assert "assumed for collectives: 5 us each, and 100 GB/s of data that a GPU receives" in out


def test_plan_notes_what_its_figures_leave_out(folder: Path) -> None:
    write_config(folder, GEMMA_2_9B)
    out, _ = run("plan --config . --kv-budget 74GiB --contexts 32k")
    assert "note: context 32k exceeds the 8192 tokens that the model supports" in out
    assert "21 x 8 KV heads, 256 + 256 channels, the last 4096 tokens" in out


def test_weights_that_leave_no_room_are_the_answer_no() -> None:
    out, err = run("plan --config config.json --memory 16GiB", code=1)
    assert out == ""
    assert "no room for a cache" in err
    assert err.endswith("give more --memory, smaller --weights or a smaller --reserve\n")


def test_a_plan_fits_the_width(folder: Path) -> None:
    write_config(folder, GEMMA_3_4B)
    contexts = ",".join(str(3**i) for i in range(1, 16))
    command = f"plan --config . --kv-budget 4000TB --contexts {contexts} --weights 9GB --bandwidth 1TB/s"
    out, _ = run(f"{command} --policies bf16,{folder / 'policy.yaml'},int4_per_token_head")
    assert max(map(len, out.splitlines())) <= WIDTH
    assert out.isascii()


# policy


def test_policy_show_prints_a_policy_that_reads_back_as_the_same() -> None:
    out, _ = run("policy show policy.yaml")
    assert Policy.from_text(out) == Policy.from_text(POLICY)
    assert Policy.from_text(run("policy show")[0]) == Policy.load("int8_per_token_head")


def test_policy_show_follows_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUANT_POLICY", "fp8_e4m3")
    assert Policy.from_text(run("policy show")[0]) == Policy.load("fp8_e4m3")


def test_policy_show_says_what_every_layer_of_a_model_gets() -> None:
    data = run_json("policy show policy.yaml --config config.json")
    assert [layer["key"] for layer in data["layers"][:6]] == ["bf16"] * 2 + ["fp8_e4m3"] * 3 + ["int8_per_token_head"]
    assert data["layers"][2] == {
        "module": "model.layers.2.self_attn",
        "layer": 2,
        "key": "fp8_e4m3",
        "value": "int4_per_token_head",
        "bytes_per_token": 8 * (132 + 68),
    }
    assert data["fingerprint"] == Policy.from_text(POLICY).fingerprint()
    out, _ = run("policy show policy.yaml --config config.json")
    assert ["model.layers.2.self_attn", "fp8_e4m3", "int4_per_token_head", "1600"] in cells(out)


def test_policy_validate_is_the_answer_no_for_a_policy_with_faults(folder: Path) -> None:
    (folder / "wrong.yaml").write_text("rules: [{match: {layer: 1}, dtype: int9}]\n")
    out, err = run("policy validate policy.yaml wrong.yaml", code=1)
    assert out == "policy.yaml: valid\n"
    assert [line.split(": ")[2:5] for line in err.splitlines()] == [
        ["wrong.yaml", "rule 1", "dtype"],
        ["wrong.yaml", "rule 1", "match"],
        ["wrong.yaml", "default", "is required"],
    ]
    right, wrong = run_json("policy validate policy.yaml wrong.yaml", code=1)
    assert right == {"file": "policy.yaml", "valid": True, "faults": [], "notes": []}
    assert wrong["valid"] is False
    assert len(wrong["faults"]) == 3


def test_policy_validate_finds_rules_that_decide_nothing_in_a_model(folder: Path) -> None:
    (folder / "idle.yaml").write_text("rules: [{match: {layers: 40}, dtype: auto}]\ndefault: {dtype: fp8_e4m3}\n")
    assert run("policy validate idle.yaml")[0] == "idle.yaml: valid\n"
    out, _ = run("policy validate idle.yaml --config config.json")
    assert "rule 1 (layers '40') matches no attention site" in " ".join(out.split())
    (folder / "idle.yaml").write_text((folder / "idle.yaml").read_text() + "strict: true\n")
    assert "matches no attention site" in run("policy validate idle.yaml --config config.json", code=1)[1]


def conforms(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """Whether ``value`` satisfies a JSON schema; supports the keywords of the policy's schema."""
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(conforms(value, option, root) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "null": type(None)}
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not isinstance(value, tuple(types[name] for name in names)):
        return False
    if isinstance(value, list):
        return all(conforms(item, schema["items"], root) for item in value)
    if isinstance(value, dict):
        fields = schema["properties"]
        required = set(schema.get("required", ()))
        known = required <= value.keys() <= fields.keys()
        return known and all(conforms(item, fields[name], root) for name, item in value.items())
    return True


INT8: dict[str, Any] = {"dtype": "int8_per_token_head"}


@pytest.mark.parametrize(
    "policy",
    [
        {"default": INT8},
        {"version": 1, "rules": [{"match": {"layers": 5}, **INT8}], "default": INT8, "on_unsupported": "error"},
        {"rules": [{"match": {"layers": [0, "-2:"], "module": "*"}, "dtype": "auto"}], "default": INT8},
        {"rules": [{"match": {"layers": "0-1"}, "key": INT8, "value": INT8}], "default": INT8, "strict": True},
        {},
        {"default": {"dtype": "int9"}},
        {"default": INT8, "strct": True},
        {"default": INT8, "version": 2},
        {"default": INT8, "on_unsupported": "raise"},
        {"rules": [{"match": {"layer": 5}, **INT8}], "default": INT8},
        {"rules": [INT8], "default": INT8},
        {"default": {"key": {"dtype": "auto"}, "value": INT8}},
    ],
)
def test_the_schema_accepts_the_policies_that_load_and_no_others(policy: dict[str, Any]) -> None:
    schema = json.loads(run("policy schema")[0])
    try:
        Policy.load(policy)
    except PolicyError:
        assert not conforms(policy, schema, schema)
    else:
        assert conforms(policy, schema, schema)


def test_the_schema_describes_every_field() -> None:
    schema = policy_schema()
    for part in [schema, *schema["$defs"].values()]:
        assert part["description"]
        assert "Attributes:" not in part["description"]
        for name, field in part["properties"].items():
            assert field.get("description"), f"describe {name} under Attributes: of {part['title']}'s docstring"
