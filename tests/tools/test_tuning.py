"""``kvcompile.tune`` makes the best choice that fits, predicts it closely, and writes a file that reproduces it."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documented_commands import command_line
from small_models import CONTEXT, HEAD_DIM, MODULES, save, small_model, some_bytes
from typer.testing import CliRunner

import kvcompile
from kvcompile.cli.app import app
from kvcompile.cli.output import INTERRUPTED
from kvcompile.errors import PolicyError
from kvcompile.evaluation import knapsack, sensitivity
from kvcompile.evaluation import tune as tune_module
from kvcompile.evaluation.attention_sites import AttentionTap, sites_of_tap
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.knapsack import NoRoomError, Option, choose
from kvcompile.evaluation.measure import ignore_progress
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.sensitivity import HalfCache, estimate_divergences, half_caches, measure_divergences
from kvcompile.evaluation.site_errors import EXACT
from kvcompile.evaluation.transforms import calibrate_transforms
from kvcompile.files import digests
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS
from kvcompile.passes.site import FormatPair
from kvcompile.policy.policy import Policy
from kvcompile.policy.transforms import Origin, Transforms
from kvcompile.tables import WIDTH

FORMATS = ["int8_per_token_head", "int4_per_token_head", "int4_per_channel", "turboquant_3bit", "turboquant_2bit"]


# The knapsack


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_best_of_all_that_fit(seed: int) -> None:
    chance = random.Random(seed)
    unit = chance.choice((1, 64))
    slots = [
        [Option(unit * chance.randint(0, 30) + 7, chance.random()) for _ in range(chance.randint(1, 4))]
        for _ in range(5)
    ]
    every = list(itertools.product(*(range(len(slot)) for slot in slots)))

    def cost(numbers: tuple[int, ...]) -> int:
        return sum(slot[number].cost for slot, number in zip(slots, numbers, strict=True))

    def loss(numbers: tuple[int, ...]) -> float:
        return sum(slot[number].loss for slot, number in zip(slots, numbers, strict=True))

    for capacity in (min(map(cost, every)), sum(map(cost, every)) // len(every), 10**6):
        chosen = tuple(choose(slots, capacity))
        assert cost(chosen) <= capacity
        assert loss(chosen) == pytest.approx(min(loss(numbers) for numbers in every if cost(numbers) <= capacity))
    with pytest.raises(NoRoomError) as caught:
        choose(slots, min(map(cost, every)) - 1)
    assert caught.value.least == min(map(cost, every))


def test_a_choice_in_coarse_steps_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knapsack, "MAX_STATES", 50)
    chance = random.Random(0)
    slots = [[Option(chance.randint(0, 10_000), chance.random()) for _ in range(5)] for _ in range(8)]
    chosen = choose(slots, 30_000)
    assert sum(slot[number].cost for slot, number in zip(slots, chosen, strict=True)) <= 30_000


# The search


@pytest.mark.usefixtures("without_code_generation")
def test_the_search_meets_its_budget_predicts_its_divergence_and_writes_a_policy_that_reproduces_it(
    tmp_path: Path,
) -> None:
    model, file = small_model(), tmp_path / "policy.yaml"
    tokens = torch.tensor(list(some_bytes(2 * BLOCK_TOKENS + 1)))
    found = kvcompile.tune(model, tokens, 5.5, file, formats=FORMATS, decode=1)

    assert found.result.packed_layers == 2
    assert found.result.effective_bits == found.predicted_bits <= 5.5, "bits are arithmetic"
    assert found.predicted_bits == pytest.approx(sum(half.bits for half in found.halves) / 4)
    assert found.result.mean_divergence == pytest.approx(found.predicted_divergence, rel=0.5)

    pairs = {module: {} for module in MODULES}
    for half in found.halves:
        pairs[half.module][half.role] = half.format
    policy = Policy.load(file)
    assert policy == found.policy
    for layer, module in enumerate(MODULES):
        assert policy.formats_for(module, layer, 2) == FormatPair(pairs[module]["key"], pairs[module]["value"])
    assert f"measured {found.result.effective_bits:.4f}" in file.read_text()

    presets = {preset.preset: preset for preset in found.presets}
    assert set(presets) == {"int8_per_token_head", "int4", "int4_per_token_head", "turboquant_3bit"}
    assert presets["int8_per_token_head"].bits == 8 * (HEAD_DIM + 4) / HEAD_DIM
    assert presets["int8_per_token_head"].divergence < found.predicted_divergence
    assert found.predicted_divergence < presets["int4_per_token_head"].divergence, "the budget allows more bits"
    text = str(found)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(half.format in text for half in found.halves)
    assert json.loads(json.dumps(found.to_dict()))["halves"][0]["format"] == found.halves[0].format


def test_a_format_whose_measured_divergence_is_far_above_its_estimate_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budget has room for one cache of 2 bits, and 2 bits are harmless only in the values of the last layer."""

    def divergence(tap: Any, windows: Any, exact: Any, module: str, formats: FormatPair, on_run: Any) -> float:
        runs.append((module, formats))
        is_harmful = "turboquant_2bit" in (formats.key, formats.value) and (module, formats.key) != harmless
        return 1.0 if is_harmful else 1e-3

    def evaluated(*args: Any, **arguments: Any) -> Any:
        return SimpleNamespace(results=[SimpleNamespace(unpacked_modules=())])

    runs: list[tuple[str, FormatPair]] = []
    harmless = (MODULES[1], EXACT)
    monkeypatch.setattr("kvcompile.evaluation.sensitivity.divergence_when", divergence)
    monkeypatch.setattr(tune_module, "evaluate", evaluated)
    tokens = torch.tensor(list(some_bytes(BLOCK_TOKENS + 1)))
    names = ["int4_per_token_head", "turboquant_2bit"]
    found = kvcompile.tune(small_model(), tokens, 4.375, formats=names, decode=1)
    chosen = {(half.module, half.role) for half in found.halves if half.format == "turboquant_2bit"}
    assert chosen == {(MODULES[1], "value")}
    assert found.predicted_divergence == pytest.approx(4e-3)
    assert found.measured_caches == (4, 4)
    assert len(set(runs)) == len(runs), "nothing is measured twice"


