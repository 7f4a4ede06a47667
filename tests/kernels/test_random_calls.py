"""Random calls of kernels, which ``python -m tests.fuzz --kernels`` continues."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fuzz.kernel_calls import call_of

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.mark.parametrize("seed", range(30))
def test_a_random_call_gives_the_results_of_the_specification(seed, device):
    call_of(seed, most_tokens=140).check(device)
