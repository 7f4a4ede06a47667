"""Random decode programs give the same results and the same caches packed as plain, step by step."""

from __future__ import annotations

import pytest
import torch

from fuzz.draw import programs
from fuzz.fixed_seeds import GROUPS, SEED, SHARE_REWRITTEN, Group, corner_programs
from fuzz.search import Failure, run, search


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
@pytest.mark.parametrize(
    ("seed", "share"),
    [(SEED, 0.17), *(pytest.param(seed, 1.0, marks=pytest.mark.slow) for seed in (SEED, SEED + 1))],
)
def test_packed_programs_equal_plain_ones(seed: int, share: float, group: Group) -> None:
    found = search(group.strategy, seed, int(share * group.count))
    assert found.verdicts["invalid"] <= 0.5 * found.programs, "most programs must run at all"
    if group.is_safe:
        assert found.share_rewritten >= SHARE_REWRITTEN, f"{found.rewritten} of {found.safe}: {found.outcomes}"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.sampled(18)
@pytest.mark.parametrize("part", range(18))
def test_corner_programs_run_packed_as_they_run_plain(part: int) -> None:
    programs = enumerate(corner_programs())  # every other one begins with packed caches
    results = {program: run(program) for number, program in programs if number // 2 % 18 == part}
    for program, result in results.items():
        assert not result.failed, Failure(program, result)
    safe = [result.rewritten for program, result in results.items() if program.is_safe]
    assert sum(safe) >= SHARE_REWRITTEN * len(safe)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_generated_code_of_programs_equals_plain_programs() -> None:
    search(programs(), SEED, 12, shrinks=False, generate_code=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("twisted", [False, True])
def test_programs_on_a_gpu_equal_plain_programs(twisted: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    search(programs(twisted=twisted), SEED, 30, shrinks=False, device="cuda")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_generated_code_of_programs_on_a_gpu_equals_plain_programs() -> None:
    search(programs(), SEED, 20, shrinks=False, device="cuda", generate_code=True)
