"""Presets cost no more quality than they promise, on a real model through the compiled path.

The model is byte-lm-24m if the environment variable ``KVCOMPILE_BYTE_LM`` names its folder, or if ``../shared/models``
beside the repository holds it. Otherwise it is the quickstart's model, trained for a minute.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_lm import Recipe, load_or_train, read_corpus
from small_models import give_outlier_keys

from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.measure import evaluate
from kvcompile.evaluation.models import load_model
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import HELD_OUT, Text, read_text
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import preset_names

LIMITS = {
    "int8_per_token_head": 0.0005,
    "fp8_e4m3": 0.0005,
    "int4": 0.0025,
    "int4_per_token_head": 0.0060,
    "turboquant_k8v4": 0.0025,
    "turboquant_4bit_nc": 0.0045,
    "turboquant_k3v4_nc": 0.0140,
    "turboquant_3bit_nc": 0.0170,
}
"""The largest allowed relative increase of bits per byte."""

BITS = {  # per element, at head_dim 128
    "int8_per_token_head": 8.25,
    "fp8_e4m3": 8.25,
    "int4_per_token_head": 4.25,
    "turboquant_k8v4": 6.125,
    "turboquant_4bit_nc": 4.1875,
    "turboquant_k3v4_nc": 3.6875,
    "turboquant_3bit_nc": 3.1875,
}
OUTLIER_PAIR = 40
"""The index of a RoPE pair of channels whose keys are not among the smallest."""


@dataclass(frozen=True)
class Subject:
    """A model and the text for its evaluation."""

    model: Any
    text: Text


def byte_lm() -> Path | None:
    """The folder of byte-lm-24m, if it exists."""
    shared = Path(__file__).parents[3] / "shared" / "models" / "byte-lm-24m"
    folder = Path(os.environ.get("KVCOMPILE_BYTE_LM", shared))
    return folder if (folder / "config.json").exists() else None


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = byte_lm()
    if folder is not None:
        model = load_model(str(folder), "cpu")
        return Subject(model, read_text(model, str(folder), None, Schedule(2048, 256, 8), 4))
    training, held_out = read_corpus()
    model = load_model(str(load_or_train(Recipe(), training, lambda done, loss: None)), "cpu")
    data = tmp_path_factory.mktemp("text") / HELD_OUT
    data.write_bytes(bytes(held_out.tolist()))
    return Subject(model, read_text(model, "", data, Schedule(320, 64, 8), 24))


def test_every_preset_has_a_limit() -> None:
    assert set(preset_names()) <= set(LIMITS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", preset_names())
def test_bits_per_byte_grow_no_more_than_the_preset_promises(preset: str, subject: Subject) -> None:
    (result,) = evaluate(subject.model, subject.text, [preset]).results
    assert result.packed_layers == result.num_layers > 0
    # 8-bit floats are close to their limit, so an excess within the sampling error is no failure.
    assert result.change - result.change_error <= LIMITS[preset]
    assert result.mean_divergence > 0, "it was quantized"
    if subject.model.config.head_dim == 128 and preset in BITS:
        assert result.effective_bits == BITS[preset]


def with_outlier_keys(model: Any) -> Any:
    """A model with the same outputs, in which one pair of key channels in every layer is 16 times larger."""
    return give_outlier_keys(copy.deepcopy(model), 16, OUTLIER_PAIR, tuple(range(model.config.num_hidden_layers)))


needs_byte_lm = pytest.mark.skipif(byte_lm() is None, reason="needs byte-lm-24m, for which the pair is chosen")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_byte_lm
def test_scales_per_channel_keep_their_quality_where_keys_have_outlier_channels(subject: Subject) -> None:
    (result,) = evaluate(with_outlier_keys(subject.model), subject.text, ["int4"]).results
    assert result.change - result.change_error <= 0.005


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_byte_lm
def test_the_guard_fires_on_outlier_keys_and_not_on_the_model_as_it_was_trained(subject: Subject) -> None:
    per_token = {
        name: Policy.load(name) for name in preset_names() if name.startswith(("int8", "int4_per_token", "tur"))
    }
    del per_token["turboquant_k8v4"]  # its keys are floats
    robust = [Policy.load("fp8_e4m3"), Policy.load("int4")]
    policies = [*per_token.values(), *robust]
    rescaled = with_outlier_keys(subject.model)
    tokens = subject.text.windows[0]
    with torch.no_grad():
        logits, expected = (model(input_ids=tokens[None, :64]).logits for model in (rescaled, subject.model))
    torch.testing.assert_close(logits, expected)
    calm, alarmed = (Calibration(model, tokens, policies) for model in (subject.model, rescaled))
    assert not any(calm.outliers(policy) for policy in policies)
    assert {name for name, policy in per_token.items() if alarmed.outliers(policy)} == set(per_token)
    assert not any(alarmed.outliers(policy) for policy in robust)
