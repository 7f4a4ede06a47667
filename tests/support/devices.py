"""Cases of a test by device: all of them run on a GPU, and some of them on a CPU too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

Cases = Iterable[tuple[Any, ...]]


def cases_by_device(on_gpu: Cases, on_cpu: Cases, generated_on_cpu: Cases = ()) -> list[Any]:
    """Parameters of a test whose last parameter is the device. A case that runs nowhere is not made.

    On a CPU a case takes seconds: choose each value of each parameter once, and the pairs that matter to each other.

    Args:
        on_gpu: all cases.
        on_cpu: cases that run on a CPU; with the fixture ``node_by_node_on_cpu`` without code generation.
        generated_on_cpu: slow cases, whose generated code runs on a CPU with that fixture too.
    """

    def generated(case: tuple[Any, ...]) -> str:
        return "-".join([*(getattr(value, "__name__", str(value)) for value in case), "cpu", "generated"])

    return [
        *(pytest.param(*case, "cpu") for case in on_cpu),
        *(pytest.param(*case, "cpu", marks=pytest.mark.slow, id=generated(case)) for case in generated_on_cpu),
        *(pytest.param(*case, "cuda", marks=pytest.mark.gpu) for case in on_gpu),
    ]
