"""The verdict on programs that differ or raise an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fuzz.oracle import Drive, How, compare


def step(x: Tensor) -> Tensor:
    return x + 1


def drive_that_raises(*errors: type[Exception] | None) -> Drive:
    """Compiles a step once for each error, and raises it; None runs the step without an error."""
    remaining = list(errors)

    def drive(compile: Callable[..., Any], new: Any) -> Iterator[Any]:
        run = compile(step)
        if run is not step and (error := remaining.pop(0)):
            raise error("raised by compiled code")
        yield step(new(2))

    return drive


@pytest.mark.parametrize("generate_code", [False, True])
@pytest.mark.parametrize(
    ("packed", "plain", "verdict"),
    [
        (NameError, NameError, "invalid"),
        (NameError, None, "crash"),
        (NameError, TypeError, "crash"),
        (None, NameError, "equal"),
    ],
)
def test_an_error_of_compiled_code_counts_unless_plain_inductor_raises_it_too(
    packed: type[Exception] | None, plain: type[Exception] | None, verdict: str, generate_code: bool
) -> None:
    assert compare(drive_that_raises(packed, plain), How(generate_code=generate_code)).verdict == verdict


@pytest.mark.parametrize(
    ("plain", "packed", "dtype", "verdict"),
    [(1, 0, "bfloat16", "equal"), (0, 1, "bfloat16", "wrong"), (1, 2, "bfloat16", "wrong"), (1, 0, "float32", "wrong")],
)
def test_plain_bfloat16_may_be_far_from_float64_where_packed_code_is_near(
    plain: float, packed: float, dtype: str, verdict: str
) -> None:
    def drive(compile: Callable[..., Any], new: Any) -> Iterator[Any]:
        run, x = compile(step), new(2)
        error = 0.0 if x.dtype == torch.float64 else plain if run is step else packed
        yield step(x) + error

    assert compare(drive, How(policy=dtype, dtype=dtype)).verdict == verdict
