"""The sweep behind docs/coverage.md runs ten architectures in one cheap case each; a failed case is still a row."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sweep
import torch
import transformers
from sweep_case import MAX_ERROR, CaseResult, left_alone, run_case
from sweep_library import MAX_PARAMETERS, NotBuiltError, architecture_of, model_types
from sweep_models import ARCHITECTURES

from kvcompile.passes.site import Site


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("architecture", "attention", "cache"),
    [
        pytest.param("bloom", "eager", "dynamic", marks=pytest.mark.slow),
        ("cohere2", "sdpa", "static"),
        ("gpt_oss", "eager", "static"),
        ("t5", "eager", "static"),
        pytest.param("falcon", "sdpa", "static", marks=pytest.mark.slow),
        pytest.param("gemma2", "eager", "static", marks=pytest.mark.slow),
        pytest.param("gpt2", "sdpa", "static", marks=pytest.mark.slow),
        pytest.param("mbart", "sdpa", "static", marks=pytest.mark.slow),
        pytest.param("mixtral", "eager", "static", marks=pytest.mark.slow),
        pytest.param("opt", "sdpa", "static", marks=pytest.mark.slow),
    ],
)
def test_every_cached_layer_is_rewritten_and_equals_eager_code(
    architecture: str, attention: Any, cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores and attention are operators in the graphs, as on a GPU."""
    monkeypatch.setattr("kvcompile.passes.rewrite.insert._uses_kernels", lambda data: True)
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
    assert "0 of the 1 (0 %) are covered" in text


def test_the_library_says_which_types_there_are_and_most_get_a_small_model_by_one_rule() -> None:
    types = model_types()
    assert set(ARCHITECTURES) <= set(types)
    assert len(types) > 150
    architecture = architecture_of("phimoe")  # not in the table
    model = architecture.build("phimoe", "sdpa")
    assert sum(weight.numel() for weight in model.parameters()) < MAX_PARAMETERS
    assert model.config.num_hidden_layers == 2
    with pytest.raises(NotBuiltError, match="parts for images and sound"):
        architecture_of("vibevoice_asr")


def test_types_without_a_small_model_or_without_a_cache_are_listed_apart() -> None:
    cases = {
        "llama": [
            CaseResult("llama", "sdpa", cache, cached=2, full=2, packed=2, packed_full=2, rewritten=2)
            for cache in ("static", "dynamic")
        ],
        "mamba": [CaseResult("mamba", "sdpa", "static")],
        "git": [CaseResult("git", "sdpa", "static", skipped=f"{sweep.NOT_BUILT}large")],
    }
    text = sweep.page(cases, sweep.versions())
    assert "Transformers has 3 types of models that generate text. 2 of them have a small model here, and 1" in text
    assert "1 of the 1 (100 %) are covered" in text
    assert "in a cache of Transformers: `mamba`." in text
    assert text.endswith("such as `gemma3_text`): `git`.\n")


def test_the_page_says_which_types_ran_on_which_release_and_which_did_not_run() -> None:
    cases = {
        name: [CaseResult(name, "sdpa", cache, cached=2, full=2, packed=2, packed_full=2, rewritten=2,
                          transformers=release) for cache in ("static", "dynamic")]
        for name, release in (("llama", "5.23.0"), ("gpt2", "5.24.0"), ("opt", "5.24.0"))
    }  # fmt: skip
    text = sweep.page(cases, sweep.versions(), ["gemma3"])
    assert "1 of these models ran on Transformers 5.23.0.\n2 of these models ran on Transformers 5.24.0." in text
    assert text.endswith("Not run yet (`python docs/sweep.py --missing`): `gemma3`.\n")


def test_a_type_without_a_case_that_runs_is_not_called_covered() -> None:
    skipped = CaseResult("mamba", "sdpa", "static", skipped="it does not run")
    packed = CaseResult("llama", "sdpa", "static", cached=2, full=2, packed=2, packed_full=2, rewritten=2)
    refused = replace(packed, packed=0, packed_full=0, rewritten=0)
    not_built = replace(skipped, skipped=f"{sweep.NOT_BUILT}large")
    outcomes = [sweep.outcome([case]) for case in (skipped, packed, refused, not_built)]
    assert outcomes == ["no cached layer", "covered", "not covered", "no small model"]


def test_missing_cases_have_no_result_or_are_eager_cases_of_a_type_without_sdpa() -> None:
    assert sweep.cases_of("llama") == sweep.CASES
    assert sweep.cases_of("phimoe") == sweep.SDPA
    known = [CaseResult("phimoe", "sdpa", "static", cached=2)]
    assert sweep.cases_of("phimoe", known) == [("sdpa", "dynamic")]
    skipped = [CaseResult("xlnet", *case, skipped=sweep.NO_ATTENTION.format("sdpa")) for case in sweep.SDPA]
    assert sweep.cases_of("xlnet", skipped) == sweep.EAGER
    assert sweep.cases_of("xlnet", [*skipped, CaseResult("xlnet", *sweep.EAGER[0])]) == [sweep.EAGER[1]]
    assert sweep.cases_of("llama", [CaseResult("llama", *case) for case in sweep.CASES]) == []


@pytest.mark.parametrize("model_type", ["bamba", "dbrx", "dots3_note_text", "qwen4_exp_text", "zamba2"])
def test_chosen_fields_give_these_types_a_small_model_with_attention(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"Transformers {transformers.__version__} lacks it")
    with torch.device("meta"):
        model = architecture_of(model_type).make(model_type, None)
    assert sum(weight.numel() for weight in model.parameters()) < MAX_PARAMETERS
    assert any("attn" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("model_type", ["gemma3", "voxtral", "recurrent_gemma", "zaya"])
def test_the_rule_reaches_parts_for_images_and_sound_and_computed_fields(model_type: str) -> None:
    architecture = architecture_of(model_type)
    with torch.device("meta"):
        model = architecture.make(model_type, None)
    assert sum(weight.numel() for weight in model.parameters()) < MAX_PARAMETERS
    assert model.config.get_text_config(decoder=True).hidden_size == 64


def test_there_are_enough_architectures_for_the_sweep_to_mean_something() -> None:
    assert len(ARCHITECTURES) >= 40
    assert sum(architecture.is_encoder_decoder for architecture in ARCHITECTURES.values()) >= 8


def test_a_layer_is_skipped_only_if_no_attention_in_it_is_rewritten() -> None:
    """A layer may have attention without a cache beside its attention on the cache, as in Inkling 2."""
    sites = [
        Site("layers.0.self_attn", 0, "eager"),
        Site("layers.0.mlp_input", 0, "eager", reason="not cached"),
        Site("layers.1.self_attn", 1, "eager", reason="joined"),
        Site("final_input", None, "eager", reason="not cached"),
    ]
    assert left_alone(sites) == {(0, 1)}
