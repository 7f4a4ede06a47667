"""``kvcompile.compile`` compiles a module in place, returns a new function, and reports wrong options at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile import OptionsError, PackedTensor, PolicyError, collect_reports

pytestmark = pytest.mark.usefixtures("without_code_generation")

LOSSLESS = {"default": {"dtype": "float32"}}


def step(keys: Tensor, entries: Tensor, x: Tensor, position: Tensor) -> Tensor:
    keys.index_copy_(2, position, x)
    entries.index_copy_(2, position, x)
    return torch.nn.functional.scaled_dot_product_attention(x, keys, entries)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 2, 70, 64))
        self.register_buffer("entries", torch.zeros(2, 2, 70, 64))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return step(self.keys, self.entries, x, position)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, 1, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([5])


@pytest.mark.parametrize("model", [step, Step()], ids=["function", "module"])
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (PolicyError, {"policy": "int9"}),
        (OptionsError, {"polcy": "int4"}),
        (OptionsError, {"on_unsupported": "raise"}),
        (OptionsError, {"mode": "fast"}),
        (OptionsError, {"max_autotune": "yes"}),
    ],
)
def test_a_wrong_option_is_an_error_at_once(model: Any, error: type[Exception], options: dict[str, Any]) -> None:
    with pytest.raises(error):
        kvcompile.compile(model, **options)


def test_a_module_is_compiled_in_place_until_that_is_undone() -> None:
    model, plain = Step(), Step()
    assert kvcompile.compile(model, policy=LOSSLESS, on_unsupported="error") is model
    with collect_reports() as report, torch.no_grad():
        torch.testing.assert_close(model(*inputs()), plain(*inputs()))
        assert report.totals.rewritten == 1
        assert isinstance(model.keys, PackedTensor)
        kvcompile.uncompile(model)
        torch.testing.assert_close(model(*inputs()), plain(*inputs()))
    assert len(report.graphs) == 1


@pytest.mark.parametrize("model", [None, step])
def test_only_the_compilation_of_a_module_can_be_undone(model: Any) -> None:
    with pytest.raises(OptionsError, match=r"^uncompile: expected a module, got "):
        kvcompile.uncompile(model)


@pytest.mark.parametrize(
    "use",
    [
        lambda model: kvcompile.compile(model, policy="int4"),
        kvcompile.compile(policy="int4"),
        kvcompile.uncompile,
        lambda model: kvcompile.explain(model, *inputs()),
        lambda model: kvcompile.verify(model, *inputs()),
        lambda model: kvcompile.package(model, inputs(), path="step.pt2"),
    ],
    ids=["compile", "decorator", "uncompile", "explain", "verify", "package"],
)
def test_a_class_in_place_of_a_model_is_an_error_and_stays_unchanged(use: Any) -> None:
    before = dict(vars(Step))
    with pytest.raises(OptionsError, match=r"^\w+: expected a model, got the class Step; make the model first$"):
        use(Step)
    assert dict(vars(Step)) == before


@pytest.mark.parametrize("as_decorator", [False, True])
def test_a_function_is_left_unchanged_and_its_compiled_form_returned(as_decorator: bool) -> None:
    options: dict[str, Any] = {"policy": LOSSLESS, "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    compiled = kvcompile.compile(**options)(step) if as_decorator else kvcompile.compile(step, **options)
    keys, entries = torch.zeros(2, 2, 70, 64), torch.zeros(2, 2, 70, 64)
    with torch.no_grad():
        expected = step(keys.clone(), entries.clone(), *inputs())
        torch.testing.assert_close(compiled(keys, entries, *inputs()), expected)
    assert isinstance(keys, PackedTensor)
