"""The folder that :func:`kvcompile.debug` writes: a folder for each graph, the report, the policies, and an index."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvcompile.debugging.output_code import PackedParts, marked
from kvcompile.debugging.stages import Stage
from kvcompile.errors import KVCompileError
from kvcompile.policy.policy import Policy
from kvcompile.report.data import GraphReport
from kvcompile.report.report import Report

INDEX = "index.md"
DEPYF = "depyf"
OTHER_CODE = "other_output_code"
PASSES = "passes"

_TITLE = "# Dump of kvcompile.debug"
_REPORTS = ("report.txt", "report.html", "report.json")
_OURS = (INDEX, *_REPORTS, "policy.yaml", "policy_[0-9]*.yaml", "graph_[0-9]*", DEPYF, OTHER_CODE)


@dataclass
class DumpedGraph:
    """One graph that the backend compiled.

    Attributes:
        policy: the name of the policy's file.
        compile_id: Dynamo's name of the compilation.
        report: the outcome of the graph's sites; None if the graph has no attention.
    """

    policy: str
    compile_id: str
    report: GraphReport | None = None
    files: list[tuple[str, str]] = field(default_factory=list)
    """(file, its description), in the order of writing."""
    after_last_pass: str = ""
    """The graph after the last pass."""
    packed: PackedParts = field(default_factory=PackedParts)
    """The facts about packed caches in the rewritten graph."""


class DumpFolder:
    """The folder of an open dump; any thread may call its methods."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, or replace the dump that is in it.

        Raises:
            KVCompileError: the folder cannot be written, is a file, or holds files that are not a dump.
        """
        self.folder = folder
        self.graphs: list[DumpedGraph] = []
        self._policies: dict[str, str] = {}
        self._other_code = 0
        self._lock = threading.Lock()
        with _writing(folder):
            _prepare(folder)
        self.write(INDEX, f"{_TITLE}\n\nThe program is still running, or was killed.\n")

    def write(self, name: str, text: str) -> Path:
        """Write a file of the dump; raises KVCompileError."""
        path = self.folder / name
        with _writing(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path

    # The methods of kvcompile.debugging.stages.Watcher

    def begin(self, policy: Policy, compile_id: str) -> int:
        """Begin a graph; returns its number, counted from 1."""
        with self._lock:
            self.graphs.append(DumpedGraph(self._policy_file(policy), compile_id))
            return len(self.graphs)

    def stage(self, number: int, stage: Stage, text: str) -> None:
        """Write a graph at one of its stages."""
        if stage is Stage.rewritten:
            self.graphs[number - 1].packed = PackedParts.of(text)
        self._add(number, f"{stage.number}_{stage.name}.py", stage.value, text)

    def passed(self, number: int, step: int, name: str, text: str) -> None:
        """Write the graph after a pass, if the pass changed it."""
        graph = self.graphs[number - 1]
        if text != graph.after_last_pass:
            graph.after_last_pass = text
            self._add(number, f"{PASSES}/{step:02}_{name}.py", f"after pass {step}, {name}", text)

    def reported(self, number: int, graph: GraphReport) -> None:
        """Keep the outcome of a graph's sites."""
        self.graphs[number - 1].report = graph

    def output_code(self, number: int | None, code: str) -> Path:
        """Write Inductor's code for a graph, and return the file. ``number`` is None for graphs of another backend."""
        if number is None:
            with self._lock:
                self._other_code += 1
                return self.write(f"{OTHER_CODE}/{self._other_code}.py", code)
        files = self.graphs[number - 1].files
        earlier = sum("output_code" in name for name, _ in files)
        name = f"{len(Stage) + 1}_output_code{f'_{earlier + 1}' if earlier else ''}.py"
        what = "the code that Inductor generated, Triton kernels or C++ included; `# kvquant:` marks packed caches"
        return self._add(number, name, what, marked(code, self.graphs[number - 1].packed))

    def finish(self, report: Report, remarks: list[str]) -> None:
        """Write the report and the index; ``remarks`` go to the top of the index."""
        self.write("report.txt", f"{report}\n")
        self.write("report.json", f"{report.to_json()}\n")
        with _writing(self.folder):
            report.to_html(self.folder / "report.html")
        self.write(INDEX, "\n".join(self._index(report, remarks)) + "\n")

    def _add(self, number: int, name: str, what: str, text: str) -> Path:
        name = f"graph_{number}/{name}"
        self.graphs[number - 1].files.append((name, what))
        return self.write(name, text)

    def _policy_file(self, policy: Policy) -> str:
        """The name of the file with this policy; each policy has one file."""
        known = self._policies.get(policy.fingerprint())
        if known is not None:
            return known
        name = f"policy_{len(self._policies) + 1}.yaml" if self._policies else "policy.yaml"
        self.write(name, policy.to_yaml())
        self._policies[policy.fingerprint()] = name
        return name

    def _index(self, report: Report, remarks: list[str]) -> Iterator[str]:
        yield from (_TITLE, "", *map(_item, remarks), "")
        yield _item("[report.txt](report.txt): every attention site, its outcome, and the reason")
        yield _item("[report.html](report.html): the same as a page, with a drawing of each site")
        yield _item("[report.json](report.json): the same as data")
        for name in self._policies.values():
            yield _item(f"[{name}]({name}): the policy")
        if not self.graphs:
            yield from ("", "The backend compiled no graph: the block called no function that is compiled with it.")
        for number, graph in enumerate(self.graphs, start=1):
            yield from ("", f"## Graph {number}, compile id {graph.compile_id}", "", _summary(graph, report), "")
            if len(self._policies) > 1:
                yield _item(f"[{graph.policy}]({graph.policy}): its policy")
            for name, what in graph.files:
                yield _item(f"[{name}]({name}): {what}")
        yield from self._other_files()

    def _other_files(self) -> Iterator[str]:
        if self._other_code:
            yield from ("", "## Output code of other graphs", "")
            yield "Compiled by other backends, or by plain Inductor for a call that could not use packed caches."
            yield ""
            for number in range(1, self._other_code + 1):
                yield _item(f"[{OTHER_CODE}/{number}.py]({OTHER_CODE}/{number}.py)")
        written = {pattern: sorted((self.folder / DEPYF).glob(pattern)) for pattern in _DEPYF_FILES}
        if any(written.values()):
            yield from ("", "## Files of depyf", "")
            for pattern, what in _DEPYF_FILES.items():
                if written[pattern]:
                    yield _item(f"`{DEPYF}/{pattern}`: {what}")
                    yield from (f"  {_item(f'[{path.name}]({DEPYF}/{path.name})')}" for path in written[pattern])


