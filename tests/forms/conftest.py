"""Each form is compiled for plain caches, and again for packed ones."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from kvcompile.compat import guards


@pytest.fixture(autouse=True)
def graphs_for_packed_caches() -> Iterator[None]:
    """The code for plain caches is not used for packed caches, so that the passes meet both kinds of inputs.

    The fixture does not use ``monkeypatch``, which a test may use: the changes of ``monkeypatch`` must end before the
    changes of the other fixtures.
    """
    with mock.patch.object(guards, "CAN_WIDEN_GUARDS", False):
        yield
