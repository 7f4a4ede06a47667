"""``kvquant(policy=...)`` is a backend with options, which are checked at once and may be given with a mode."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters

import kvcompile
from kvcompile import ConfiguredBackend, OptionsError, PackedTensor, PolicyError, collect_reports, kvquant
from kvcompile.kernels.layout.packed_layout import PackedLayout

LOSSLESS = {"default": {"dtype": "float32"}}


def step(keys: Tensor, entries: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    entries.index_copy_(2, position, x)
    return torch.nn.functional.scaled_dot_product_attention(x, keys, entries)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, entries, x = (torch.randn(2, 2, n, 64, generator=generator) for n in (70, 70, 1))
    return keys, entries, x, torch.tensor([int(torch.randint(70, (), generator=generator))])


def settings_of(backend: Any) -> dict[str, Any]:
    return backend.options.inductor_config


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (PolicyError, {"policy": "int9"}),
        (PolicyError, {"policy": {"default": {"dtype": "fp8_e4m3"}, "residual": 1}}),
        (OptionsError, {"polcy": "int4"}),
        (OptionsError, {"on_unsupported": "raise"}),
        (OptionsError, {"mode": "fast"}),
        (OptionsError, {"max_autotune": "yes"}),
        (OptionsError, {"options": {"xyzzy": 1}}),
    ],
)
def test_a_wrong_option_is_an_error_at_the_call(error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error) as caught:
        kvquant(**options)
    assert "\n" not in str(caught.value)


def test_a_positional_policy_is_an_error_that_asks_for_a_keyword() -> None:
    with pytest.raises(OptionsError, match=r"keywords only, such as kvquant\(policy='int4'\)"):
        kvquant("int4")  # type: ignore[call-overload]


def test_equal_options_make_equal_backends() -> None:
    one = kvquant(policy="int4", max_autotune=True)
    for other in (
        kvquant(options={"policy": "int4", "max-autotune": True}),
        kvquant(policy={"default": {"dtype": "int4"}}, max_autotune=True),
        copy.deepcopy(one),
    ):
        assert one == other
        assert hash(one) == hash(other)
    for other in (kvquant(policy="int4"), kvquant(policy="int8_per_token_head", max_autotune=True), "kvquant"):
        assert one != other


def test_its_repr_shows_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVQUANT_POLICY", raising=False)
    assert repr(kvquant(policy="int4", mode="reduce-overhead")) == "kvquant(policy='int4', mode='reduce-overhead')"
    dotted = {"triton.cudagraphs": True}
    assert repr(kvquant(options=dotted)) == "kvquant(options={'triton.cudagraphs': True}, policy='int8_per_token_head')"
    rules = {"rules": [{"match": {"layers": "0"}, "dtype": "auto"}], "default": {"dtype": "int4"}}
    assert repr(kvquant(policy=rules)).startswith("kvquant(policy='Policy ")


def test_without_options_it_equals_the_backend_of_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQUANT_POLICY", "fp8_e4m3")
    backend = kvquant()
    monkeypatch.delenv("KVQUANT_POLICY")  # the backend read it when it was made
    assert backend == kvquant(policy="fp8_e4m3")


def test_a_policy_file_is_read_when_the_backend_is_made(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("default: {dtype: int4}")
    backend = kvquant(policy=file)
    file.unlink()
    assert backend.with_mode("reduce-overhead").options.policy == kvcompile.Policy.load("int4")


def test_options_override_the_mode() -> None:
    backend = kvquant(policy="int4", options={"triton.cudagraphs": False}).with_mode("reduce-overhead")
    assert settings_of(backend) == {"triton.cudagraphs": False}
    assert settings_of(kvquant(mode="max-autotune").with_mode("reduce-overhead")) == settings_of(
        kvquant(mode="max-autotune")
    )


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of every graph that is compiled."""
    import kvcompile.compilation.graph_compiler

    seen: list[Any] = []

    class Compiler(kvcompile.compilation.graph_compiler.GraphCompiler):
        def __init__(self, gm: Any, example_inputs: Any, options: Any, generate_code: Any) -> None:
            seen.append(options)
            super().__init__(gm, example_inputs, options, generate_code)

    monkeypatch.setattr(kvcompile.compilation.graph_compiler, "GraphCompiler", Compiler)
    return seen


@pytest.mark.usefixtures("without_code_generation")
def test_mode_and_policy_go_together(parsed: list[Any]) -> None:
    with torch.no_grad():
        torch.compile(step, backend=kvquant(policy="fp8_e4m3"), mode="reduce-overhead")(*inputs())
    (options,) = parsed
    assert options.policy == kvcompile.Policy.load("fp8_e4m3")
    assert options.inductor_config == {"triton.cudagraphs": True}


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize("backend", [kvquant(on_unsupported="error"), kvquant], ids=["configured", "function"])
def test_a_plain_cache_is_adopted_without_an_entry_point(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.list_backends()  # finds entry points once in a process
    for table in ("_BACKENDS", "_COMPILER_FNS", "_BACKEND_TAGS"):  # the last exists since PyTorch 2.15
        known = getattr(registry, table, {})
        others = {name: value for name, value in known.items() if not name.startswith("kvquant")}
        monkeypatch.setattr(registry, table, others, raising=False)
    keys, entries, x, position = inputs()
    expected = step(keys.clone(), entries.clone(), x, position)
    compiled = torch.compile(step, backend=backend, options={"policy": LOSSLESS})
    with collect_reports() as report, torch.no_grad():
        torch.testing.assert_close(compiled(keys, entries, x, position), expected)
    assert isinstance(keys, PackedTensor)
    assert isinstance(entries, PackedTensor)
    assert report.notes == []


@pytest.mark.usefixtures("without_code_generation")
def test_equal_backends_share_what_was_compiled() -> None:
    counters.clear()
    for seed in range(3):
        compiled = torch.compile(step, backend=kvquant(policy=LOSSLESS))
        keys, entries, x, position = inputs(seed)
        keys = PackedTensor.from_dense(keys, PackedLayout("float32", "key", 64))
        entries = PackedTensor.from_dense(entries, PackedLayout("float32", "value", 64))
        with torch.no_grad():
            compiled(keys, entries, x, position)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["unimplemented"]


def test_the_options_of_torch_compile_override_its_own(parsed: list[Any], without_code_generation: None) -> None:
    backend = kvquant(policy="int4", max_autotune=True)
    with torch.no_grad():
        torch.compile(step, backend=backend, options={"policy": LOSSLESS})(*inputs())
    (options,) = parsed
    assert options.policy == kvcompile.Policy.load(LOSSLESS)
    assert options.inductor_config == {"max_autotune": True}


def test_a_compile_config_of_transformers_takes_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CompileConfig(backend=kvquant(policy="int4"), mode="reduce-overhead")
    arguments = config.to_dict()  # a deep copy
    assert isinstance(arguments["backend"], ConfiguredBackend)
    assert arguments["backend"] == config.backend
    assert config == transformers.CompileConfig(backend=kvquant(policy="int4"), mode="reduce-overhead")
