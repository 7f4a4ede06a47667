"""Every example runs offline, prints the promised figures, and is listed in the README.

A slow test runs all examples as users do. The default run has the quick examples, without code generation. There
``verify`` compares each rewritten graph with its original.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.options import BackendOptions

FOLDER = Path(__file__).parents[2] / "examples"
SAME = r"100 % of the tokens are the same"
EXAMPLES = {
    "hugging_face_generate": [r"static index_put", r"growing cat", SAME],
    "hand_written_model": [
        r"1 rewritten, 0 refused",
        r"all layers: 524288 bytes in float32 -> 139264 bytes packed",
        SAME,
    ],
    "encoder_decoder": [
        r"2 rewritten, 0 refused, 0 skipped \(in 2 graphs\)",
        r"cross_attention_cache, all layers: 65544 bytes in float32 -> 17416 bytes packed",
        SAME,
    ],
    "per_layer_policy": [r"3 rewritten, 0 refused, 1 skipped", r"fp8_e4m3", r"int8_per_token_head /\s+\|[^\n]*\n"],
    "long_context_memory": [r"bf16 +0\.25 .* 16\.00", r"int4_per_token_head +0\.07 .* 4\.25"],
    "prompt_cache": [r"all layers: 458760 bytes in float32 -> 121864 bytes packed", r"same logits: True"],
}
"""The output of each example, as regular expressions. Other examples have separate test files."""

QUICK = ("hand_written_model", "long_context_memory", "prompt_cache")

GENERATING = [name for name, patterns in EXAMPLES.items() if SAME in patterns]
TESTED_ELSEWHERE = {"quickstart", "inspect_with_depyf", "chat", "package_step"}
PARTS = {"byte_lm", "tiny_models"}


def test_every_example_is_tested_and_in_the_readme() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py")} - PARTS
    assert programs == {*EXAMPLES, *TESTED_ELSEWHERE}
    readme = (FOLDER.parent / "README.md").read_text()
    assert programs == set(re.findall(r"`examples/(\w+)\.py`", readme))


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_no_program_passes_a_cache_under_a_name_that_transformers_deprecates(folder: str) -> None:
    for path in (FOLDER.parent / folder).glob("*.py"):
        assert not re.search(r"past_key_values=|\"past_key_values\":", path.read_text()), path.name


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("without_code_generation", "dumps_in_tmp_path")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in EXAMPLES]
)
def test_an_example_prints_what_it_promises_and_its_graphs_equal_their_originals(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = BackendOptions.parse
    monkeypatch.setattr(BackendOptions, "parse", lambda *args: replace(parse(*args), verify=True))
    few = ["--new-tokens", "8"] if name in GENERATING else []
    with kvcompile.collect_reports() as report:
        importlib.import_module(name).main(few)
    shown = capsys.readouterr().out
    for pattern in EXAMPLES[name]:
        assert re.search(pattern, shown), (pattern, shown)
    assert report.is_verified == (name != "long_context_memory"), "all examples but this one compile a model"


def test_the_memory_plot_is_written(tmp_path: Path) -> None:
    importlib.import_module("long_context_memory").main(["--plot", str(tmp_path / "memory.png")])
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_a_program(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(re.search(pattern, done.stdout) for pattern in EXAMPLES[name]), done.stdout
    assert not list(tmp_path.iterdir())
    torch._dynamo.reset()
