"""Runs a test module of another project with the plugin, in a separate process."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from outside.plugin import Plugin, Way, prepared

TIMEOUT = 1800
"""Seconds for one module in one way."""

CRASHED = "crashed"


@dataclass
class TestRun:
    """The outcome of one test in one way.

    Attributes:
        test: the name of the test.
        outcome: passed, skipped, failed, or crashed: the process ended or hung while the test ran.
        message: the first line of the error, or the reason why it was skipped.
        packed_caches: how many packed caches were made in place of plain ones, by ways that compile nothing.
        sites: how many attention sites of compiled graphs were rewritten.
        refused: reason -> how many modules were refused for it.
        packed_calls: calls of graphs that ran on packed caches.
        plain_calls: calls of the same graphs that ran as plain Inductor would.
        plain_because: reason -> how many calls ran as plain Inductor would for it.
    """

    __test__ = False

    test: str
    outcome: str
    message: str = ""
    packed_caches: int = 0
    sites: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    packed_calls: int = 0
    plain_calls: int = 0
    plain_because: dict[str, int] = field(default_factory=dict)


def run_module(
    root: Path,
    module: str,
    way: Way,
    marked: tuple[str, ...] = (),
    named: frozenset[str] = frozenset(),
    keywords: str = "",
    log: Path | None = None,
) -> dict[str, TestRun]:
    """Run the tests of a module, by name. A test that kills its process is ``crashed``, and later ones do not run.

    Args:
        root: the folder of the project, in which pytest runs.
        module: path of the test module in that folder.
        way: how the tests run.
        marked: only tests with one of these marks run; without marks, all.
        named: only these tests run; without names, all.
        keywords: only tests that match this expression of pytest's option ``-k`` run; if empty, all.
        log: the file for the output of pytest.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        plugin = Plugin(way, results, marked, named)
        process = multiprocessing.get_context("fork").Process(target=_run, args=(root, module, plugin, keywords, log))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            process.join()
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    runs = {run.test: run for run in (TestRun(**json.loads(line)) for line in lines)}
    if process.exitcode not in (0, 1):
        name = f"{module}: after {len(runs)} tests"
        runs[name] = TestRun(name, CRASHED, f"the process ended with {process.exitcode}")
    return runs


def _run(root: Path, module: str, plugin: Plugin, keywords: str, log: Path | None) -> None:
    torch.set_num_threads(1)  # a fork has none of the threads of its parent, and would wait for them
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of this project, which the other project does not know
    os.chdir(root)
    sys.path.insert(0, str(root))  # the project's own code, not an installed package of the same name
    output = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    options: list[Any] = ["-p", "no:cacheprovider", "-q", "-k", keywords, "--rootdir", str(root)]
    with prepared(plugin.way):
        code = pytest.main([*options, module], plugins=[plugin])
    os._exit(int(code) if code != pytest.ExitCode.NO_TESTS_COLLECTED else 0)  # threads of compilers are not waited for
