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
from node_by_node import running_node_by_node
from small_models import give_outlier_keys

from kvcompile.evaluation.calibrate import Calibration
from kvcompile.evaluation.measure import evaluate
from kvcompile.evaluation.models import load_model
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import HELD_OUT, Text, read_text
from kvcompile.evaluation.transforms import calibrate_transforms
from kvcompile.files import digests
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import CALIBRATED_PRESETS, PRESETS, preset_names
from kvcompile.policy.transforms import Origin, Transforms

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
    model = load_model(str(load_or_train(Recipe(seconds=15, batch_size=2), training, lambda done, loss: None)), "cpu")
    data = tmp_path_factory.mktemp("text") / HELD_OUT
    data.write_bytes(bytes(held_out.tolist()))
    return Subject(model, read_text(model, "", data, Schedule(320, 64, 8), 24))


def test_every_preset_has_a_limit_or_a_rival() -> None:
    assert set(LIMITS) <= set(preset_names()) <= {*LIMITS, *OURS}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("preset", LIMITS)
def test_bits_per_byte_grow_no_more_than_the_preset_promises(preset: str, subject: Subject) -> None:
    (result,) = evaluate(subject.model, subject.text, [preset]).results
    assert result.packed_layers == result.num_layers > 0
    # 8-bit floats are close to their limit, so an excess within the sampling error is no failure.
    assert result.change - result.change_error <= LIMITS[preset]
    assert result.mean_divergence > 0, "it was quantized"
    if subject.model.config.head_dim == 128 and preset in BITS:
        assert result.effective_bits == BITS[preset]


needs_byte_lm = pytest.mark.skipif(byte_lm() is None, reason="needs byte-lm-24m, for which the pair is chosen")


# Every preset of our own against TurboQuant's

TURBOQUANT = ("turboquant_3bit_nc", "turboquant_k3v4_nc", "turboquant_4bit_nc", "turboquant_k8v4")
"""TurboQuant's presets in vLLM, smallest first."""

NAMED_AFTER_VLLM = {*TURBOQUANT, "int8_per_token_head", "fp8_e4m3", "int4_per_token_head"}

OURS = [name for name in (*preset_names(), *CALIBRATED_PRESETS) if name not in NAMED_AFTER_VLLM]

READING = Schedule(1792, 512, 64)
"""Steps of whole blocks: recent tokens are exact as in steps of one token."""


def bits_of(preset: str, head_dim: int = 128) -> float:
    """Bits per element of a cache in bfloat16 that holds READING, with exact tokens."""
    pair, tokens = (PRESETS | CALIBRATED_PRESETS)[preset], READING.num_tokens
    layouts = [pair.layout(role, head_dim, torch.bfloat16) for role in ("key", "value")]
    exact = [layout.residual.num_entries if layout.residual is not None else 0 for layout in layouts]
    nbytes = sum(layout.bytes_per_token for layout in layouts) + 2 * head_dim * sum(exact) * BLOCK_TOKENS / tokens
    return 8 * nbytes / (2 * head_dim)


def rival_of(preset: str) -> str:
    """The smallest of TurboQuant's presets that takes at least as many bytes."""
    return next(name for name in TURBOQUANT if bits_of(name) >= bits_of(preset))


def test_each_size_up_to_6_bits_has_a_preset_of_our_own() -> None:
    assert [bits_of(name) for name in TURBOQUANT] == [3.1875, 3.6875, 4.1875, 6.125]
    sizes = sorted(map(bits_of, OURS))
    assert sizes[0] < 2.2
    assert all(any(size - 0.55 < found <= size for found in sizes) for size in (2.6, 3.2, 4.2, 5, 6.125))
    assert {rival_of(name) for name in OURS} == set(TURBOQUANT)


@pytest.fixture(scope="module")
def divergences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The divergence of the predictions after the prefill, by preset.

    Calibrated presets are calibrated on the second half of the text. All presets are measured on the first half.
    """
    folder, source = byte_lm(), tmp_path_factory.mktemp("halves")
    assert folder is not None
    model, data = load_model(str(folder), "cpu"), (folder / HELD_OUT).read_bytes()
    (source / "first").write_bytes(data[: len(data) // 2])
    (source / "second").write_bytes(data[len(data) // 2 :])
    transforms = source / "transforms.safetensors"
    calibration = read_text(model, "", source / "second", Schedule(2048, 1), 8)
    tensors, *positions = calibrate_transforms(model, calibration.windows[:, :-2], context=READING.num_tokens)
    origin = Origin(
        model="", fingerprint=digests.of_model(model), text="", text_digest="", windows=8, tokens=2048,
        positions=tuple(positions),
    )  # fmt: skip
    Transforms(str(transforms), origin, tensors).save(transforms)
    policies = [
        Policy.load({"default": {"dtype": name} | ({"transforms": str(transforms)} if name not in PRESETS else {})})
        for name in (*TURBOQUANT, *OURS)
    ]
    with running_node_by_node(operators=True):
        results = evaluate(model, read_text(model, "", source / "first", READING, 4), policies).results
    assert all(result.packed_layers == result.num_layers for result in results)
    return {name: result.decode_divergence for name, result in zip((*TURBOQUANT, *OURS), results, strict=True)}


@pytest.mark.outside  # measures every preset, which takes half an hour
@pytest.mark.timeout(3600)
@needs_byte_lm
@pytest.mark.parametrize("preset", OURS)
def test_a_preset_of_our_own_beats_turboquant_of_equal_or_more_bytes(
    preset: str, divergences: dict[str, float]
) -> None:
    assert 0 < divergences[preset] < divergences[rival_of(preset)]


# Outlier keys


def with_outlier_keys(model: Any) -> Any:
    """A model with the same outputs, in which one pair of key channels in every layer is 16 times larger."""
    return give_outlier_keys(copy.deepcopy(model), 16, OUTLIER_PAIR, tuple(range(model.config.num_hidden_layers)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_byte_lm
def test_scales_per_channel_keep_their_quality_where_keys_have_outlier_channels(subject: Subject) -> None:
    (result,) = evaluate(with_outlier_keys(subject.model), subject.text, ["int4"]).results
    assert result.change - result.change_error <= 0.005


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_byte_lm
def test_the_guard_fires_on_outlier_keys_and_not_on_the_unchanged_model(subject: Subject) -> None:
    names = (name for name in preset_names() if name not in OURS)
    per_token = {name: Policy.load(name) for name in names if name.startswith(("int8", "int4_per_token", "tur"))}
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
