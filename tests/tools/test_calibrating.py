"""The calibration of transforms: its moments, its bases, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_llama import tiny_llama
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.text_distance import text_distance
from kvcompile.evaluation.transforms import balanced_basis, calibrate_transforms
from kvcompile.policy.transforms import Origin, Transforms


def moments(seed: int) -> torch.Tensor:
    x = torch.randn(3, 200, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-0.5, 1, 64)
    return x.mT @ x / 200


def test_bases_order_channels_by_importance_and_scale_quarters_to_one() -> None:
    covariance, weights = moments(0), moments(1)
    to_stored, from_stored = balanced_basis(covariance, weights)
    torch.testing.assert_close(to_stored @ from_stored, torch.eye(64, dtype=torch.float64).expand(3, -1, -1))
    stored = to_stored.mT @ covariance @ to_stored
    quarters = stored.diagonal(dim1=-2, dim2=-1).unflatten(-1, (4, 16)).mean(-1)
    torch.testing.assert_close(quarters, torch.ones_like(quarters), rtol=0.05, atol=0)
    costs = (from_stored @ weights @ from_stored.mT).diagonal(dim1=-2, dim2=-1).unflatten(-1, (4, 16)).mean(-1)
    assert (costs.diff() < 0).all()


def test_channels_of_different_quarters_are_uncorrelated() -> None:
    covariance = moments(2)
    to_stored, _ = balanced_basis(covariance, moments(3))
    stored = to_stored.mT @ covariance @ to_stored
    for first in range(4):
        for second in range(first):
            block = stored[:, 16 * first : 16 * first + 16, 16 * second : 16 * second + 16]
            assert block.abs().max() < 0.02


@pytest.fixture(scope="module")
def calibrated() -> tuple[object, torch.Tensor, dict[str, torch.Tensor]]:
    model = tiny_llama()
    windows = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))
    tensors, least, largest = calibrate_transforms(model, windows, context=100)
    assert least >= 0
    assert largest < 100
    return model, windows, tensors


def test_a_calibration_has_three_tensors_for_keys_and_values_of_every_layer(calibrated) -> None:
    model, _, tensors = calibrated
    assert len(tensors) == 2 * 2 * 3
    assert tensors["model.layers.1.self_attn.value.to_stored"].shape == (2, 64, 64)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_another_text_is_farther_from_the_calibration_than_its_own_text(calibrated) -> None:
    model, windows, tensors = calibrated
    origin = Origin(model="", fingerprint="", text="a", text_digest="", windows=3, tokens=40, positions=(0, 99))
    transforms = Transforms("t", origin, tensors)
    near, far = (text_distance(model, tokens, transforms) for tokens in (windows[0], torch.full((40,), 5)))
    assert far.usual > near.usual >= 1
    assert "calibrated on a" in str(near)


def test_windows_must_fit_the_context(calibrated) -> None:
    model, windows, _ = calibrated
    with pytest.raises(EvaluationError, match="--prefill 40 exceeds --positions 30"):
        calibrate_transforms(model, windows, context=30)


def test_repeated_heads_count_once() -> None:
    key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    arguments = {"mask": None, "sinks": None, "is_causal": True, "scale": None, "softcap": 0.0, "dropout_p": 0.0}
    query = torch.randn(1, 4, 5, 8)
    repeated = [x.repeat_interleave(2, 1) for x in (key, value)]
    call = AttentionCall(query, query, *repeated, unsupported=None, **arguments)
    assert call.repeats == 2
    assert torch.equal(call.of_kv_heads("value"), value)
    assert AttentionCall(query, query, key, value, unsupported=None, **arguments).repeats == 1


def test_the_command_writes_transforms_and_their_origin(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=256)
    model.save_pretrained(tmp_path)
    (tmp_path / "val.bin").write_bytes(bytes(range(256)) * 4)
    output = tmp_path / "transforms.safetensors"
    arguments = ["calibrate", "--model", str(tmp_path), "--output", str(output), "--prefill", "32", "--windows", "2"]
    result = CliRunner().invoke(app, [*arguments, "--positions", "64", "--json"])
    assert result.exit_code == 0, result.output
    origin = Transforms.read(output).origin
    assert (origin.text, origin.windows, origin.tokens) == ("val.bin", 2, 32)
    assert 0 <= origin.positions[0] <= origin.positions[1] < 64
    assert json.loads(result.stdout[result.stdout.index("{") :])["fingerprint"] == origin.fingerprint
    Transforms.read(output).check_model(model)
