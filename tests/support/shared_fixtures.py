"""The fixtures that tests of several files use, and how each test is run."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from _pytest.runner import runtestprotocol
from cheaper_compilation import in_one_piece_of_stack, skip_present_objects_in_collections
from node_by_node import attending_with_an_operator, rewriting_to_operators, running_node_by_node


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, in one piece of stack; generated code of a slow test has vector instructions."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    with with_vectors() if item.get_closest_marker("slow") else contextlib.nullcontext():
        in_one_piece_of_stack(runtestprotocol)(item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.fixture(scope="module", autouse=True)
def present_objects_skipped_in_collections() -> None:
    """A test that collects garbage looks at the objects of its own file, and skips the objects of earlier files."""
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
    """Run graphs node by node: the test checks the rewritten graph, not the code that Inductor generates.

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


WITHOUT_VECTORS = {"cpp.simdlen": 1}
"""Options with which Inductor writes kernels for a CPU without vector instructions, in half of the time.

They are the default of a test that is not slow (``make_code_generation_cheaper``).
"""


def with_vectors() -> contextlib.AbstractContextManager[None]:
    """Inside the ``with`` block, Inductor writes kernels with the vector instructions of the CPU, as for users."""
    return torch._inductor.config.patch({"cpp.simdlen": None})


@pytest.fixture
def vector_instructions() -> Iterator[None]:
    """Kernels have vector instructions. One graph reads their headers once, so the headers are not precompiled."""
    with with_vectors(), torch._inductor.config.patch({"cpp_cache_precompile_headers": False}):
        yield


def without_kernels_of_inductor() -> contextlib.AbstractContextManager[None]:
    """Inside the ``with`` block, generated code calls the operators of PyTorch, and the C++ compiler has nothing to do.

    For promises about the code around kernels: its arguments, its stored form, and how often it is generated.
    """
    setting = {"fallback_by_default": True}
    known = hasattr(torch._inductor.config, "fallback_by_default")  # not in PyTorch 2.11
    return torch._inductor.config.patch(setting) if known else contextlib.nullcontext()


@contextlib.contextmanager
def with_code_of_operators() -> Iterator[None]:
    """:func:`without_kernels_of_inductor`, with stores and attention as operators of ``kvcompile::``, as on a GPU.

    Inductor writes a call for each node, and the plain PyTorch of stores and attention has a hundred nodes.
    """
    with without_kernels_of_inductor(), rewriting_to_operators():
        yield


@pytest.fixture
def no_kernels_of_inductor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Code calls operators; with ``operators_traced`` it calls the plain PyTorch operators of stores and attention."""
    traced = "operators_traced" in request.fixturenames
    with without_kernels_of_inductor() if traced else with_code_of_operators():
        yield


@pytest.fixture
def attention_as_operator() -> Iterator[None]:
    """Generated code calls attention as an operator, and contains the stores; for promises about stores."""
    with attending_with_an_operator():
        yield


@pytest.fixture
def node_by_node_on_cpu(request: pytest.FixtureRequest) -> None:
    """On a CPU graphs run node by node, except in cases that are marked slow; for tests with a parameter ``device``."""
    slow = request.node.get_closest_marker("slow")
    if request.getfixturevalue("device") == "cpu" and (slow is None or slow.kwargs.get("sampled")):
        request.getfixturevalue("without_code_generation")


@pytest.fixture
def rewritten_graphs(without_code_generation: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.Graph]:
    """The graphs that would go to Inductor, one after the other; they run node by node."""
    import kvcompile.compilation.graph_compiler

    graphs: list[torch.fx.Graph] = []
    interpret = kvcompile.compilation.graph_compiler.compile_fx_inner

    def remember(gm: Any, example_inputs: Any, **kwargs: Any) -> Any:
        graphs.append(copy.deepcopy(gm.graph))
        return interpret(gm, example_inputs, **kwargs)

    monkeypatch.setattr(kvcompile.compilation.graph_compiler, "compile_fx_inner", remember)
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