_DEPYF_FILES = {
    "full_code_for_*.py": "functions, their guards, and the code that Dynamo runs in their place",
    "__transformed_code_*.py": "decompiled bytecode that Dynamo runs in place of functions",
    "__compiled_fn_*.py": "graphs at PyTorch's own stages",
    "problems.txt": "functions that depyf could not dump, and why",
}


def _summary(graph: DumpedGraph, report: Report) -> str:
    if graph.report is None:
        return "It has no attention: plain Inductor compiles it."
    place = next(place for place, other in enumerate(report.graphs, start=1) if other is graph.report)
    totals = Report([graph.report]).totals
    counts = f"{totals.rewritten} rewritten, {totals.refused} refused, {totals.skipped} skipped"
    return f"Graph {place} of the report. Attention layers: {counts}."


def _item(text: str) -> str:
    return f"- {text}"


def _prepare(folder: Path) -> None:
    """Make ``folder``, or remove an earlier dump from it."""
    if folder.exists() and not folder.is_dir():
        raise KVCompileError(f"{folder} is a file; give debug() a folder")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        if not _is_dump(folder):
            raise KVCompileError(f"{folder} holds files that are not a dump of debug(); give it a new or empty folder")
        for path in (path for pattern in _OURS for path in folder.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _is_dump(folder: Path) -> bool:
    index = folder / INDEX
    return index.is_file() and index.read_text(encoding="utf-8", errors="replace").startswith(_TITLE)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        place = os.fspath(error.filename) if error.filename else str(folder)
        raise KVCompileError(f"debug() cannot write to {folder}: {place}: {reason}") from error
