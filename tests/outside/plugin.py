"""A plugin of pytest for the tests of Transformers: they run on ``kvquant`` and do not know it.

A :class:`Way` says how the tests run:

- ``plain``: as they are. A ``CompileConfig`` with the default backend compiles with ``aot_eager``: the graphs are traced
  as for our backend, and no code is generated.
- ``config``: every ``CompileConfig`` with the default backend has ``kvquant`` as its backend, and ``generate()`` on a
  cache that can be compiled has such a ``CompileConfig`` if the test gives none, on CPUs too.
- ``compile``: ``kvcompile.compile`` compiles each model before its first ``generate()``. Calls with a ``compile_config``
  are left alone. This way reaches beam search, assisted decoding and caches that grow.

The plugin writes a line of JSON for each test: its outcome, and what became of attention while it ran.
"""

from __future__ import annotations

import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy
import pytest
import torch
from node_by_node import running_node_by_node

import kvcompile
from kvcompile.generation import Generation
from kvcompile.report.data import modules_by_reason, outcome

Name = Literal["plain", "config", "compile"]

LOSSLESS = "float32"
"""A policy under which packed caches hold every value of the caches in these tests, up to float32, exactly."""

BOUND = 0.1
"""The largest difference of scores in a lossy format, as a share of the largest score."""


@dataclass(frozen=True)
class Way:
    """How tests run: the name of the way, and the policy of packed caches."""

    name: Name
    policy: str = LOSSLESS

    @property
    def is_lossy(self) -> bool:
        return self.name != "plain" and self.policy != LOSSLESS

    def __str__(self) -> str:
        return self.name if self.name == "plain" else f"{self.name}, {self.policy}"


PLAIN = Way("plain")


class Plugin:
    """Runs the tests of one module in one way.

    Attributes:
        marked: tests run only if they have one of these marks, or if there are none.
        named: tests run only if their name is one of these, or if there are none.
    """

    def __init__(self, way: Way, results: Path, marked: tuple[str, ...] = (), named: frozenset[str] = frozenset()):
        self.way, self.results, self.marked, self.named = way, results, marked, named

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_wanted(item)]

    def _is_wanted(self, item: pytest.Item) -> bool:
        is_marked = not self.marked or any(item.get_closest_marker(mark) for mark in self.marked)
        return is_marked and (not self.named or item.nodeid in self.named)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Run the test with random numbers that its name determines, and write what became of attention."""
        seed = zlib.crc32(item.nodeid.encode())
        for set_seed in (torch.manual_seed, numpy.random.seed, random.seed):
            set_seed(seed)
        torch._dynamo.reset()
        found: dict[str, Any] = {"test": item.nodeid, "outcome": "passed", "message": ""}
        with kvcompile.collect_reports() as report:
            try:
                return (yield)
            except BaseException as error:
                is_skip = type(error).__name__ in ("Skipped", "SkipTest")
                found["outcome"] = "skipped" if is_skip else "failed"
                found["message"] = f"{type(error).__name__}: {_first_line(error)}"
                raise
            finally:
                self._write(found | _counts(report))

    def _write(self, found: dict[str, Any]) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _counts(report: kvcompile.Report) -> dict[str, Any]:
    refused = [site for site in report.sites if outcome(site) == "refused"]
    totals = report.totals
    return {
        "sites": totals.rewritten,
        "refused": {reason: len(modules) for reason, modules in modules_by_reason(refused).items()},
        "packed_calls": totals.calls - totals.plain_calls,
        "plain_calls": totals.plain_calls,
        "plain_because": dict(sum((runs.plain for runs in report.runs.values()), Counter())),
    }


@contextmanager
def prepared(way: Way) -> Iterator[None]:
    """Inside the block, the tests of Transformers run in this way, and graphs run node by node."""
    with ExitStack() as patches:
        for patch in (running_node_by_node(operators=True), *_PATCHES[way.name](way)):
            patches.enter_context(patch)
        if way.is_lossy:
            for patch in _within_bound():
                patches.enter_context(patch)
        yield


def _with_backend(backend: Any) -> Iterator[Any]:
    """Give every ``CompileConfig`` with the default backend another one."""
    from transformers import CompileConfig

    init = CompileConfig.__init__

    def with_backend(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.backend == "inductor":
            self.backend, self.mode = backend, None

    yield mock.patch.object(CompileConfig, "__init__", with_backend)


def _plainly(way: Way) -> Iterator[Any]:
    return _with_backend("aot_eager")


def _by_config(way: Way) -> Iterator[Any]:
    from transformers import CompileConfig, GenerationMixin

    criteria = GenerationMixin._valid_auto_compile_criteria

    def with_default_config(self: Any, model_kwargs: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if config.compile_config is None:
            config.compile_config = CompileConfig()
        return criteria(self, model_kwargs, config, *args, **kwargs)

    yield from _with_backend(kvcompile.kvquant(policy=way.policy, on_unsupported="ignore"))
    yield mock.patch.object(CompileConfig, "_compile_all_devices", True)
    yield mock.patch.object(GenerationMixin, "_valid_auto_compile_criteria", with_default_config)


def _by_compile(way: Way) -> Iterator[Any]:
    from transformers import GenerationMixin

    generate = GenerationMixin.generate

    def compiled_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = (kwargs.get("generation_config"), self.generation_config)
        has_config = kwargs.get("compile_config") or any(getattr(config, "compile_config", None) for config in configs)
        if has_config or Generation.of(self) is not None or self._compiled_call_impl is not None:
            return generate(self, *args, **kwargs)
        kvcompile.compile(self, policy=way.policy, on_unsupported="ignore")
        return self.generate(*args, **kwargs)

    yield from _with_backend("aot_eager")
    yield mock.patch.object(GenerationMixin, "generate", compiled_generate)


_PATCHES = {"plain": _plainly, "config": _by_config, "compile": _by_compile}


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
