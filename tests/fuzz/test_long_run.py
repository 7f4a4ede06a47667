"""A long search adds up its counts, writes them to a file, and goes on after a process dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from fuzz import long_run
from fuzz import search as search_module
from fuzz.draw import programs
from fuzz.long_run import LongRun, added
from fuzz.oracle import Outcome
from fuzz.program import Program
from fuzz.search import Failure, Statistics, search


def _counted(number: int, how: dict[str, object], end: float) -> tuple[Statistics, str]:
    if number == 5 and not Path(str(how["mark"])).exists():
        Path(str(how["mark"])).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return Statistics(Counter(equal=2, loud=1), safe=2, rewritten=1, seconds=0.5), "it differs" if number == 3 else ""


def test_counts_are_added_up_in_files(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.json")]
    for first, file in enumerate(files):
        run = LongRun(first, {"device": "cpu"}, file)
        run.add(first, Statistics(Counter(equal=2, loud=1), 2, 1, Counter(rewritten=4)), "")
        run.print()
    counts = json.loads(files[0].read_text())
    assert (counts["programs"], counts["seeds"], counts["failures"], counts["first_seed"]) == (3, 1, 0, 0)
    assert added(files) == Statistics(Counter(equal=4, loud=2), 4, 2, Counter(rewritten=8))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_seeds_run_until_the_end_and_a_process_that_dies_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    if method == "fork":  # forks import nothing, and their pool replaces none of them
        context = multiprocessing.get_context("fork")
        monkeypatch.setattr(long_run.multiprocessing, "get_context", lambda name: context)
        monkeypatch.setattr(long_run, "_SEEDS_OF_A_PROCESS", None)
    monkeypatch.setattr(long_run, "_seed", _counted)
    seconds = iter(range(1000))
    monkeypatch.setattr(long_run.time, "time", lambda: float(next(seconds)))
    run = LongRun(2, {"mark": str(tmp_path / "died")})
    run.until(60.0, 1, _nothing)
    assert run.died == [5]
    assert run.failures == 2
    assert run.total.programs == 3 * (run.seeds - 1)
    assert "seed 3:\nit differs" in capsys.readouterr().out


def _nothing() -> None:
    pass


def test_no_program_begins_after_the_end_and_a_failing_one_is_not_made_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[Program] = []

    def fails(program: Program, *args: object, **how: object) -> Outcome:
        ran.append(program)
        return Outcome("wrong", "it differs")

    monkeypatch.setattr(search_module, "run", fails)
    monkeypatch.setattr(search_module.time, "time", lambda: float(len(ran)))
    assert search(programs(), 1, 10, end=0.0).programs == 0
    assert not ran
    with pytest.raises(Failure) as failure:
        search(programs(), 1, 10, end=1.0)
    assert ran == [failure.value.program]
