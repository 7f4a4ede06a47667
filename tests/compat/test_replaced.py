"""A part of PyTorch is replaced from the first ``with`` block of any thread to the last one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcompile.compat.replaced import ReplacedInside


def test_blocks_of_different_threads_may_end_in_any_order() -> None:
    part = ["original"]

    def replace() -> Callable[[], None]:
        before, part[0] = part[0], "replacement"
        return lambda: part.__setitem__(0, before)

    inside = ReplacedInside(replace)
    first, second = inside(), inside()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert part == ["replacement"]
    second.__exit__(None, None, None)
    assert part == ["original"]
    with pytest.raises(IndexError), inside():
        part[1] += part.pop()
    assert part == ["original"]
