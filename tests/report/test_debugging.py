"""``debug`` dumps a program's graphs, changes no result, and leaves no trace in PyTorch."""

from __future__ import annotations

import ast
import copy
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from inspect_with_depyf import HIDDEN, Decoder, excerpt, main
from node_by_node import running_node_by_node
from shared_fixtures import without_kernels_of_inductor
from torch import Tensor
from torch._dynamo import eval_frame
from torch._inductor.codecache import PyCodeCache
from torch.fx import GraphModule

import kvcompile
from kvcompile.errors import KVCompileError
from kvcompile.passes.pipeline import PIPELINE
from kvcompile.policy.policy import Policy

POLICY = {"rules": [{"match": {"layers": "0"}, "dtype": "int8_per_token_head"}], "default": {"dtype": "fp8_e4m3"}}
STAGES = ("1_dynamo", "2_marked", "3_aten", "4_rewritten")

needs_decompiler = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="depyf 0.20 decompiles bytecode of Python 3.12 and earlier"
)


def step(model: Callable[..., Any], position: int, device: str = "cpu") -> Tensor:
    """The hidden state after one token; each position has a different token."""
    torch.manual_seed(position)
    with torch.no_grad():
        return model(torch.randn(1, 1, HIDDEN).to(device), torch.tensor([position], device=device))[0]


class Trace(logging.Handler):
    """A receiver of the artifacts of ``TORCH_TRACE``."""

    def __init__(self) -> None:
        super().__init__()
        self.artifacts: list[tuple[str, str]] = []

    def emit(self, record: Any) -> None:
        if "artifact" in record.metadata:
            self.artifacts.append((record.metadata["artifact"]["name"], record.payload))


@dataclass(frozen=True)
class Dump:
    """The results of a model that was compiled before, and compiled again in a debug() block."""

    folder: Path
    report: kvcompile.Report
    trace: Trace
    results: list[Tensor]
    expected: list[Tensor]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("debug") / "out"
    torch.manual_seed(0)
    model = Decoder().eval()
    compiled = torch.compile(model, backend="kvquant", options={"policy": POLICY, "on_unsupported": "ignore"})
    with running_node_by_node():
        step(compiled, 0)  # packs the caches
    with without_kernels_of_inductor():
        return dump_of(model, compiled, folder)


def dump_of(model: Decoder, compiled: Callable[..., Any], folder: Path) -> Dump:
    caches = {name: copy.deepcopy(cache) for name, cache in model.named_buffers()}
    expected = [step(compiled, position) for position in (1, 2, 3)]
    for name, cache in caches.items():
        module, _, buffer = name.rpartition(".")
        setattr(model.get_submodule(module), buffer, cache)
    trace = Trace()
    torch._logging._internal.trace_log.addHandler(trace)
    try:
        with kvcompile.debug(folder) as report:
            results = [step(compiled, 1), step(compiled, 2)]
    finally:
        torch._logging._internal.trace_log.removeHandler(trace)
    results.append(step(compiled, 3))
    return Dump(folder, report, trace, results, expected)


# The files of the folder


@pytest.mark.slow
def test_the_report_has_the_seconds_of_every_pass_in_order(dump: Dump) -> None:
    (graph,) = json.loads(dump.read("report.json"))["graphs"]
    assert list(graph["passes"]) == [step.name for step in PIPELINE]
    assert all(seconds >= 0 for seconds in graph["passes"].values())


def test_the_folder_has_every_stage_of_every_graph_in_order_and_an_index_of_all_files(dump: Dump) -> None:
    files = {str(path.relative_to(dump.folder)) for path in dump.folder.rglob("*") if path.is_file()}
    ours = {"report.txt", "report.json", "report.html", "policy.yaml"}
    ours |= {f"graph_1/{stage}.py" for stage in (*STAGES, "5_output_code")}
    passes = {name for name in files if name.startswith("graph_1/passes/")}
    numbered = {step.name: f"graph_1/passes/{number:02}_{step.name}.py" for number, step in enumerate(PIPELINE, 1)}
    assert {numbered["pack_caches"], numbered["fuse_attention"]} <= passes <= set(numbered.values())
    links = re.findall(r"\]\((.*?)\)", dump.read("index.md"))
    assert {name for name in files if not name.startswith("depyf/")} == {"index.md", *ours, *passes}
    assert sorted(links) == sorted(files - {"index.md"})
    for group in (ours, passes):
        in_order = [link for link in links if link in group and link.startswith("graph_")]
        assert in_order == sorted(in_order)