@pytest.mark.usefixtures("without_code_generation")
def test_estimates_from_gradients_are_close_to_the_measured_divergence_of_small_errors() -> None:
    model = small_model()
    windows = torch.tensor(list(some_bytes(4 * 2 * BLOCK_TOKENS))).view(4, -1)
    tap = AttentionTap(model)
    halves, _ = half_caches(model, Schedule(2 * BLOCK_TOKENS - 1, 1), sites_of_tap(tap, windows[0]))
    names = ["int8_per_token_head", "turboquant_4bit", "int4_per_channel"]

    def named(half: HalfCache, name: str) -> str:
        return name

    known = estimate_divergences(model, tap, windows, halves, names, named, ignore_progress)
    assert not any(parameter.grad is not None for parameter in model.parameters())
    exact = [tap(window, lambda site, call: None) for window in windows]
    wanted = [(half, "turboquant_4bit") for half in halves]
    measure_divergences(known, tap, windows, exact, wanted, named, ignore_progress)
    for half, estimated, measured in zip(halves, known.estimated, known.measured, strict=True):
        assert set(estimated) == (set(names) if half.role == "key" else set(names[:2]))
        assert 0 < estimated["int8_per_token_head"] < estimated["turboquant_4bit"] / 50
        assert estimated["turboquant_4bit"] == pytest.approx(measured["turboquant_4bit"], rel=0.5)
    ratio = known.measured[0]["turboquant_4bit"] / known.estimated[0]["turboquant_4bit"]
    costs = {cost.format: cost for cost in known.costs()[0]}
    assert costs["turboquant_4bit"].divergence == known.measured[0]["turboquant_4bit"]
    assert costs["int8_per_token_head"].divergence == pytest.approx(
        ratio * known.estimated[0]["int8_per_token_head"]
    ), "the ratio of the nearest measured format corrects an estimate"


