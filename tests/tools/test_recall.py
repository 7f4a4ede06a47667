"""``kvcompile eval --recall``: numbers that are planted in a text and asked for later."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from small_models import save, small_model
from typer.testing import CliRunner

from kvcompile.cli.app import app
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.recall import DISTANCES, plant_numbers, recalled
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Planted, Text

COUNT = 4
SCHEDULE = Schedule(prefill=300, decode=128, chunk=64)


def text(num_windows: int = 2, schedule: Schedule = SCHEDULE) -> Text:
    windows = torch.full((num_windows, schedule.window_tokens), ord("."))
    return Text("text", windows, schedule, in_bytes=True)


def encode(string: str) -> list[int]:
    return list(string.encode())


def lines(window: torch.Tensor) -> list[tuple[int, bytes]]:
    """The place and the content of every line with a number."""
    return [(found.start(), found[0]) for found in re.finditer(rb"\n# number \w+ = \d{5}\n", bytes(window.tolist()))]


def test_every_part_of_the_prefill_has_a_number_for_which_the_later_steps_ask() -> None:
    planted = plant_numbers(text(), COUNT, encode)
    for window in planted.windows:
        found = lines(window)
        part = SCHEDULE.prefill // COUNT
        assert [place // part for place, _ in found[:COUNT]] == list(range(COUNT))
        assert found[COUNT][0] == SCHEDULE.prefill
        assert sorted(line for _, line in found[COUNT:]) == sorted(line for _, line in found[:COUNT])
    assert planted.windows[0].tolist() != planted.windows[1].tolist()


def test_answers_are_the_predictions_of_the_digits() -> None:
    planted = plant_numbers(text(), COUNT, encode)
    assert planted.planted is not None
    for window, questions, distances in zip(
        planted.windows, planted.planted.question, planted.planted.distance, strict=True
    ):
        found = lines(window)
        for number in range(COUNT):
            place, line = found[number]
            digits = bytes(window[1:][questions == number].tolist())
            assert digits == line[-6:-1]
            (asked,) = [other for other, again in found[COUNT:] if again == line]
            assert distances[number] == asked - place


def test_the_text_between_the_numbers_stays_and_the_given_text_is_not_changed() -> None:
    given = text()
    planted = plant_numbers(given, COUNT, encode)
    assert given.planted is None
    assert (given.windows == ord(".")).all()
    for window in planted.windows:
        rest = re.sub(rb"\n# number \w+ = \d{5}\n", b"", bytes(window.tolist()))
        assert set(rest) == {ord(".")}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(80, 128, 64), "a number takes 25 tokens, but a prefill of 80 has only 20 for each"),
        (Schedule(3, 128, 64), f"a prefill of 3 tokens has no place for {COUNT} numbers"),
        (Schedule(300, 64, 64), "the questions take 100 tokens, but only 64 are read after the prefill"),
    ],
)
def test_numbers_without_room_are_an_error(schedule: Schedule, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        plant_numbers(text(schedule=schedule), COUNT, encode)


def test_a_number_is_retrieved_if_all_its_digits_are_right() -> None:
    question = torch.tensor([[-1, 0, 0, -1, 1, 1], [-1, 1, 1, -1, 0, 0]])
    distance = torch.tensor([[DISTANCES[0], DISTANCES[1]], [1, DISTANCES[0] + 1]])
    right = torch.tensor([[False, True, True, False, True, False], [False, True, True, False, True, True]])
    everything = torch.ones_like(right)
    divergence = torch.tensor([[9.0, 1.0, 2.0, 9.0, 3.0, 4.0], [9.0, 5.0, 6.0, 9.0, 7.0, 8.0]])
    near, far = recalled(Planted(question, distance), right, everything, divergence)
    assert (near.distance, near.questions, near.recalled, near.divergence) == (DISTANCES[0], 2, 1.0, 4.5)
    assert (far.distance, far.questions, far.recalled, far.divergence) == (DISTANCES[1], 2, 0.5, 4.5)
    assert near.reference == far.reference == 1.0


def test_the_command_prints_what_was_retrieved_by_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_code_generation: None
) -> None:
    save(small_model(num_layers=1), tmp_path)
    monkeypatch.chdir(tmp_path)
    command = (
        "eval --model . --policies int8_per_token_head --prefill 64 --decode 56 --chunk 28 --windows 1 --recall 2 "
        "--output quality.json"
    )
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == 0, (result.output, result.exception)
    assert re.search(r"\| retrieved +\| +to 512 \|\n.*\n\| questions +\| +2 \|", result.stdout)
    (measured,) = json.loads(Path("quality.json").read_text())["results"]
    assert [one["questions"] for one in measured["recalled"]] == [2]
