"""``verify`` refuses sites that a planted fault makes wrong, so that results are right, and refuses nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.faults import FAULTS
from fuzz.fixed_seeds import corner_programs
from fuzz.probe import Probe
from fuzz.probes import PROBES
from fuzz.program import GROWING, STATIC, Attention, Layer, Program, Sizes, Step, Write
from fuzz.search import run

pytestmark = pytest.mark.usefixtures("fresh_compiler", "dumps_in_tmp_path")

WRITE = Write("index_copy_")
LAYER = Layer(STATIC, "bthd", WRITE, WRITE, False, Attention())
PROGRAM = Program(Sizes(2, 2, 2, 9, 16), (LAYER,), (Step(3), Step(1)))
SCALED = replace(PROGRAM, layers=(replace(LAYER, attention=Attention(scale=0.3)),))
GROWS = replace(PROGRAM, layers=(replace(LAYER, kind=GROWING, axes="bhtd", key=Write("cat"), value=Write("cat")),))

REFUSED = ("differs", "not_verified")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("title", "program"),
    [
        ("the scale is dropped", SCALED),
        ("the mask is dropped", PROGRAM),
        pytest.param("the mask is off by one", PROGRAM, marks=pytest.mark.slow),
        ("positions are off by one", PROGRAM),
        pytest.param("the sequences of new vectors are reversed", PROGRAM, marks=pytest.mark.slow),
        pytest.param("keys and values are exchanged", PROGRAM, marks=pytest.mark.slow),
        pytest.param("the output of another sequence is taken", PROGRAM, marks=pytest.mark.slow),
        ("attention reads the cache before its writes", PROGRAM),
        ("the store is not written back", PROGRAM),
        ("a growing cache loses its last token before it grows", GROWS),
        pytest.param("the order of concatenated tensors is ignored", GROWS, marks=pytest.mark.slow),
    ],
)
def test_a_fault_is_refused_and_the_answer_is_right(title: str, program: Program) -> None:
    (fault,) = [fault for fault in FAULTS if fault.title == title]
    with fault.planted():
        assert run(program).verdict in ("wrong", "crash"), "the fault shows without verify"
        result = run(program, verify=True)
    assert set(result.outcomes) == {"differs"}
    assert result.verdict == "equal"


UNSEEN = (
    "the alias check of outputs is dropped",
    "equal caches of the caller become one",
    "parts of the caller become views of the joined cache",
    "caches with aliases are adopted",
    "packed inputs may share memory",
    "new tokens keep their own dtype",
    "packed caches are read in any order and width",
)
"""The faults of probes that the check cannot see, as docs/verify.md lists them."""

FAILING = (
    "written sizes that only data determine count as known",
    "caches may get a size that only data determine",
)
"""The faults of probes that make compilation fail before the check, in some releases of PyTorch."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, marks=() if number % 6 == 0 or probe.fault in UNSEEN else pytest.mark.slow)
        for number, probe in enumerate(PROBES)
    ],
    ids=lambda probe: probe.drive.__name__,
)
def test_the_fault_of_a_probe_is_refused_too(probe: Probe) -> None:
    (fault,) = [fault for fault in FAULTS if fault.title == probe.fault]
    with fault.planted():
        result = probe.run(verify=True)
    is_refused = result.outcomes["differs"] > 0
    assert is_refused != result.failed
    assert is_refused == (probe.fault not in UNSEEN) or probe.fault in FAILING


def test_programs_without_a_fault_stay_packed() -> None:
    """This is a sample of the corner programs. The slow test runs all of them."""
    _check(corner_programs()[::45])


@pytest.mark.slow
def test_all_corner_programs_stay_packed() -> None:
    _check(corner_programs())


def _check(programs: list[Program]) -> None:
    for program in programs:
        result = run(program, verify=True)
        assert not result.failed, program
        assert result.outcomes.keys().isdisjoint(REFUSED), (program, result.outcomes)
