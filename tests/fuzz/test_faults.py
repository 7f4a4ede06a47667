"""The fuzzer sees a fault of the project, and prints the program that shows it."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.faults import FAULTS
from fuzz.fixed_seeds import GROUPS
from fuzz.mutations import SURVIVORS
from fuzz.probe import Probe
from fuzz.probes import PROBES
from fuzz.program import STATIC, Attention, Layer, Program, Sizes, Step, Write
from fuzz.search import Failure, as_test, run, search

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WRITE = Write("index_copy_")
PROGRAM = Program(Sizes(2, 2, 2, 9, 16), (Layer(STATIC, "bthd", WRITE, WRITE, False, Attention()),), (Step(3), Step(1)))
SCALED = replace(PROGRAM.layers[0], attention=Attention(scale=0.3))


@pytest.mark.parametrize(
    "title",
    [
        "attention reads the cache before its writes",
        "the store is not written back",
        "the mask is off by one",
        "the sequences of new vectors are reversed",
    ],
)
def test_a_simple_program_shows_a_fault_of_its_functions(title: str) -> None:
    (fault,) = [fault for fault in FAULTS if fault.title == title]
    with fault.planted():
        assert run(PROGRAM).verdict == "wrong"
    assert run(PROGRAM).verdict == "equal"


@pytest.mark.sampled(9)
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.drive.__name__)
def test_a_probe_shows_its_fault_and_runs_rightly_without_it(probe: Probe) -> None:
    (fault,) = [fault for fault in FAULTS if fault.title == probe.fault]
    assert not (result := probe.run()).failed, result
    with fault.planted():
        assert probe.run().failed


def test_faults_without_a_program_are_explained() -> None:
    assert SURVIVORS.keys().isdisjoint(probe.fault for probe in PROBES)
    assert len({probe.fault for probe in PROBES}) == len(PROBES)


def test_a_search_ends_with_the_program_that_differs() -> None:
    (fault,) = [fault for fault in FAULTS if fault.title == "keys and values are exchanged"]
    with fault.planted(), pytest.raises(Failure, match="def test_a_program_that_differed") as failure:
        search(GROUPS[0].strategy, number=3, count=20, shrinks=False)
    assert run(failure.value.program).verdict == "equal"


def test_a_printed_program_is_a_test(tmp_path: Path) -> None:
    file = tmp_path / "printed.py"
    imports = "import torch\nimport torch.nn.functional as F\nfrom fuzz.oracle import check\n\n\n"
    file.write_text(imports + as_test(PROGRAM))
    runpy.run_path(str(file))["test_a_program_that_differed"]()
    (fault,) = [fault for fault in FAULTS if fault.title == "the scale is dropped"]
    file.write_text(imports + as_test(replace(PROGRAM, layers=(SCALED,))))
    with fault.planted(), pytest.raises(AssertionError, match="wrong"):
        runpy.run_path(str(file))["test_a_program_that_differed"]()


def test_every_fault_has_a_unique_title() -> None:
    titles = [fault.title for fault in FAULTS]
    assert len(titles) == len(set(titles)) >= 30
    assert SURVIVORS.keys() <= set(titles)
