"""Long commands show their progress, are quiet in pipes, keep what was measured, and fit narrow terminals."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Task, TaskID
from small_models import save, small_model, some_bytes
from typer.testing import CliRunner
from valid_files import CONFIG

from kvcompile.benching import decode_attention
from kvcompile.benching.decode_attention import DecodeTime
from kvcompile.benching.measuring import Timing
from kvcompile.benching.workloads import Shape
from kvcompile.cli import progress
from kvcompile.cli.app import app
from kvcompile.cli.output import INTERRUPTED
from kvcompile.evaluation.measure import evaluate
from kvcompile.evaluation.results import Evaluation
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.text import Text, read_text
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.policy.static_scales import StaticScales
from kvcompile.report.data import GraphReport
from kvcompile.report.report import Report, collect_reports
from kvcompile.tables import WIDTH, broken, table, width


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: the folder of a model with a text."""
    save(small_model(num_layers=1), tmp_path)
    (tmp_path / "text.txt").write_bytes(some_bytes(300))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, code: int) -> tuple[str, str]:
    result = CliRunner().invoke(app, shlex.split(command), prog_name="kvcompile")
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout, result.stderr


# Progress


@pytest.mark.usefixtures("without_code_generation")
def test_compilations_are_announced_with_their_number_before_they_begin(folder: Path) -> None:
    torch._dynamo.reset()
    heard: list[str] = []
    with collect_reports() as report:

        def on_progress(doing: str, done: int, total: int) -> None:
            if "compiling" in doing:
                heard.append(f"{doing}; {len(report.graphs)} done")

        model = small_model(num_layers=1)
        text = read_text(model, ".", folder / "text.txt", Schedule(16, 8, 4), 2)
        evaluate(model, text, ["int8_per_token_head"], on_progress=on_progress)
    assert heard == [
        "int8_per_token_head: compiling graph 1 of 2; 0 done",
        "int8_per_token_head: compiling graph 2 of 2; 1 done",
    ]
    assert len(report.graphs) == 2


