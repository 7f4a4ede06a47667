"""The mark ``sampled`` makes all but every n-th case of a test slow."""

from __future__ import annotations

import pytest


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", range(7))
def test_all_but_every_third_case_are_slow(case: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("slow") is None) == (case in (0, 3, 6))
