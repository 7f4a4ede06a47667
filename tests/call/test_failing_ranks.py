"""A rank that fails or decides differently gives every rank an error that names that rank; no rank waits forever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import failing_rank_program as program
import processor_times
import pytest
import ranks
import torch
from ranks import call_ranks

SIZES = [pytest.param(2, id="2 ranks"), pytest.param(3, id="3 ranks", marks=pytest.mark.slow)]
SLOW_SIZES = [pytest.param(size, id=f"{size} ranks", marks=pytest.mark.slow) for size in (2, 3)]

ERROR = "ValueError: no more paper"


def run(cases: str, size: int, output: Path) -> list[dict[str, Any] | str]:
    """The results of each rank, or the error output of all ranks for a rank that has ended with an error.

    Unlike under torchrun, no rank is stopped if another one ends.
    """
    log = output.with_suffix(".log")
    call_ranks("failing_rank_program.py", size, "cpu", cases, output, log=log, separate=True)
    files = [output.with_suffix(f".{rank}") for rank in range(size)]
    return [torch.load(file) if file.exists() else log.read_text() for file in files]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_the_error_of_the_rank_that_fails(size: int, tmp_path: Path) -> None:
    """The steps of a case fail together, and the ranks go on with the next case together."""
    cases = ["before packing", "in packing", "in code", "adoption", "decisions", "training"]
    results = run(",".join(cases), size, tmp_path / "results.pt")
    assert all(isinstance(rank, dict) for rank in results), results
    of = {case: [rank[case][0] for rank in results] for case in cases}  # type: ignore[index]
    for case in ("before packing", "in packing", "in code"):
        assert ERROR.split(": ")[1] in of[case][-1]
        for message in of[case][:-1]:
            assert f"rank {size - 1} failed: {ERROR}" in message, (case, message)
    for message in of["adoption"][:-1]:
        assert f"rank {size - 1} failed: AdoptionError: " in message
    assert "AdoptionError: " in of["adoption"][-1]
    assert "RankError" not in of["adoption"][-1]
    assert all("disagree: attention in no module is" in message for message in of["decisions"] + of["training"])
    assert all("refused" in message for message in of["training"])


@pytest.mark.parametrize("size", SLOW_SIZES)
def test_no_rank_waits_longer_for_another_than_the_process_group_allows(size: int, tmp_path: Path) -> None:
    results = run("late", size, tmp_path / "results.pt")
    assert all(isinstance(rank, dict) for rank in results), results
    messages = [rank["late"][0] for rank in results]  # type: ignore[index]
    waited = f"waited {program.SECONDS} s (the timeout of the process group) for rank {size - 1}"
    assert all(waited in message for message in messages), messages
    assert any("which failed elsewhere or runs other code" in message for message in messages)
    assert "rank 0 waited" in messages[-1] or "rank 1 waited" in messages[-1], "a late rank learns which rank gave up"


@pytest.mark.parametrize("size", SLOW_SIZES)
def test_every_rank_gets_the_error_of_a_model_that_ends_the_program_of_a_rank(size: int, tmp_path: Path) -> None:
    *others, faulty = run("model code", size, tmp_path / "results.pt")
    assert isinstance(faulty, str)
    assert ERROR in faulty
    for rank in others:
        assert isinstance(rank, dict), rank
        assert f"rank {size - 1} ended: {ERROR}" in rank["model code"][0]


def test_one_process_serves_all_programs_also_after_one_that_fails(tmp_path: Path) -> None:
    program, log = tmp_path / "small_program.py", tmp_path / "log"
    program.write_text("import os, sys\nassert sys.argv[1] != 'no paper', os.environ['RANK']\nprint(*sys.argv[1:])\n")
    served = []
    for argument, status in (("paper", 0), ("no paper", 1), ("more paper", 0)):
        seconds = sum(processor_times.elsewhere.values())
        assert call_ranks(str(program), 2, "cpu", argument, log=log) == status
        assert sum(processor_times.elsewhere.values()) > seconds
        assert ("AssertionError: " if status else argument) in log.read_text()
        served.append(ranks._server().pid)
    assert len(set(served)) == 1
