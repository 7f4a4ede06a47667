"""Files that users get from others, changed at random, give a right result or an error of one line."""

from __future__ import annotations

from collections import Counter

import pytest

from fuzz.file_kinds import KINDS
from fuzz.files import BadFile, ByteEdit, Edits, TreeEdit, check, search
from fuzz.fixed_seeds import SEED

every_kind = pytest.mark.parametrize("name", KINDS)

FOUND: list[tuple[str, Edits]] = [
    ("transforms", (TreeEdit(56, "replace", "key"),)),  # digests that are no JSON
    ("scales", (TreeEdit(2, "replace", "x" * 300),)),  # an error of safetensors that repeats the file
    ("calibration", (TreeEdit(2, "replace", {"\n": 0}),)),  # names with ends of lines
]
"""Changes that were not refused in a line, as :func:`fuzz.files.search` prints them."""


@every_kind
def test_a_valid_file_is_read(name: str) -> None:
    assert check(name, ()) == "read"


@every_kind
def test_a_changed_file_is_read_rightly_or_refused_in_a_line(name: str) -> None:
    counts: Counter[str] = Counter()
    search(name, SEED, 40, counts)
    assert counts["refused"] > 0


@pytest.mark.parametrize(("name", "edits"), FOUND)
def test_a_change_that_was_found_is_refused_in_a_line(name: str, edits: Edits) -> None:
    assert check(name, edits) == "refused"


def test_a_cache_that_is_read_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.caches.source.Source._digests", lambda *_: None)
    with pytest.raises(BadFile, match="its content has changed"):
        check("cache", (ByteEdit(-2, 1, b"\xaa"),))


def test_an_error_of_another_class_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcompile.caches.file._NOT_VALID", ())
    with pytest.raises(BadFile, match="KeyError"):
        [check("cache", (TreeEdit(place, "remove", None),)) for place in range(256)]
