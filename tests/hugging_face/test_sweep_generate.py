"""``python docs/sweep.py --generate`` compares tokens of small models, and says who changes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep
import sweep_generate
from sweep_generate import Comparison, TokenResult, compare, summary

import kvcompile


@pytest.mark.parametrize("model_type", ["llama", "zaya", pytest.param("t5", marks=pytest.mark.slow)])
def test_packed_layers_leave_all_tokens_as_they_are(model_type: str) -> None:
    result = compare(model_type)
    assert result.packed == result.layers >= 2
    assert str(result) == f"{model_type}: same tokens; {result.packed} of {result.layers} layers packed"
    assert not result.is_problem


@pytest.mark.gpu
def test_on_a_gpu_compiled_and_recorded_steps_leave_all_tokens_as_they_are() -> None:
    assert str(compare("llama", "cuda")) == "llama: same tokens; 2 of 2 layers packed"


def test_tokens_that_a_static_cache_of_transformers_changes_too_are_no_problem() -> None:
    result = compare("moshi")  # its static cache changes what follows a prompt longer than its window
    assert result.different > 0
    assert ("as with a static cache of Transformers" in str(result), result.is_problem) == (True, False)


def test_tokens_that_only_kvcompile_changes_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_generate, "LOSSLESS", "int4")
    result = compare("llama")
    assert result.different > 0
    assert (result.as_static, result.is_problem) == (False, True)


def test_an_error_that_only_kvcompile_raises_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyError("indexed")

    monkeypatch.setattr(kvcompile, "compile", fail)
    result = compare("llama")
    assert (str(result), result.is_problem) == ("llama: fails: KeyError: 'indexed'", True)


@pytest.mark.parametrize(
    ("model_type", "reason"), [("minimax", "Transformers lets the model make"), ("mamba", "it is a state-space model")]
)
def test_a_type_whose_layers_stay_plain_has_a_reason(model_type: str, reason: str) -> None:
    result = compare(model_type)
    line = (
        f"generate() of this {type(sweep_generate._model(model_type)).__name__} runs without a packed cache: {reason}"
    )
    assert [each.startswith(line) for each in result.reasons] == [True]
    assert str(result).startswith(f"{model_type}: same tokens; nothing packed\n  {line}")


def test_a_type_that_does_not_generate_without_kvcompile_is_not_compared() -> None:
    result = compare("vibevoice_asr")
    assert str(result).startswith("vibevoice_asr: not compared: no small model: its sizes are fields of other names")
    assert not result.is_problem


def test_a_process_that_dies_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_generate, "compare", lambda *arguments: os._exit(7))
    process = Comparison("llama", tmp_path)
    while not process.is_over():
        pass
    assert str(process.result()) == "llama: fails: its process ended with 7"
    assert process.result().is_problem


@pytest.mark.parametrize("failure", [None, "KeyError: 'x'"])
def test_the_command_prints_every_type_and_fails_if_there_is_a_problem(
    failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def results(names: list[str], jobs: int, device: str) -> Iterator[TokenResult]:
        yield from (TokenResult(name, failure=failure, layers=2, packed=2) for name in names)

    monkeypatch.setattr(sweep_generate, "compare_all", results)
    with pytest.raises(SystemExit) as ended:
        sweep.main(["--generate", "--architectures", "llama,t5", "--folder", str(tmp_path)])
    assert ended.value.code == (failure is not None)
    text = "fails: KeyError: 'x'" if failure else "same tokens; 2 of 2 layers packed"
    assert capsys.readouterr().out.splitlines()[:2] == [f"llama: {text}", f"t5: {text}"]
    assert not list(tmp_path.iterdir())


def test_the_summary_counts_types() -> None:
    same = TokenResult("llama", layers=2, packed=2)
    plain = TokenResult("mamba")
    static = TokenResult("git", different=4, as_static=True)
    differs = TokenResult("gpt2", different=1)
    skipped = TokenResult("blt", skipped="no small model")
    assert summary([same, plain, static, differs, skipped]) == (
        "5 types, 4 of them compared; same tokens: 2 (1 with packed layers); tokens of a static cache of Transformers: "
        "1; other tokens or errors: 1"
    )
