"""Policies with transforms: the file of a calibration gives every layer its calibrated formats."""

from __future__ import annotations

import json

import pytest
import torch
from calibrated_bases import ORIGIN, transforms_tensors, write_transforms
from safetensors.torch import load_file, save_file

from kvcompile.errors import PolicyError
from kvcompile.kernels.formats import bases, get_format
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import CALIBRATED_PRESETS, PRESETS, known_names
from kvcompile.policy.transforms import Transforms


@pytest.fixture
def path(tmp_path):
    return write_transforms(tmp_path / "transforms.safetensors")


def policy(path, dtype="transform_2.2bit"):
    return Policy.load({"default": {"dtype": dtype, "transforms": str(path)}})


@pytest.mark.parametrize("name", CALIBRATED_PRESETS)
def test_every_layer_has_its_own_basis(name, path):
    pairs = [policy(path, name).formats_for(f"model.layers.{i}.self_attn", i, 2) for i in (0, 1)]
    found = {get_format(fmt).basis for pair in pairs for fmt in (pair.key, pair.value)}
    assert len(found) == 4
    expected, plain = transforms_tensors(), CALIBRATED_PRESETS[name]
    for i, pair in enumerate(pairs):
        assert (pair.key.partition("@")[0], pair.value.partition("@")[0]) == (plain.key, plain.value)
        basis = bases.find(get_format(pair.key).basis)
        assert torch.equal(basis.mean, expected[f"model.layers.{i}.self_attn.key.mean"])


def test_the_list_of_names_has_the_formats_of_all_presets():
    names = known_names()
    assert len(names) == len(set(names))
    assert {name for pair in (PRESETS | CALIBRATED_PRESETS).values() for name in (pair.key, pair.value)} <= {*names}


def test_a_format_takes_the_columns_that_it_stores(path):
    pair = policy(path).formats_for("model.layers.1.self_attn", 1, 2)
    basis, expected = bases.find(get_format(pair.value).basis), transforms_tensors()
    assert torch.equal(basis.to_stored, expected["model.layers.1.self_attn.value.to_stored"][..., :16])
    assert torch.equal(basis.from_stored, expected["model.layers.1.self_attn.value.from_stored"][:, :16])


def test_modules_are_found_by_name_or_by_layer(path):
    by_name = policy(path).formats_for("model.layers.1.self_attn", 1, 2)
    assert policy(path).formats_for("layers.1.self_attn", 1, 2) == by_name


def test_keys_and_values_may_name_different_files(path):
    choice = {"key": {"dtype": "turboquant_3bit_mean", "transforms": str(path)}, "value": {"dtype": "int4_unrotated"}}
    pair = Policy.load({"default": choice}).formats_for("model.layers.0.self_attn", 0, 2)
    assert pair.key.startswith("turboquant_3bit_mean@")
    assert pair.value == "int4_unrotated"


def test_paths_are_relative_to_the_policy_file(path):
    file = path.parent / "policy.yaml"
    file.write_text("default: {dtype: transform_2.6bit, transforms: transforms.safetensors}\n")
    loaded = Policy.load(str(file))
    assert loaded.transforms[0].origin == ORIGIN
    assert Policy.from_text(loaded.to_yaml()).formats_for("model.layers.0.self_attn", 0, 2) == loaded.formats_for(
        "model.layers.0.self_attn", 0, 2
    )


def test_sizes_need_no_transforms():
    loaded = Policy.load("transform_2.2bit")
    assert (
        loaded.formats_for("model.layers.0.self_attn", 0, 2, sizes_only=True) == CALIBRATED_PRESETS["transform_2.2bit"]
    )
    with pytest.raises(PolicyError, match="transform_4321 needs a calibration of the model: give"):
        loaded.formats_for("model.layers.0.self_attn", 0, 2)


def damage(path, change):
    """Change the tensors of a file without its digests."""
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])["__metadata__"]
    changed = load_file(path)
    change(changed)
    save_file(changed, path, header)


def test_wrong_files_are_one_line_errors(path, tmp_path):
    def error(spec):
        with pytest.raises(PolicyError) as raised:
            Policy.load({"default": {"dtype": "transform_2.2bit", "transforms": str(spec)}})
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "cannot be read" in error(tmp_path / "missing.safetensors")
    (tmp_path / "text.safetensors").write_text("no tensors")
    assert "cannot be read" in error(tmp_path / "text.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "holds no transforms" in error(tmp_path / "other.safetensors")
    Transforms("", ORIGIN, {"a.key.mean": torch.zeros(2, 32)}).save(tmp_path / "part.safetensors")
    assert "is not valid" in error(tmp_path / "part.safetensors")
    Transforms("", ORIGIN, {"a.key.size": torch.zeros(2, 32)}).save(tmp_path / "unknown.safetensors")
    assert "is unknown" in error(tmp_path / "unknown.safetensors")
    bad = {**transforms_tensors(), "model.layers.0.self_attn.key.mean": torch.full((2, 32), torch.nan)}
    Transforms("", ORIGIN, bad).save(tmp_path / "nan.safetensors")
    assert "must be float32 and finite" in error(tmp_path / "nan.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert "cannot be read" in error(path)
    path.write_bytes(whole[:-100] + bytes(100))
    assert "is damaged" in error(path)
    path.write_bytes(whole)
    damage(path, lambda found: found.update({"model.layers.0.self_attn.key.mean": torch.zeros(2, 32)}))
    assert "is damaged" in error(path)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [("auto", "leaves the whole cache unpacked"), ("int8_per_token_head", "neither .* nor .* uses transforms")],
)
def test_transforms_that_no_format_uses_are_an_error(path, dtype, message):
    with pytest.raises(PolicyError, match=f"{message}.*; drop transforms"):
        policy(path, dtype)


def test_a_layer_without_transforms_is_an_error(path):
    with pytest.raises(PolicyError, match=r"lacks the keys of model\.layers\.7"):
        policy(path).formats_for("model.layers.7.self_attn", 7, 8)


def test_transforms_of_another_model_are_an_error(path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(PolicyError, match=r"was calibrated on another model \(tiny\)"):
        policy(path).transforms[0].check_model(model)
