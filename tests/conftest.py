"""Which tests run, with how many threads, and the fixtures that tests of several files use."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
from cheaper_compilation import make_compilation_cheaper, skip_present_objects_in_collections
from node_by_node import running_node_by_node
from processor_times import ProcessorTimes


def pytest_configure(config: pytest.Config) -> None:
    """Settings that make compilation in tests cheaper.

    One thread for each of the processes that share the cores: more would wait for each other, and spin meanwhile.
    Environment variables hold for the programs that tests start, too, and give way to the user's.
    """
    make_compilation_cheaper()
    # Tests replace passes by others, which the keys of stored code do not cover.
    torch._functorch.config.enable_autograd_cache = False
    # Inductor would compile and load a program for each instruction set of the processor, in every process.
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # more are processes that import PyTorch first
    if file := config.getoption("processor_times"):
        config.pluginmanager.register(ProcessorTimes(file))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="K/N", help="run every N-th of the selected tests, from the K-th")
    parser.addoption("--processor-times", metavar="FILE", type=Path, help="append the processor time of each test")
    parser.addoption("--outside-sources", metavar="DIR", help="checkouts of other projects, for tests marked outside")


@pytest.hookimpl(trylast=True)  # after the selection by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the part that ``--part`` names runs. Without a CUDA device the tests that need one are skipped."""
    part, parts = map(int, config.getoption("part").split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = items[part - 1 :: parts]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    skip_present_objects_in_collections()


@pytest.fixture
def seed_without_grad() -> Iterator[None]:
    """The same random numbers in every test, and no gradients."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def fresh_compiler(seed_without_grad: None) -> Iterator[None]:
    """Nothing is compiled yet, and nothing counted."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def without_code_generation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run graphs node by node: what the passes make of a graph is tested, not the code Inductor generates.

    Stores and attention are operators of ``kvcompile::`` in these graphs, as on a GPU. With ``operators_traced`` their
    plain PyTorch is traced into the graphs, as for generated code on a CPU; this takes twice as long.
    """
    torch._dynamo.reset()
    with running_node_by_node(operators="operators_traced" not in request.fixturenames):
        yield
    torch._dynamo.reset()


@pytest.fixture
def operators_traced() -> None:
    """For tests ``without_code_generation``: graphs hold the plain PyTorch of stores and attention."""


@pytest.fixture
def node_by_node_on_cpu(request: pytest.FixtureRequest) -> None:
    """On a CPU graphs run node by node, except in slow cases; for tests that have a parameter ``device``."""
    if request.getfixturevalue("device") == "cpu" and not request.node.get_closest_marker("slow"):
        request.getfixturevalue("without_code_generation")


@pytest.fixture
def rewritten_graphs(without_code_generation: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that would go to Inductor, one after the other; they run node by node."""
    import kvcompile.backend

    graphs: list[torch.fx.Graph] = []
    interpret = kvcompile.backend.compile_fx_inner

    def remember(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(copy.deepcopy(gm.graph))
        return interpret(gm, example_inputs, **kwargs)

    monkeypatch.setattr(kvcompile.backend, "compile_fx_inner", remember)
    return graphs


@pytest.fixture
def dumps_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verify`` writes the folder of a mismatch below ``tmp_path``, which pytest deletes after some runs."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # keeps the cache of all tests where it is: Inductor looks for a place once
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> list[Any]:
    """One element for every CUDA graph that is recorded during the test."""
    from torch._inductor.cudagraph_trees import CUDAGraphTreeManager

    recorded: list[Any] = []
    record = CUDAGraphTreeManager.record_function

    def record_function(self: Any, inputs: Any, function_id: Any) -> Any:
        recorded.append(function_id)
        return record(self, inputs, function_id)

    monkeypatch.setattr(CUDAGraphTreeManager, "record_function", record_function)
    return recorded
