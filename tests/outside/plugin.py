"""A plugin of pytest for tests of other projects: they run on ``kvquant`` and do not know it.

A :class:`Way` says how the tests run; the modules ``ways_*`` have the ways of each project. Graphs run node by node:
the tests judge results and caches, not generated code. The plugin writes a line of JSON for each test: its outcome, and
the attention that was packed or refused while it ran.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from node_by_node import running_node_by_node

import kvcompile
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.report.data import modules_by_reason, outcome

LOSSLESS = "float32"
"""A policy under which packed caches hold every value of the caches in these tests, up to float32, exactly."""

BOUND = 0.1
"""The largest difference of compared tensors in a lossy format, as a share of the largest number."""

packed_caches: Counter[str] = Counter()
"""How many packed caches were ``made`` in place of plain ones, by ways that compile nothing."""

Patches = Callable[[str], Iterable[AbstractContextManager[Any]]]


@dataclass(frozen=True)
class Known:
    """A failure that is understood and that packed caches do not cause.

    Attributes:
        test: a part of the names of the tests.
        message: a pattern that the message of the failure matches.
        reason: why the tests fail.
    """

    test: str
    message: str
    reason: str


@dataclass(frozen=True)
class Way:
    """How tests run.

    Attributes:
        name: ``plain``, or how the caches of the tests become packed.
        patches: makes the patches of a project for a policy.
        policy: the policy of packed caches.
        known: failures that are understood. The page names them.
    """

    name: str
    patches: Patches
    policy: str = LOSSLESS
    known: tuple[Known, ...] = ()

    @property
    def is_lossy(self) -> bool:
        return self.name != "plain" and self.policy != LOSSLESS

    def __str__(self) -> str:
        return self.name if self.name == "plain" else f"{self.name}, {self.policy}"


_REPORT = pytest.StashKey[kvcompile.Report]()


class Plugin:
    """Runs the tests of one module in one way.

    Attributes:
        marked: only tests with one of these marks run; all run if it is empty.
        named: only tests with one of these names run; all run if it is empty.
    """

    def __init__(self, way: Way, results: Path, marked: tuple[str, ...] = (), named: frozenset[str] = frozenset()):
        self.way, self.results, self.marked, self.named = way, results, marked, named

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_wanted(item)]

    def _is_wanted(self, item: pytest.Item) -> bool:
        is_marked = not self.marked or any(item.get_closest_marker(mark) for mark in self.marked)
        return is_marked and (not self.named or item.nodeid in self.named)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        packed_caches.clear()  # before fixtures, which may make caches

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the test with random numbers that its name determines, and count packed and refused attention."""
        seed = zlib.crc32(item.nodeid.encode())
        for set_seed in (torch.manual_seed, numpy.random.seed, random.seed):
            set_seed(seed)
        torch._dynamo.reset()
        with kvcompile.collect_reports() as report:
            item.stash[_REPORT] = report
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Write the outcome of the test. A test that does not get as far as its call has no attention to count."""
        result = yield
        if call.when == "call" or (call.when == "setup" and not result.passed):
            error = call.excinfo.value if call.excinfo is not None else None
            message = f"{type(error).__name__}: {_first_line(error)}" if error is not None else ""
            found = {"test": item.nodeid, "outcome": result.outcome, "message": message}
            self._write(found | counts(item.stash.get(_REPORT, kvcompile.Report())))
        return result

    def _write(self, found: dict[str, Any]) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def counts(report: kvcompile.Report) -> dict[str, Any]:
    refused = [site for site in report.sites if outcome(site) == "refused"]
    totals = report.totals
    return {
        "packed_caches": packed_caches["made"],
        "sites": totals.rewritten,
        "refused": {reason: len(modules) for reason, modules in modules_by_reason(refused).items()},
        "packed_calls": totals.calls - totals.plain_calls,
        "plain_calls": totals.plain_calls,
        "plain_because": dict(sum((runs.plain for runs in report.runs.values()), Counter())),
    }


@contextmanager
def prepared(way: Way) -> Iterator[None]:
    """Inside the ``with`` block, tests run in this way, and graphs run node by node."""
    with ExitStack() as patches:
        patches.enter_context(running_node_by_node(operators=True))
        for patch in way.patches(way.policy):  # a later patch may need an earlier one
            patches.enter_context(patch)
        if way.is_lossy:
            for patch in _within_bound():
                patches.enter_context(patch)
        yield


def packed_in_place_of(plain: Any, role: Role, policy: str) -> Any:
    """A packed cache of zeros in place of a plain cache; the plain one, if the format cannot hold it."""
    formats = kvcompile.Policy.load(policy).formats_for("", 0, 1)
    assert formats is not None, "the policy packs every layer"
    layout = formats.layout(role, plain.shape[-1], plain.dtype)
    if layout.unsupported(plain.dtype) is not None:
        return plain
    packed_caches["made"] += 1
    return kvcompile.PackedTensor.zeros(plain.shape, plain.dtype, layout, device=plain.device)


def _within_bound() -> Iterator[Any]:
    """Comparisons of floating-point tensors that allow for a lossy format, and no more."""
    allclose, assert_close = torch.allclose, torch.testing.assert_close

    def tolerance(expected: Any) -> float:
        finite = expected[expected.isfinite()]
        return BOUND * float(finite.abs().max()) if finite.numel() else 0.0

    def allclose_within_bound(x: Any, y: Any, rtol: float = 1e-5, atol: float = 1e-8, **kwargs: Any) -> bool:
        if not y.is_floating_point():
            return allclose(x, y, rtol=rtol, atol=atol, **kwargs)
        return allclose(x, y, rtol=rtol, atol=max(atol, tolerance(y)), **kwargs)

    def assert_close_within_bound(actual: Any, expected: Any, **kwargs: Any) -> None:
        if isinstance(expected, torch.Tensor) and expected.is_floating_point():
            kwargs |= {"rtol": kwargs.get("rtol") or 0.0, "atol": max(kwargs.get("atol") or 0.0, tolerance(expected))}
        assert_close(actual, expected, **kwargs)

    yield mock.patch.object(torch, "allclose", allclose_within_bound)
    yield mock.patch.object(torch.testing, "assert_close", assert_close_within_bound)
