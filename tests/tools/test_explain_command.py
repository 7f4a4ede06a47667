"""``python -m kvcompile explain`` and ``verify`` report on a model, from its folder or from a config alone."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from documented_commands import command_line
from packaging.version import Version
from small_models import MODULES, save, small_model
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.evaluation import explained_step, models
from kvcompile.passes.rewrite import caches
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report
from kvcompile.tables import WIDTH
from kvcompile.verification import dump

pytestmark = pytest.mark.usefixtures("without_code_generation", "dumps_in_tmp_path")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the folder of a model."""
    save(small_model(), tmp_path)
    (tmp_path / "auto.yaml").write_text("default: {dtype: auto}\n")
    (tmp_path / "policy.yaml").write_text("rules: [{match: {layers: 0}, dtype: auto}]\ndefault: {dtype: fp8_e4m3}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    return tmp_path


def run(command: str, code: int = 0) -> tuple[str, str]:
    """The output of a command on stdout and stderr. Dynamo forgets earlier sizes first, as in a separate process."""
    torch._dynamo.reset()
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def test_a_step_of_a_model_is_explained_site_by_site(folder: Path) -> None:
    out, err = run("explain --model . --policy policy.yaml --html report.html")
    assert err == ""
    assert max(map(len, out.splitlines())) <= WIDTH
    assert all(module in out for module in MODULES)
    assert "1 rewritten, 0 refused, 1 skipped" in out
    assert MODULES[1] in (folder / "report.html").read_text()


def test_a_config_alone_is_enough_and_refusals_are_the_answer_no(folder: Path) -> None:
    found = json.loads(run("explain --model config.json --layers 1 --cache growing --json")[0])
    (site,) = found["graphs"][0]["sites"]
    assert (site["module"], site["caches"][0]["kind"]) == (MODULES[0], "growing")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "head_dim": 24}))
    out, _ = run("explain --model config.json --layers 1 --tokens 5", code=1)
    assert "head_dim 24 is not a multiple of 16" in out


def test_few_layers_are_few_in_every_field_that_lists_them(folder: Path) -> None:
    config = transformers.Gemma2Config(
        num_hidden_layers=4, hidden_size=32, intermediate_size=32, vocab_size=64, head_dim=16, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    config.save_pretrained(folder)
    model = models.random_model(str(folder / "config.json"), 3, "cpu")
    assert (len(model.model.layers), model.config.layer_types) == (3, config.layer_types[:3])
    assert not models.has_weights(str(folder / "config.json"))
    assert models.has_weights(str(folder))


@pytest.mark.parametrize("cache", ["static", "growing"])
def test_a_step_of_a_model_is_verified(cache: str) -> None:
    out, _ = run(f"verify --model . --policy int4 --layers 1 --cache {cache}")
    assert "verified: 9 random steps give the same results as the original graph" in out
    assert "1 rewritten, 0 refused, 0 skipped" in out


def test_verify_says_no_if_nothing_is_rewritten_or_a_site_differs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "0 rewritten, 0 refused, 1 skipped" in run("verify --model . --layers 1 --policy auto.yaml", code=1)[0]
    monkeypatch.setattr(dump.tempfile, "tempdir", str(folder))
    insert = caches.insert_attention
    swapped = lambda graph, marker, k, v, key, value, *rest: insert(graph, marker, v, k, value, key, *rest)  # noqa: E731
    monkeypatch.setattr(caches, "insert_attention", swapped)
    found = json.loads(run("verify --model . --layers 1 --json", code=1)[0])
    assert found["graphs"][0]["sites"][0]["reason_code"] == "differs"


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_the_examples_of_the_help_and_of_the_pages_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Policy, bool]] = []

    def explain_step(model: Any, policy: Policy, *, verified: bool, **arguments: Any) -> Report:
        asked.append((len(model.model.layers), policy, verified))
        return Verified()

    monkeypatch.setattr(explained_step, "explain_step", explain_step)
    lines = run(f"{command} --help")[0].splitlines()
    examples = [line.partition("kvcompile ")[2] for line in lines if "    pyth" in line]
    pages = [one for one in command_line() if one.startswith(f"{command} ")]
    assert len(examples) > 2
    assert pages
    for example in (*examples, *pages):
        assert run(example)[0]
    assert [layers for layers, _, _ in asked] == [2, 2, 1, 2]
    assert asked[0][1] == Policy.load("policy.yaml")
    assert {verified for _, _, verified in asked} == {command == "verify"}


class Verified(Report):
    """A report without graphs in which nothing differs."""

    is_verified = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--model nowhere/config.json --layers 1", "No such file or directory: 'nowhere/config.json'"),
        ("--model /dev/zero", "--model /dev/zero: it is neither a folder nor a .json file"),
        ("--model config.json --layers 9", "--layers 9: the model has 2"),
        ("--model . --policy nix", "'nix' is neither a preset nor a file"),
        ("--model . --tokens 300", "--tokens 300, and 4 tokens before them, exceed --context 256"),
        ("--model . --html .", ".: Is a directory"),
        ("--model config.json --policy transform_2.2bit", "needs a calibration of the model"),
    ],
)
def test_mistakes_are_plain_lines(command: str, message: str) -> None:
    out, err = run(f"explain {command}", code=2)
    assert out == ""
    assert err.startswith("kvcompile: error: ")
    assert message in err


def test_a_number_of_layers_below_zero_is_a_plain_line(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "bad.json").write_text(json.dumps(config | {"num_hidden_layers": -2}))
    if Version(transformers.__version__) < Version("5.24"):
        pytest.skip("Transformers runs such a model, which has no layers")
    _, err = run("explain --model bad.json", code=2)
    assert "kvcompile: error: LlamaForCausalLM does not run with a static cache: " in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 1000,"),
        ({"hidden_size": 10**30}, ""),
        ({"num_attention_heads": 0}, ""),
        ({"model_type": "x" * 10**5}, "has model type `xxx"),
        ({"layer_types": 10**5 * ["full_attention"]}, "must be equal to the number of `layer_types`"),
        ({"vocab_size": 2**50}, ""),
    ],
)
def test_a_config_from_which_no_model_can_be_made_gets_one_short_line(
    change: dict[str, Any], message: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "bad.json").write_text(json.dumps(config | change))
    out, err = run("explain --model bad.json", code=2)
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("kvcompile: error: --model bad.json: ")
    assert message in line
    assert len(line) <= 300