def test_stages_are_python_and_show_what_was_done(dump: Dump) -> None:
    dynamo, marked, aten, rewritten = (dump.read(f"graph_1/{stage}.py") for stage in STAGES)
    for text in (dynamo, marked, aten, rewritten):
        (graph,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
        assert graph.name == "GraphModule"
    assert len(re.findall(r"= torch\S*\.scaled_dot_product_attention\(", dynamo)) == 2
    assert marked.count("kvcompile.sdpa.default(") == aten.count("kvcompile.sdpa.default(") == 2
    assert "index_copy_(" in marked
    assert "index_put.default(" in aten
    assert "kvcompile.sdpa" not in rewritten


def test_lines_say_what_they_do_for_which_site(dump: Dump) -> None:
    def parts(stage: str, module: str) -> list[str]:
        return [line.rpartition(": ")[2] for line in excerpt(dump.folder / "graph_1" / f"{stage}.py", f"{module}: ")]

    assert parts("1_dynamo", "layers.0") == parts("2_marked", "layers.1") == ["attention"]
    logical = ["key write", "value write", "attention"]
    assert [part for part in parts("3_aten", "layers.1") if "write back" not in part and "read" not in part] == logical
    new = dict.fromkeys(parts("4_rewritten", "layers.0"))
    assert list(new) == ["key store", "value store", "packed attention", "key write back", "value write back"]
    inputs = dump.read("graph_1/4_rewritten.py").partition("# inputs:")[2].partition("import torch")[0]
    assert re.search(r"_packed  L\['self'\]\S*'0'\S*\['keys'\]  layers\.0: packed key cache$", inputs, re.M)
    assert re.search(r"_packed  L\['self'\]\S*'0'\S*\['values'\]  layers\.0: packed value cache$", inputs, re.M)


def test_stages_name_the_outcome_of_each_site_and_its_reason(dump: Dump) -> None:
    (refused,) = (site for site in dump.report.sites if not site.rewritten)
    assert refused.module == "layers.1"
    for stage in ("3_aten", "4_rewritten"):
        head = dump.read(f"graph_1/{stage}.py").partition("# inputs:")[0]
        assert "#   layers.0: is packed" in head
        assert f"#   layers.1: is not packed: {refused.reason}\n" in head
    assert "key int8_per_token_head, value int8_per_token_head" in head


def test_modules_are_named_where_they_change(dump: Dump) -> None:
    modules = re.findall(r"^ +# module (\S+)$", dump.read("graph_1/1_dynamo.py"), re.M)
    assert modules[:3] == ["layers.0.query", "layers.0", "layers.0.key"]
    assert "layers.1.out" in modules


def test_output_code_is_what_ran(dump: Dump) -> None:
    code = dump.folder / "graph_1" / "5_output_code.py"
    assert "async_compile.wait(globals())" in code.read_text()
    assert str(code) in [module.__file__ for module in PyCodeCache.modules]


def test_the_report_and_the_policy_belong_to_the_block(dump: Dump) -> None:
    assert dump.read("report.txt") == f"{dump.report}\n"
    assert dump.read("report.json") == f"{dump.report.to_json()}\n"
    assert "layers.1" in dump.read("report.html")
    assert Policy.from_file(dump.folder / "policy.yaml") == Policy.load(POLICY)


def test_the_report_has_the_neighbourhood_of_every_site(dump: Dump) -> None:
    packed, left = dump.report.graphs[0].surroundings
    assert packed.before is not None
    assert packed.after is not None
    assert left.before is not None
    assert left.after is None
    labels = [box.label for box in packed.after.boxes]
    assert {"packed key cache", "key store", "packed value cache", "value store", "packed attention"} <= set(labels)
    assert any(".abs()" in text for box in left.before.boxes for text in (box.label, *box.detail)), (
        "the second use of its cache, for which it was refused"
    )


@needs_decompiler
def test_depyf_dumps_functions_guards_and_bytecode(dump: Dump) -> None:
    assert "def guard_" in dump.read("depyf/full_code_for_forward_0.py")
    assert "def __transformed_code_0_for_forward(" in dump.read("depyf/__transformed_code_0_for_forward.py")
    assert not list((dump.folder / "depyf").glob("kernel*"))


def test_the_index_says_how_the_run_differed(dump: Dump) -> None:
    index = dump.read("index.md")
    assert "were compiled again" in index
    assert "caches of compiled graphs were off" in index
    assert "Attention layers: 1 rewritten, 1 refused, 0 skipped." in index


def test_the_trace_has_the_same_graphs(dump: Dump) -> None:
    artifacts = [(name, text) for name, text in dump.trace.artifacts if name.startswith("kvquant_")]
    assert artifacts == [(f"kvquant_{stage}", dump.read(f"graph_1/{stage}.py")) for stage in STAGES]


def test_results_equal_the_results_without_the_block(dump: Dump) -> None:
    for result, expected in zip(dump.results, dump.expected, strict=True):
        assert torch.equal(result, expected)


@pytest.mark.usefixtures("no_kernels_of_inductor")
def test_the_example_dumps_and_shows_excerpts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--out", str(tmp_path / "out"), "--policy", "int8_per_token_head"])
    shown = capsys.readouterr().out
    assert f"start with {tmp_path / 'out' / 'index.md'}" in shown
    assert re.search(r"^index_put: .* # layers\.0: key write$", shown, re.M)
    assert re.search(r"^expand.* # layers\.0: key store$", shown, re.M)
    assert "2 attention layers: 1 rewritten, 1 refused, 0 skipped" in shown
    assert max(len(line) for line in shown.splitlines() if "  # layers.0: " in line) <= 100


@needs_decompiler
@pytest.mark.usefixtures("no_kernels_of_inductor")
def test_depyf_alone_dumps_our_stages_too(tmp_path: Path) -> None:
    depyf = pytest.importorskip("depyf")
    torch._dynamo.reset()
    model = Decoder().eval()
    compiled = torch.compile(model, backend="kvquant", options={"policy": POLICY, "on_unsupported": "ignore"})
    with pytest.warns(UserWarning, match="debug `torch.compile`"), depyf.prepare_debug(str(tmp_path)):
        step(compiled, 0)
    names = [path.name for path in tmp_path.iterdir()]
    for stage in STAGES:
        assert sum(f".kvquant_{stage}." in name for name in names) == 1, stage
    assert any(name.startswith("full_code_for_forward") for name in names)


@pytest.mark.gpu
def test_on_a_gpu_the_dump_has_triton_kernels_and_our_ops(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Decoder().eval().cuda()
    compiled = torch.compile(model, backend="kvquant", options={"policy": POLICY, "on_unsupported": "ignore"})
    results = [step(compiled, 0, "cuda")]
    for position in (1, 2):
        with kvcompile.debug(tmp_path / "out"):
            results.append(step(compiled, position, "cuda"))
    code = (tmp_path / "out" / "graph_1" / "5_output_code.py").read_text()
    assert "async_compile.triton(" in code
    assert "torch.ops.kvcompile.attention" in code
    rewritten = tmp_path / "out" / "graph_1" / "4_rewritten.py"
    parts = [line.rpartition(": ")[2] for line in excerpt(rewritten, "layers.0: ")]
    assert {"key store", "value store", "packed attention"} <= set(parts)
    assert all(result.isfinite().all() for result in results)


# Compiling again


class Backend:
    """A backend that runs graphs unchanged and counts them."""

    def __init__(self) -> None:
        self.graphs = 0
        self.caches: list[bool] = []

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        self.caches.append(torch._inductor.config.fx_graph_cache or torch._functorch.config.enable_autograd_cache)
        return gm.forward


@pytest.fixture
def backend() -> Iterator[Backend]:
    with torch._inductor.config.patch(fx_graph_cache=True):
        yield Backend()


def doubled(backend: Backend) -> Callable[[Tensor], Tensor]:
    """A compiled function with a new code object, for which Dynamo has no compiled code yet."""

    def double(x: Tensor) -> Tensor:
        return 2 * x

    double.__code__ = double.__code__.replace()
    return torch.compile(double, backend=backend)


def test_a_block_compiles_anew_once_and_the_earlier_code_serves_afterwards(backend: Backend, tmp_path: Path) -> None:
    double, x = doubled(backend), torch.ones(3)
    double(x)
    for blocks in range(1, 4):
        with kvcompile.debug(tmp_path, depyf=False):
            assert torch.equal(double(x) + double(x), 4 * x)
        assert backend.graphs == 1 + blocks
    double(x)
    assert backend.graphs == 4
    assert eval_frame._callback_from_stance.__module__ == eval_frame.__name__


def test_blocks_do_not_use_up_the_limit_of_recompilations(backend: Backend, tmp_path: Path) -> None:
    double = doubled(backend)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        double(torch.ones(3))
        for _ in range(4):
            with kvcompile.debug(tmp_path, depyf=False):
                for dtype in (torch.float32, torch.float64, torch.float16):
                    double(torch.ones(3, dtype=dtype))
        double(torch.ones(3, dtype=torch.float64))
        with pytest.raises(Exception, match="recompile_limit"):
            double(torch.ones(3, dtype=torch.float16))


def test_two_backends_of_one_function_are_told_apart(backend: Backend, tmp_path: Path) -> None:
    def negate(x: Tensor) -> Tensor:
        return -x

    other = Backend()
    with kvcompile.debug(tmp_path, depyf=False):
        for _ in range(2):
            torch.compile(negate, backend=backend)(torch.ones(3))
            torch.compile(negate, backend=other)(torch.ones(3))
    assert (backend.graphs, other.graphs) == (1, 1)


def test_caches_are_off_in_every_thread_that_compiles(backend: Backend, tmp_path: Path) -> None:
    double = doubled(backend)
    with kvcompile.debug(tmp_path, depyf=False):
        thread = threading.Thread(target=double, args=(torch.ones(3),))
        thread.start()
        thread.join()
    double(torch.ones(3))
    assert backend.caches == [False, True]


# Trouble


@needs_decompiler
def test_errors_of_depyf_go_to_a_file_and_the_program_goes_on(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from depyf.decompiler import DecompilationError, Decompiler

    errors = iter([DecompilationError("no such bytecode"), *(KeyError("surprise") for _ in range(99))])

    def decompile(*args: Any, **kwargs: Any) -> str:
        raise next(errors)

    monkeypatch.setattr(Decompiler, "decompile", decompile)
    with kvcompile.debug(tmp_path):
        assert torch.equal(doubled(backend)(torch.ones(3)), torch.full((3,), 2.0))
    problems = (tmp_path / "depyf" / "problems.txt").read_text()
    assert "no such bytecode" in problems
    assert "surprise" in problems
    assert "depyf/problems.txt" in (tmp_path / "index.md").read_text()
    assert "Traceback" not in capfd.readouterr().err


def test_an_exception_in_the_block_is_the_callers_and_the_dump_says_so(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), kvcompile.debug(tmp_path, depyf=False):
        _ = 1 / 0
    assert "The block ended with ZeroDivisionError: division by zero" in (tmp_path / "index.md").read_text()
    with kvcompile.debug(tmp_path, depyf=False):
        pass


def test_a_block_in_which_nothing_is_compiled_says_so(tmp_path: Path) -> None:
    with kvcompile.debug(tmp_path, depyf=False) as report:
        pass
    assert not report.graphs
    assert "The backend compiled no graph" in (tmp_path / "index.md").read_text()
    assert "kvquant compiled no attention here" in (tmp_path / "report.html").read_text()


def test_an_earlier_dump_is_replaced_and_other_files_in_it_are_kept(tmp_path: Path) -> None:
    with kvcompile.debug(tmp_path, depyf=False):
        pass
    (tmp_path / "graph_7").mkdir()
    (tmp_path / "graph_7" / "1_dynamo.py").touch()
    (tmp_path / "notes.txt").write_text("mine")
    with kvcompile.debug(tmp_path, depyf=False):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.md",
        "notes.txt",
        "report.html",
        "report.json",
        "report.txt",
    ]


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path: Path) -> None:
    (tmp_path / "report.txt").write_text("mine")
    with pytest.raises(KVCompileError, match="holds files that are not a dump of debug"), kvcompile.debug(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["report.txt"]


@pytest.mark.parametrize(
    ("place", "message"),
    [("file", "is a file; give debug() a folder"), ("file/below", "Not a directory")],
)
def test_a_place_that_cannot_be_a_folder_is_an_error_that_names_it(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(KVCompileError, match=re.escape(message)) as caught, kvcompile.debug(tmp_path / place):
        pass
    assert str(tmp_path) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_text(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device", str(self))

    full = pytest.raises(KVCompileError, match=r"report\.txt: No space left on device")
    with full, kvcompile.debug(tmp_path, depyf=False):
        monkeypatch.setattr(Path, "write_text", write_text)


def test_one_block_at_a_time(tmp_path: Path) -> None:
    with kvcompile.debug(tmp_path / "outer", depyf=False):
        with pytest.raises(KVCompileError, match=r"open already, for .*outer"), kvcompile.debug(tmp_path / "inner"):
            pass
        assert not (tmp_path / "inner").exists()
    with kvcompile.debug(tmp_path / "inner", depyf=False):
        pass


def test_without_depyf_the_error_names_the_remedies_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvcompile.debug(tmp_path, depyf=False):
        pass
    before = (tmp_path / "index.md").read_text()
    monkeypatch.setitem(sys.modules, "depyf.explain.global_variables", None)
    missing = pytest.raises(KVCompileError, match=r"pip install depyf, or pass depyf=False")
    with missing, kvcompile.debug(tmp_path):
        pass
    assert (tmp_path / "index.md").read_text() == before


def test_inside_a_dump_of_depyf_there_is_no_second_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = pytest.importorskip("depyf.explain.global_variables")
    monkeypatch.setitem(variables.data, "is_inside_prepare_debug", True)
    refused = pytest.raises(KVCompileError, match=r"end the block of depyf\.prepare_debug")
    with refused, kvcompile.debug(tmp_path / "out"):
        pass
    assert not (tmp_path / "out").exists()
