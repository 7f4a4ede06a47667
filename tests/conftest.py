"""The selection of tests, and their number of threads. ``support/shared_fixtures.py`` has the fixtures."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from processor_times import ProcessorTimes

BEGIN_EARLY = (
    "hugging_face/test_tensor_parallel.py",
    "call/test_context_parallel.py",
    "fuzz/test_programs.py",
    "kernels/test_interpreter.py",
    "packed/test_saved_by_ranks.py",
    "packaging/test_packages.py",
    "call/test_failing_ranks.py",
    "forms/test_paged_caches.py",
    "call/test_output_code.py",
    "call/test_ahead_of_time.py",
    "packed/test_packed_residual_compiled.py",
    "forms/test_written_dtypes.py",
)
"""Files with tests of 10 to 20 seconds: a file that begins last would leave the other workers without work."""

CASES = pytest.StashKey[Counter[str]]()
"""The number of cases that were collected so far, by the test that has the mark ``sampled``."""


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """At most 8 workers by default, because each takes 1 to 3 GiB. ``-n 14`` starts 14."""
    return min((yield), 8)


def pytest_configure(config: pytest.Config) -> None:
    """Settings that make compilation in tests cheaper.

    Each process gets one thread, because processes share the cores: more threads would spin while they wait. The
    environment variables also hold for programs that tests start. Variables that the user has set stay unchanged.
    """
    # Inductor would compile and load a program for each instruction set of the processor, in every process.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if config.getoption("tx", None) and not is_worker:
        return  # the process that starts the workers; they would wait until it has imported PyTorch
    gc.disable()  # objects that imports and collection make live until the process ends
    config.pluginmanager.import_plugin("shared_fixtures")
    import torch
    import torch._functorch.config
    from cheaper_compilation import make_code_generation_cheaper, make_compilation_cheaper

    make_compilation_cheaper()
    make_code_generation_cheaper()
    # Tests replace passes by others, which the keys of stored code do not cover.
    torch._functorch.config.enable_autograd_cache = False
    if is_worker:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more would be processes that import PyTorch
    if file := config.getoption("processor_times"):
        config.pluginmanager.register(ProcessorTimes(file))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="run every N-th of the selected tests, from the K-th")
    parser.addoption("--processor-times", metavar="FILE", type=Path, help="append the processor time of each test")
    parser.addoption("--outside-sources", metavar="DIR", help="checkouts of other projects, for tests marked outside")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Every n-th case of a test with the mark ``sampled(n)`` runs by default, and the other cases become slow.

    Cases for GPUs and cases that are slow anyway do not count.
    """
    sampled = item.get_closest_marker("sampled")
    if sampled is None or item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
        return
    cases = item.config.stash.setdefault(CASES, Counter())
    test = item.nodeid.split("[")[0]
    if cases[test] % sampled.args[0]:
        item.add_marker(pytest.mark.slow(sampled=True))
    cases[test] += 1


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the part that ``--part`` names runs, files with long tests first.

    Without a CUDA device the tests that need one are skipped.
    """
    import torch

    gc.freeze()
    gc.enable()
    items.sort(key=lambda item: not item.path.as_posix().endswith(BEGIN_EARLY))  # the sort is stable
    part, parts = map(int, config.getoption("part").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1 :: parts]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