def show(updates: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> str:
    """The text that the progress bar writes for some updates."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, width=80)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    with progress.progress_bar() as on_progress:
        for update in updates:
            on_progress(*update)
    return written.getvalue()


def test_the_bar_shows_what_runs_the_percentage_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show([("int8: compiling graph 1 of 2", 5, 20)], monkeypatch, is_terminal=True)
    assert "int8: compiling graph 1 of 2" in shown
    assert "25%" in shown
    assert "left:" in shown


def test_the_time_left_counts_the_compilation_that_still_runs() -> None:
    task = Task(TaskID(0), "int8: compiling graph 1 of 2", total=4, completed=1, _get_time=lambda: 100.0)
    task.start_time = 0.0
    assert progress.TimeLeft().render(task).plain == "left: 0:05:00"
    task.completed = 0
    assert progress.TimeLeft().render(task).plain == "left: -:--:--"


def test_a_new_part_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = show([("one", 20, 20), ("two", 1, 4)], monkeypatch, is_terminal=True)
    assert "two" in shown
    assert "25%" in shown


def test_a_pipe_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not show([("int8", 5, 20)], monkeypatch, is_terminal=False)


# Ctrl-C


def evaluation(text: Text) -> Evaluation:
    return Evaluation("m", text.source, text.metric, 1, 1, 1, 1, 2, "float32", "cpu", 8.0, 32.0)


def test_an_interrupted_evaluation_prints_and_keeps_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: Any, text: Text, policies: list[str], *, on_result: Any, **arguments: Any) -> Evaluation:
        on_result(evaluation(text))
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcompile.evaluation.measure.evaluate", interrupted)
    command = "eval --model . --data text.txt --prefill 16 --decode 8 --policies int4,fp8_e4m3 --output quality.json"
    out, err = run(command, INTERRUPTED)
    assert "none: float32" in out
    assert "interrupted: 0 of 2 policies were measured" in err
    assert json.loads((folder / "quality.json").read_text())["dtype"] == "float32"


def test_an_interrupted_comparison_prints_the_predictions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(model: Any, text: Text, policy: Any, *, on_result: Any, **arguments: Any) -> Evaluation:
        on_result(evaluation(text))
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcompile.evaluation.compare.compare_on", interrupted)
    out, err = run("compare --model . --data text.txt --prefill 16 --decode 8 --output new.yaml", INTERRUPTED)
    assert "none: float32" in out
    assert "interrupted: only the predictions were measured" in err
    assert not (folder / "new.yaml").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("tune --model . --data text.txt --prefill 16 --decode 8 --budget-bits 5", "kvcompile.evaluation.tune.tune_on"),
        (
            "calibrate --model . --data text.txt --prefill 16 --windows 2",
            "kvcompile.evaluation.magnitudes.largest_magnitudes",
        ),
    ],
)
def test_other_interrupted_commands_say_that_nothing_was_written(
    command: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(name, interrupted)
    _, err = run(f"{command} --output new.json", INTERRUPTED)
    assert "interrupted: nothing was written" in err
    assert not (folder / "new.json").exists()


def test_an_interrupted_calibration_of_scales_writes_the_windows_that_were_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(model: Any, windows: Any, on_progress: Any, on_window: Any) -> None:
        on_window({"layers.0": {"key": 2.0, "value": 1.0}})
        raise KeyboardInterrupt

    monkeypatch.setattr("kvcompile.evaluation.magnitudes.largest_magnitudes", interrupted)
    out, err = run("calibrate --model . --data text.txt --prefill 16 --windows 2 --output scales.json", INTERRUPTED)
    assert "layers.0" in out
    assert "interrupted: scales.json has the magnitudes of 1 of 2 windows" in err
    assert StaticScales.read(folder / "scales.json").numbers == {"layers.0": {"key": 2.0, "value": 1.0}}


def test_an_interrupted_bench_prints_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(shape: Shape, formats: Any, on_step: Any) -> Iterator[DecodeTime]:
        yield DecodeTime(shape, "bf16 SDPA", Timing(1e-3, 0.0, "nothing"), 1000, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(decode_attention, "decode_times", times)
    out, err = run("bench --contexts 1k,4k --policies fp8_e4m3", INTERRUPTED)
    assert "bf16 SDPA" in out
    assert "interrupted: 1 of 4 rows were measured" in err


# Narrow terminals


def narrow(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stdout a terminal of so many columns."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))


def test_the_lines_of_a_plan_fit_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(80, monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = "plan --kv-budget 8GiB --bandwidth h100-sxm --explain --policies bf16,int4_turboquant_4bit --weights 5GB"
    monkeypatch.chdir(tmp_path)
    app([*shlex.split(command), "--config", "config.json"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_a_pipe_has_the_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert width() == WIDTH
    narrow(70, monkeypatch)
    assert width() == 70


def test_names_break_after_dots_and_underscores() -> None:
    assert broken("model.layers.0.self_attn", 15) == "model.layers.0.\nself_attn"
    assert broken("model.layers.0.self_attn", 24) == "model.layers.0.self_attn"
    assert broken("model.layers.0.self_attn", 20) == "model.layers.0.\nself_attn", "and not self_\nattn"
    assert broken("model.self_attn", 6) == "model.\nself_\nattn"
    assert broken("unbreakable", 4) == "unbreakable"


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_tables_fit_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(columns, monkeypatch)
    header = ["policy", *(f"column {number}" for number in range(12))]
    shown = table(header, [["int8_per_token_head", *("1234567" for _ in range(12))]])
    assert max(map(len, shown.splitlines())) <= min(columns, 100)
    assert shown.count("1234567") == 12
    assert "int8_per_token_head" in shown


@pytest.mark.parametrize("columns", [80, 100])
def test_no_name_of_a_report_breaks_in_mid_word(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(columns, monkeypatch)
    caches = tuple(
        CacheSummary(role, "allocated", "index_put", "keys", (1,), "bfloat16", "int8_per_token_head", 256, 136)
        for role in ("key", "value")
    )
    site = Site("model.layers.31.self_attn", 31, "sdpa, bool mask", caches)
    refused = Site("model.layers.0.self_attn", 0, "sdpa, bool mask", reason="because", reason_code="used_elsewhere")
    shown = str(Report([GraphReport((site, refused))]))
    assert max(map(len, shown.splitlines())) <= columns
    cells = [cell.strip() for line in shown.splitlines() if line.startswith("|") for cell in line.split("|")]
    words = {word for cell in cells for word in cell.split()}
    whole = {"allocated", "index_put", "int8_per_token_head", "sdpa,", "bool", "mask", "used_elsewhere"}
    assert whole <= words
    assert "model.layers.31.self_attn" in words or "self_attn" in words
