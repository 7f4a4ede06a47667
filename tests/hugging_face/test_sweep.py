"""The sweep behind docs/coverage.md runs ten architectures in one cheap case each; a failed case is still a row."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sweep
from sweep_case import MAX_ERROR, CaseResult, run_case
from sweep_models import ARCHITECTURES


@pytest.mark.parametrize(
    ("architecture", "attention", "cache"),
    [
        ("bloom", "eager", "dynamic"),
        ("cohere2", "sdpa", "static"),
        ("falcon", "sdpa", "static"),
        ("gemma2", "eager", "static"),
        ("gpt2", "sdpa", "static"),
        ("gpt_oss", "eager", "static"),
        ("mbart", "sdpa", "static"),
        ("mixtral", "eager", "static"),
        ("opt", "sdpa", "static"),
        ("t5", "eager", "static"),
    ],
)
def test_every_cached_layer_is_rewritten_and_computes_what_eager_code_does(
    architecture: str, attention: Any, cache: Any
) -> None:
    result = run_case(architecture, attention, cache, steps=(5, 1))
    assert (result.failure, result.skipped, result.refusals, result.notes) == (None, None, {}, [])
    assert result.rewritten == result.packed == result.cached >= 2
    assert result.error < MAX_ERROR


def test_a_process_that_dies_is_a_row_for_every_case_that_it_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(architecture: str, attention: str, cache: str) -> CaseResult:
        if attention == "eager":
            os._exit(7)
        return CaseResult(architecture, attention, cache, cached=2, full=2, packed=2, packed_full=2, rewritten=2)

    monkeypatch.setattr(sweep, "run_case", run)
    process = sweep.Run("llama", sweep.CASES, tmp_path)
    while not process.is_over():
        pass
    cases = process.results()
    assert [case.failure for case in cases] == [None, None, *["its process ended with 7"] * 4]
    assert not sweep.is_covered(cases)
    text = sweep.page({"llama": cases}, sweep.versions())
    assert "| `llama` | sdpa | 2 of 2 | 0e+00 | 2 of 2 | 0e+00 |" in text
    assert "| `llama` | eager | failed [1] |  | failed [1] |  |" in text
    assert "0 of 1 architectures (0 %) are covered" in text


def test_there_are_enough_architectures_for_the_sweep_to_mean_something() -> None:
    assert len(ARCHITECTURES) >= 40
    assert sum(architecture.is_encoder_decoder for architecture in ARCHITECTURES.values()) >= 8
