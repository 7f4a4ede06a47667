"""Each form is compiled for plain caches, and again for packed ones."""

from __future__ import annotations

import pytest

from kvcompile.compat import guards


@pytest.fixture(autouse=True)
def graphs_for_packed_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code for plain caches is not used for packed caches, so that the passes meet both kinds of inputs."""
    monkeypatch.setattr(guards, "CAN_WIDEN_GUARDS", False)