def test_layers_that_stay_unpacked_count_with_all_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend refuses the first layer, and the search learns this only from the measurement."""
    measured: list[Policy] = []

    def measure(model: Any, text: Any, policies: list[Policy], **arguments: Any) -> Any:
        measured.extend(policies)
        formats = policies[0].formats_for(MODULES[0], 0, 2)
        return SimpleNamespace(results=[SimpleNamespace(unpacked_modules=() if formats is None else MODULES[:1])])

    monkeypatch.setattr(tune_module, "evaluate", measure)
    tokens = torch.tensor(list(some_bytes(BLOCK_TOKENS + 1)))
    found = kvcompile.tune(small_model(), tokens, 20, formats=FORMATS[:2], decode=1)
    assert len(measured) == 2
    assert {half.module for half in found.halves} == {MODULES[1]}
    bits = [8 * (HEAD_DIM + 4) / HEAD_DIM, 4 * (HEAD_DIM + 8) / HEAD_DIM]
    assert found.predicted_bits == (32 + sum(bits) / 2) / 2, "one half of the other layer gets 8 bits, one 4"
    assert found.policy.rules[0].match.layers == "0"
    assert found.policy.rules[0].dtype == "auto"


@pytest.mark.slow
@pytest.mark.usefixtures("without_code_generation")
def test_with_transforms_the_search_chooses_calibrated_formats(tmp_path: Path) -> None:
    model, transforms, file = small_model(num_layers=1), tmp_path / "t.safetensors", tmp_path / "policy.yaml"
    windows = torch.tensor(list(some_bytes(4 * 64))).view(4, 64)
    tensors, least, largest = calibrate_transforms(model, windows, context=CONTEXT)
    origin = Origin(
        model="small", fingerprint=digests.of_model(model), text="", text_digest="", windows=4, tokens=64,
        positions=(least, largest),
    )  # fmt: skip
    Transforms(str(transforms), origin, tensors).save(transforms)
    tokens, formats = torch.tensor(list(some_bytes(BLOCK_TOKENS + 1))), ["transform_3210", "transform_2100"]
    found = kvcompile.tune(
        model, tokens, 2, file, formats=[*formats, "int4_per_token_head"], transforms=transforms, decode=1
    )
    assert {half.format for half in found.halves} & set(formats)
    assert found.result.packed_layers == 1
    assert found.result.effective_bits == found.predicted_bits <= 2
    assert Policy.load(file) == found.policy
    assert found.policy.transforms[0].source == str(transforms)
    with pytest.raises(PolicyError, match="calibrated on another model"):
        kvcompile.tune(small_model(), tokens, 5, transforms=transforms)
    with pytest.raises(EvaluationError, match="transform_3210 needs a calibration of the model; give --transforms"):
        kvcompile.tune(model, tokens, 5, formats=formats)


@pytest.mark.parametrize(("runs", "measured"), [(0, 0), pytest.param(1, 1, marks=pytest.mark.slow), (4, 4)])
def test_an_interrupted_search_leaves_the_best_policy_by_what_was_measured(
    runs: int, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_model(), tmp_path)
    monkeypatch.chdir(tmp_path)

    def interrupt(*args: Any, **arguments: Any) -> Any:
        raise KeyboardInterrupt

    def divergence(*args: Any, calls: Iterator[int] = itertools.count(), **arguments: Any) -> float:  # noqa: B008
        return 0.01 if next(calls) < runs else interrupt()

    monkeypatch.setattr("kvcompile.evaluation.sensitivity.divergence_when", divergence)
    monkeypatch.setattr(tune_module, "evaluate", interrupt)
    command = "tune --model . --budget-bits 5 --formats int4_per_token_head,turboquant_2bit --prefill 63 --decode 1"
    out, err = run(f"{command} --windows 1 --output policy.yaml", INTERRUPTED)
    assert f"interrupted: {measured} of 4 key and value caches were measured" in err
    assert "measured" not in next(line for line in out.splitlines() if "budget 5 bits" in line)
    file = (tmp_path / "policy.yaml").read_text()
    assert file.startswith(f"# interrupted: {measured} of 4 key and value caches were measured")
    formats = Policy.load(tmp_path / "policy.yaml").formats_for(MODULES[0], 0, 2)
    assert formats == FormatPair("int4_per_token_head", "int4_per_token_head"), "the budget allows it everywhere"


def test_an_interrupted_estimate_leaves_the_best_policy_by_the_windows_that_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(small_model(num_layers=1), tmp_path)
    monkeypatch.chdir(tmp_path)
    calls, original = itertools.count(), sensitivity.gradient

    def gradient_until_the_second_window(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    command = "tune --model . --budget-bits 5 --formats int4_per_token_head,turboquant_2bit --prefill 63 --decode 1"
    monkeypatch.setattr(sensitivity, "gradient", gradient_until_the_second_window)
    out, err = run(f"{command} --windows 3 --output policy.yaml", INTERRUPTED)
    interrupted = "interrupted: 1 of 3 windows were estimated, and 0 of 2 key and value caches were measured"
    assert interrupted in err
    assert "budget 5 bits" in out
    assert interrupted in (tmp_path / "policy.yaml").read_text()
    formats = Policy.load(tmp_path / "policy.yaml").formats_for(MODULES[0], 0, 1)
    assert formats == FormatPair("int4_per_token_head", "int4_per_token_head")
    monkeypatch.setattr(sensitivity, "gradient", gradient_until_the_second_window)
    calls = itertools.count(3)
    out, err = run(f"{command} --windows 3 --output other.yaml", INTERRUPTED)
    assert (out, "nothing was written" in err, (tmp_path / "other.yaml").exists()) == ("", True, False)


def test_mistakes_are_named_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tune_module, "estimate_divergences")
    model, tokens = small_model(num_layers=1), torch.tensor(list(some_bytes(BLOCK_TOKENS + 1)))
    with pytest.raises(EvaluationError, match=r"there is no format 'int9'.* \(formats: int8_per_token_head, "):
        kvcompile.tune(model, tokens, 4, formats=["int9"])
    with pytest.raises(EvaluationError, match="no format to choose from"):
        kvcompile.tune(model, tokens, 4, formats=[])
    for budget in (float("nan"), float("inf"), 0, -4.5):
        known = rf"a budget of {budget:g} bits is not valid: the formats .* have codes of 2 to 16 bits; give"
        with pytest.raises(EvaluationError, match=known):
            kvcompile.tune(model, tokens, budget)
    known = r"a budget of 99 bits is not valid: .* take 2\.5 bits in the smallest formats and at most 32 bits; give a"
    with pytest.raises(EvaluationError, match=known):
        kvcompile.tune(model, tokens, 99, formats=["turboquant_2bit"], decode=1)
    with pytest.raises(EvaluationError, match=r"fits a budget of 2 bits: the smallest choice takes 2\.5"):
        kvcompile.tune(model, tokens, 2, formats=["turboquant_2bit"], decode=1)


# The command


def run(command: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


def test_the_examples_of_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples run up to the search, on a model with few positions."""
    save(small_model(num_layers=1), tmp_path)
    (tmp_path / "text.txt").write_bytes(some_bytes(300))
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[float, int, int]] = []

    def stop(model: Any, text: Any, budget_bits: float, *, formats: list[str], **arguments: Any) -> None:
        asked.append((budget_bits, len(text.windows), len(formats)))
        raise EvaluationError("stop here")

    monkeypatch.setattr(tune_module, "tune_on", stop)
    examples = [line.partition("kvcompile ")[2] for line in run("tune --help")[0].splitlines() if "    python" in line]
    pages = [re.sub(r"--model \S+", "--model .", command) for command in command_line() if command.startswith("tune ")]
    for example in (*examples, *pages):
        assert run(f"{example} --prefill 16 --decode 8", code=2)[1] == "kvcompile: error: stop here\n"
    assert asked[1:3] == [(4.5, 4, len(tune_module.DEFAULT_FORMATS)), (5.0, 2, 2)]
    assert len(pages) > 0
    assert "no format 'int9'" in run("tune --model . --budget-bits 4 --formats int9", code=2)[1]
    assert "--formats: the list is empty" in run("tune --model . --budget-bits 4 --formats ''", code=2)[1]
