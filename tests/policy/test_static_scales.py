"""Static scales of 8-bit float caches, one for the keys and one for the values of a layer; and seeded rotations."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from documented_commands import commands
from safetensors.torch import save_file
from small_models import CONTEXT, MODULES, save, small_model, some_bytes
from tiny_llama import attention_llama, fresh_cache
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.errors import PolicyError
from kvcompile.kernels.formats import get_format
from kvcompile.packed.tensor import PackedTensor
from kvcompile.policy.policy import Policy

E4M3_LARGEST, E5M2_LARGEST = 448, 57344
LARGEST = {MODULES[0]: {"key": 44.8, "value": 4.48}, MODULES[1]: {"key": 4480.0, "value": 0.0}}


def policy(scales: object, dtype: str = "fp8_e4m3") -> Policy:
    return Policy.load({"default": {"dtype": dtype, "granularity": "per_tensor", "scales": scales}})


def calibration(path: Path, largest: dict[str, dict[str, float]]) -> str:
    path.write_text(json.dumps({"version": 1, "largest": largest}))
    return str(path)


def scale_of(format_name: str) -> float:
    return get_format(format_name).static_scale


def scales(policy: Policy, module: str, layer: int | None = None) -> tuple[float, float]:
    formats = policy.formats_for(module, layer, 2)
    assert formats is not None
    return scale_of(formats.key), scale_of(formats.value)


NUM_TOKENS = 75


def run(model: Any, cache: Any) -> torch.Tensor:
    """The logits of a prefill and a chunk."""
    ids = torch.randint(0, 97, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        steps = [model(input_ids=chunk, past_key_values=cache).logits for chunk in ids.split([70, 5], dim=1)]
    return torch.cat(steps, 1)


# The sources of scales


@pytest.mark.parametrize(("dtype", "largest_code"), [("fp8_e4m3", E4M3_LARGEST), ("fp8_e5m2", E5M2_LARGEST)])
def test_a_calibrated_scale_takes_the_largest_magnitude_to_the_largest_code(
    dtype: str, largest_code: int, tmp_path: Path
) -> None:
    calibrated = policy(calibration(tmp_path / "scales.json", LARGEST), dtype)
    assert scales(calibrated, MODULES[0], 0) == pytest.approx((44.8 / largest_code, 4.48 / largest_code), rel=1e-6)
    assert scales(calibrated, MODULES[1], 1) == pytest.approx((4480 / largest_code, 1.0), rel=1e-6)


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.qkv_proj.k_scale", "self_attn.qkv_proj.v_scale"),
        ("self_attn.kv_scale", "self_attn.v_scale"),
    ],
)
def test_the_scales_of_a_checkpoint_are_found_under_all_their_names(names: tuple[str, str], tmp_path: Path) -> None:
    items: list[tuple[str, torch.Tensor]] = [("model.layers.0.self_attn.k_proj.weight_scale", torch.ones(8))]
    for layer in (0, 1):
        for i, name in enumerate(names):
            items.append((f"model.layers.{layer}.{name}", torch.tensor([0.25 + layer + i])))
    for shard in (0, 1):
        save_file(dict(items[shard::2]), tmp_path / f"model-{shard}.safetensors")
    for layer in (0, 1):
        assert scales(policy(str(tmp_path)), MODULES[layer], layer) == (0.25 + layer, 1.25 + layer)


def test_one_old_scale_serves_keys_and_values(tmp_path: Path) -> None:
    save_file({"layers.0.attn.kv_scale": torch.tensor(0.5, dtype=torch.bfloat16)}, tmp_path / "s.safetensors")
    assert scales(policy(str(tmp_path / "s.safetensors")), "layers.0.attn", 0) == (0.5, 0.5)


def test_a_module_that_is_not_named_stands_for_its_layer(tmp_path: Path) -> None:
    calibrated = policy(calibration(tmp_path / "scales.json", LARGEST))
    assert scales(calibrated, "layers.1.attention", 1) == scales(calibrated, MODULES[1], 1)


def test_paths_in_a_policy_file_are_relative_to_it_and_stay_so_wherever_the_policy_goes(tmp_path: Path) -> None:
    calibration(tmp_path / "scales.json", LARGEST)
    (tmp_path / "policy.yaml").write_text("default: {dtype: fp8_e4m3, granularity: per_tensor, scales: scales.json}")
    loaded = Policy.load(tmp_path / "policy.yaml")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "policy.yaml").write_text(loaded.to_yaml())
    assert Policy.load(tmp_path / "elsewhere" / "policy.yaml") == loaded
    assert scales(loaded, MODULES[0], 0)[0] == pytest.approx(0.1)


def test_a_policy_keeps_the_scales_that_it_was_loaded_with(tmp_path: Path) -> None:
    before = policy(calibration(tmp_path / "scales.json", LARGEST))
    after = policy(calibration(tmp_path / "scales.json", {MODULES[0]: {"key": 1.0, "value": 1.0}}))
    assert scales(before, MODULES[0], 0)[0] == pytest.approx(0.1)
    assert before != after


# Faults of scales


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "scales.json cannot be read"),
        ("{", "scales.json"),
        ('{"version": 2, "largest": {}}', "scales.json is not a calibration: version: "),
        ('{"largest": {"m": {"key": -1}}}', "is not a calibration: largest.m.key: "),
        ('{"largest": {"m": {"keys": 1}}}', "`python -m kvcompile calibrate` writes one"),
    ],
)
def test_a_file_that_is_no_calibration_is_an_error_when_the_policy_is_loaded(
    content: str | None, message: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "scales.json").write_text(content)
    with pytest.raises(PolicyError) as caught:
        policy(str(tmp_path / "scales.json"))
    assert str(caught.value).startswith("policy: default: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"model.embed_tokens.weight": torch.ones(2)},
            "no tensors k_scale and v_scale; `python -m kvcompile calibrate`",
        ),
        (
            {"layers.0.attn.k_scale": torch.ones(4)},
            "layers.0.attn.k_scale has 4 elements of torch.float32; a static scale is one float",
        ),
    ],
)
def test_a_checkpoint_without_such_scales_is_an_error(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match="is a folder without safetensors files"):
        policy(str(tmp_path))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match=message):
        policy(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(PolicyError, match=r"model\.safetensors cannot be read"):
        policy(str(tmp_path))


def test_a_layer_without_a_scale_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    calibrated = policy(calibration(tmp_path / "scales.json", LARGEST))
    with pytest.raises(PolicyError, match=rf"no scales for model.layers.7.self_attn \(it has: {MODULES[0]}, "):
        calibrated.formats_for("model.layers.7.self_attn", 7, 8)
    both = {"decoder.layers.0.self_attn": {"key": 1.0}, "decoder.layers.0.cross_attn": {"key": 1.0}}
    ambiguous = policy(calibration(tmp_path / "scales.json", both))
    with pytest.raises(PolicyError, match="and several modules in layer 0"):
        ambiguous.formats_for("layers.0.self_attn", 0, 1)
    with pytest.raises(PolicyError, match=r"has no scale of the values of decoder\.layers\.0"):
        ambiguous.formats_for("decoder.layers.0.self_attn", 0, 1)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), 1e30])
def test_an_invalid_scale_is_an_error(scale: float, tmp_path: Path) -> None:
    save_file({f"layers.0.attn.{name}_scale": torch.tensor(scale) for name in "kv"}, tmp_path / "s.safetensors")
    with pytest.raises(PolicyError, match=r"keys of layers.0.attn: a static scale must be a number between"):
        policy(str(tmp_path / "s.safetensors")).formats_for("layers.0.attn", 0, 1)


@pytest.mark.parametrize("scales", [True, [1.0], {"float": 1.0}, 10**400])
def test_scales_that_are_neither_a_number_nor_a_path_are_one_fault_of_their_field(scales: object) -> None:
    with pytest.raises(PolicyError) as raised:
        policy(scales)
    (fault,) = raised.value.faults
    assert fault.startswith(
        "policy: default.scales: expected a number, or the path of a calibration or checkpoint, got"
    )


def test_the_scales_of_a_checkpoint_are_for_e4m3(tmp_path: Path) -> None:
    save_file({f"layers.0.attn.{name}_scale": torch.tensor(1.0) for name in "kv"}, tmp_path / "s.safetensors")
    with pytest.raises(PolicyError, match="has scales for fp8_e4m3, not for fp8_e5m2_unit"):
        policy(str(tmp_path / "s.safetensors"), "fp8_e5m2").formats_for("layers.0.attn", 0, 1)


# From a calibration to a compiled model


@pytest.mark.usefixtures("without_code_generation")
def test_calibrate_measures_what_attention_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = small_model()
    save(model, tmp_path)
    (tmp_path / "text.txt").write_bytes(some_bytes(34))
    pages = [command for command in commands("console") if command.startswith("python -m kvcompile calibrate ")]
    (example,) = [command for command in pages if "scales.json" in command]
    command = f"{example.partition('kvcompile ')[2]} --data text.txt --prefill 32 --windows 1"
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output
    found: Any = json.loads((tmp_path / "scales.json").read_text())["largest"]
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([list(some_bytes(34))[:32]]), use_cache=True).past_key_values
    for module, layer in zip(MODULES, cache.layers, strict=True):
        assert module in result.stdout
        expected = {"key": layer.keys.abs().max().item(), "value": layer.values.abs().max().item()}
        assert found[module] == pytest.approx(expected, rel=1e-5)
    result = CliRunner().invoke(app, shlex.split(command.replace("32", str(CONTEXT))))
    assert result.exit_code == 2
    assert f"the model reads at most {CONTEXT}" in result.output
    assert json.loads((tmp_path / "scales.json").read_text())["largest"] == found


@pytest.mark.usefixtures("without_code_generation")
def test_every_layer_of_a_compiled_model_has_its_own_scales(tmp_path: Path) -> None:
    model, plain, packed = attention_llama(), *(fresh_cache(attention_llama(), "static") for _ in range(2))
    expected = run(model, plain)
    halves = {"key": "keys", "value": "values"}
    largest = {
        module: {role: 0.9 * getattr(layer, name).abs().max().item() for role, name in halves.items()}
        for module, layer in zip(MODULES, plain.layers, strict=True)
    }
    static = policy(calibration(tmp_path / "scales.json", largest))
    logits = run(torch.compile(model, backend="kvquant", options={"policy": static, "on_unsupported": "error"}), packed)
    assert (logits - expected).norm() < 0.05 * expected.norm()
    for module, layer, exact in zip(MODULES, packed.layers, plain.layers, strict=True):
        for role, name in halves.items():
            tensor, bound = getattr(layer, name), largest[module][role]
            assert isinstance(tensor, PackedTensor)
            assert scale_of(tensor.format_name) == pytest.approx(bound / E4M3_LARGEST, rel=1e-6)
            if module == MODULES[0]:  # the error of the first layer reaches the later layers
                stored = getattr(exact, name)[:, :, :NUM_TOKENS].clamp(-bound, bound)  # saturated
                error = (tensor[:, :, :NUM_TOKENS] - stored).abs()  # 3 mantissa bits, or steps of 2**-9 times the scale
                assert (error <= 1.001 * (stored.abs() / 16 + bound / E4M3_LARGEST * 2**-10)).all()


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turboquant_2.5bit", "int4_per_token_head"),
        pytest.param("turboquant_2bit", "turboquant_4bit", marks=pytest.mark.slow),
        pytest.param("int4_per_token_head", "turboquant_3.5bit", marks=pytest.mark.slow),
        pytest.param("turboquant_4bit", "turboquant_3bit", marks=pytest.mark.slow),
    ],
)
def test_rotations_with_stored_seeds_serve_keys_and_values_of_a_compiled_model(key: str, value: str) -> None:
    model = attention_llama(num_layers=1)
    plain, packed = fresh_cache(model, "static"), fresh_cache(model, "static")
    formats = {"key": {"dtype": key, "rotation_seed": 7}, "value": {"dtype": value, "rotation_seed": 11}}
    options = {"policy": {"default": formats}, "on_unsupported": "error"}
    expected = run(model, plain)
    logits = run(torch.compile(model, backend="kvquant", options=options), packed)
    assert (logits - expected).norm() < 0.3 * expected.norm()
    for name, format_name in (("keys", f"{key}_seed7"), ("values", f"{value}_seed11")):
        tensor, exact = getattr(packed.layers[0], name), getattr(plain.layers[0], name)[:, :, :NUM_TOKENS]
        assert tensor.format_name == format_name
        fmt = get_format(format_name)
        error = tensor[:, :, :NUM_TOKENS] - fmt.decode(fmt.encode(exact))
        assert error.norm() < 1e-3 * exact.norm()
