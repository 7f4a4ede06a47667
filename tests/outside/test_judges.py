"""Every judge from outside accepts packed caches. These tests need checkouts of other projects (docs/coverage.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outside import sources
from outside.judges import CACHE_TESTS
from outside.reference_models import REFERENCES

pytestmark = [pytest.mark.outside, pytest.mark.timeout(7200)]

ROOT = Path(__file__).parents[2]
MODELS = ("llama", "gpt2", "qwen3", "gemma3", "mixtral")
"""Models of the tests of generation. In those tests T5 and Whisper have heads of 8 and 4 channels, which stay plain."""


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Path:
    found = sources.given(request.config.getoption("--outside-sources"))
    if (reason := sources.missing(found, request.param)) is not None:
        pytest.skip(reason)
    assert found is not None
    return found


def judged(folder: Path, tmp_path: Path, *options: str) -> None:
    """Run the command in a separate process, because projects have modules of the same names."""
    command = [
        sys.executable,
        "-m",
        "tests.outside",
        "--sources",
        str(folder),
        "--results",
        str(tmp_path / "outside.json"),
    ]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("folder", sorted({reference.source for reference in REFERENCES}), indirect=True)
def test_reference_models_give_the_same_tokens_and_logits(folder: Path, tmp_path: Path) -> None:
    judged(folder, tmp_path, "--only", "references")


@pytest.mark.parametrize("folder", sorted({judge.source for judge in CACHE_TESTS}), indirect=True)
def test_tests_of_caches_pass_on_packed_caches(folder: Path, tmp_path: Path) -> None:
    judged(folder, tmp_path, "--only", "caches")


@pytest.mark.parametrize("folder", ["transformers"], indirect=True)
@pytest.mark.parametrize("model", MODELS)
def test_tests_of_generation_pass_on_packed_caches(folder: Path, tmp_path: Path, model: str) -> None:
    judged(folder, tmp_path, "--only", "models", "--models", model)
