"""The stages of every graph as readable Python.

Each stage becomes an artifact of ``TORCH_TRACE`` (tlparse shows it), and a file of an open :func:`kvcompile.debug`
block. If no block is open, it becomes a file of an active ``depyf.prepare_debug``. Graphs are formatted only if a tool
is active.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

from torch.fx import GraphModule, Node

from kvcompile.compat.observing import compile_id, depyf_is_active, lazy_format_graph_code, trace_structured
from kvcompile.passes.graph.modules import module_name
from kvcompile.passes.mark.mark_attention import is_attention
from kvcompile.passes.marker import Marker, is_marker
from kvcompile.passes.notes.roles import role_of
from kvcompile.passes.packing import Packing
from kvcompile.passes.pipeline import DECIDED, PIPELINE, Pass
from kvcompile.passes.site import Site
from kvcompile.policy.policy import Policy
from kvcompile.report.data import GraphReport


class Stage(enum.Enum):
    """The stages of a graph, in order; the value describes the stage."""

    dynamo = "Dynamo's graph"
    marked = "Dynamo's graph with a marker op for every attention"
    aten = "the functional ATen graph before the rewrite"
    rewritten = "the rewritten graph, which Inductor compiles"

    @property
    def number(self) -> int:
        """The place of the stage, counted from 1."""
        return list(Stage).index(self) + 1


class Watcher(Protocol):
    """A receiver of every graph that is compiled. Any thread may call its methods."""

    def begin(self, policy: Policy, compile_id: str) -> int:
        """A graph is being compiled; returns its number."""

    def stage(self, number: int, stage: Stage, text: str) -> None:
        """Graph ``number`` has reached ``stage``."""

    def passed(self, number: int, step: int, name: str, text: str) -> None:
        """Pass ``step`` of the pipeline, counted from 1, has left graph ``number`` in this form."""

    def reported(self, number: int, graph: GraphReport) -> None:
        """The sites of graph ``number`` have their outcomes."""


_watcher: Watcher | None = None
_current: ContextVar[int | None] = ContextVar("kvcompile_graph", default=None)


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` all graphs that any thread compiles inside the ``with`` block."""
    global _watcher
    _watcher = watcher
    try:
        yield
    finally:
        _watcher = None


def current_graph() -> int | None:
    """The number of the graph that the backend is compiling in this thread; None outside of the backend."""
    return _current.get()


class GraphStages:
    """Shows the stages of one graph to the tools that are active."""

    def __init__(self, policy: Policy, sources: Mapping[int, str]) -> None:
        """
        Args:
            policy: the policy of the compilation.
            sources: the user's name of each input of Dynamo's graph, by position.
        """
        self._sources = dict.fromkeys(Stage, sources)
        self._compile_id = compile_id()
        self._watcher = _watcher
        self._number = self._watcher.begin(policy, self._compile_id) if self._watcher is not None else None

    @property
    def are_wanted(self) -> bool:
        """Whether :func:`kvcompile.debug` or depyf dumps the stages, so that every pass must run."""
        return self._watcher is not None or depyf_is_active()

    def passed(self, step: Pass, packing: Packing) -> None:
        """Show the graph after a pass of the pipeline."""
        sources = {index: known.source for index, known in enumerate(packing.inputs)}
        self._sources |= dict.fromkeys((Stage.aten, Stage.rewritten), sources)
        if self._watcher is not None and self._number is not None:
            packing.gm.recompile()
            text = readable(packing.gm, sources)
            self._watcher.passed(self._number, PIPELINE.index(step) + 1, step.name, text)
        if step is DECIDED:
            self.show(Stage.aten, packing.gm, packing.sites)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Set :func:`current_graph` to this graph's number inside the ``with`` block."""
        token = _current.set(self._number)
        try:
            yield
        finally:
            _current.reset(token)

    def show(self, stage: Stage, gm: GraphModule, sites: Sequence[Site] = ()) -> None:
        """Show the graph at ``stage``, with ``sites`` once their outcomes are known."""
        text = functools.cache(lambda: self._header(stage, sites) + readable(gm, self._sources[stage]))
        trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": f"kvquant_{stage.number}_{stage.name}", "encoding": "string"},
            payload_fn=text,
        )
        if self._watcher is not None and self._number is not None:
            self._watcher.stage(self._number, stage, text())
        else:
            # This call formats nothing unless depyf is active, because depyf replaces the code of the called function.
            lazy_format_graph_code(f"kvquant {stage.number} {stage.name}", gm)

    def reported(self, graph: GraphReport) -> None:
        """Show the outcomes of the graph's sites."""
        if self._watcher is not None and self._number is not None:
            self._watcher.reported(self._number, graph)

    def _header(self, stage: Stage, sites: Sequence[Site]) -> str:
        number = "" if self._number is None else f" graph {self._number},"
        lines = [f"kvquant,{number} stage {stage.number} of {len(Stage)}: {stage.value}"]
        lines.append(f"compile id {self._compile_id}")
        if sites:
            lines += ["", "attention sites:"]
            lines += [f"  {site.module or 'top level'}: {_decision(site)}" for site in sites]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def readable(gm: GraphModule, sources: Mapping[int, str]) -> str:
    """The graph as Python. Comments name the inputs, each change of module, and the role of a line for a site.

    Each store, and each other role of several lines, has a heading.

    Args:
        gm: a graph of any stage.
        sources: the user's name of each input, by position.
    """
    lines = ["#", "# inputs:"]
    for index, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        lines.append("  ".join(filter(None, ("#  ", node.name, sources.get(index), _comment(node)))))
    lines += ["", "import torch", "from torch import device, inf, nan", ""]
    nodes = {node.name: node for node in gm.graph.nodes if node.op not in ("placeholder", "output")}
    source = re.sub(r"^class .*?\(", "class GraphModule(", gm.print_readable(print_output=False), count=1, flags=re.M)
    module, role = "", None
    roles = Counter(_comment(node) for node in nodes.values())
    for line in source.splitlines():
        assigned = re.match(r"( {8})(\w+)\s*[:=]", line)  # deeper lines belong to a nested graph
        node = nodes.get(assigned[2]) if assigned else None
        if assigned and node is not None:
            inner = module_name(node)
            if inner and inner != module:
                lines.append(f"{assigned[1]}# module {inner}")
                module = inner
            comment = _comment(node)
            if comment is not None and comment != role and (roles[comment] > 1 or comment.endswith(" store")):
                lines += ["", f"{assigned[1]}# ==== {comment} ===="]
            role = comment or role
            line = "  # ".join(filter(None, (line, comment)))
        lines.append(line)
    return "\n".join(_one_line(line) for line in lines) + "\n"


def _comment(node: Node) -> str | None:
    """The role of a node for an attention site, if it has one."""
    role = role_of(node)
    if role is not None:
        return str(role)
    if is_marker(node):
        return f"{Marker.of(node).module or 'top level'}: attention"
    return f"{module_name(node) or 'top level'}: attention" if is_attention(node) else None


def _decision(site: Site) -> str:
    if not site.rewritten:
        return f"is not packed: {site.reason}"
    formats = ", ".join(f"{cache.role} {cache.format}" for cache in site.caches)
    return f"is packed: {formats}" if formats else "is packed"


def _one_line(text: str) -> str:
    """Escape line breaks: a name or a reason may hold one, and a comment must stay on one line."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
