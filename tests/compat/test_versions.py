"""A PyTorch newer than the tested releases warns once, and works."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

import kvcompile
from kvcompile.compat import versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("2.10.0", True),
        ("2.15.0", True),
        ("2.15.1+cpu", True),
        ("2.16.0", False),
        ("2.16.0a0+git", False),
        ("3", False),
    ],
)
def test_only_minor_and_major_releases_after_the_newest_tested_one_are_untested(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = versions.Tested("2.15.0", "3.9.0", "3.11", "CPU", "sample", "2026-11-23")
    monkeypatch.setattr(versions, "TESTED", (newest,))
    message = versions.untested(version)
    assert (message is None) is is_tested
    if message is not None:
        assert version in message
        assert "2.15" in message
        assert "doctor" in message


@pytest.mark.usefixtures("without_code_generation")
def test_the_first_compilation_with_a_newer_pytorch_warns_once_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for size in (2, 3):
            torch._dynamo.reset()
            x = torch.ones(size)
            assert torch.equal(torch.compile(torch.cos, backend="kvquant")(x), x.cos())
    found = [str(one.message) for one in caught if one.category is kvcompile.UntestedVersionWarning]
    assert len(found) == 1
    assert "99.0.0" in found[0]


def test_the_oldest_tested_release_is_the_oldest_that_is_required() -> None:
    required = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert required is not None
    assert versions.TESTED[0].torch.startswith(required[1])


def test_releases_are_listed_in_order_and_once_for_each_python() -> None:
    releases = [versions.numbers(one.torch) for one in versions.TESTED]
    assert releases == sorted(releases)
    assert len({(one.torch, one.python) for one in versions.TESTED}) == len(versions.TESTED)
