"""The report that users see, and the record of every graph that the backend compiles.

The backend calls :func:`record` once for every graph with attention that it compiles. The call increments
``torch._dynamo.utils.counters["kvquant"]``, logs, and adds the graph to the report of every open
:func:`collect_reports` block.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcompile.compat.observing import counters
from kvcompile.passes.graph.breaks import breaks_since, num_breaks
from kvcompile.passes.notes.surroundings import SiteSurroundings
from kvcompile.passes.site import Site
from kvcompile.report.data import GraphReport, ReportData, outcome
from kvcompile.report.html import page
from kvcompile.report.origin import Origin
from kvcompile.report.table import render
from kvcompile.report.weight_bytes import WeightBytes

log = logging.getLogger(__name__)


@dataclass
class Report(ReportData):
    """The outcome of every attention site of some compiled graphs; ``print`` it for a table."""

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page: sites by layer, formats, reasons, bytes, and drawings of each site.

        Raises:
            OSError: ``path`` cannot be written.
        """
        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return render(self)


NO_ATTENTION = (
    "kvquant compiled no attention here, and nothing ran on packed caches; call the compiled model under no_grad, "
    "without graph breaks within attention (TORCH_LOGS=graph_breaks shows them)"
)
"""The note of a report on a block in which ``kvcompile.compile`` ran steps, but nothing was packed. Graph breaks follow
it."""

UNUSED = (
    f"{NO_ATTENTION}; and with generate() of Transformers compile the model itself, model.compile(backend='kvquant'): "
    "a compile_config applies only on accelerators and to static caches, not to beam search, and to assisted decoding "
    "only since Transformers 5.24"
)
"""The note of a report on a block in which nothing was packed and no prepared ``generate()`` ran. Graph breaks follow
it."""

_BREAKS = 3
"""The maximum number of graph breaks in a note."""

_lock = threading.Lock()
_last = Report()
_collecting: list[Report] = []


def record(
    sites: Iterable[Site],
    surroundings: Iterable[SiteSurroundings] = (),
    weights: Iterable[WeightBytes] = (),
    passes: Mapping[str, float] | None = None,
    origin: Origin | None = None,
    verified_steps: int | None = None,
) -> GraphReport:
    """Count, log and store the outcome of a graph that is being compiled. Any thread may call this."""
    global _last
    graph = GraphReport(tuple(sites), tuple(surroundings), tuple(weights), passes or {}, origin, verified_steps)
    with _lock:
        _last = Report([graph])
        for report in _collecting:
            report.graphs.append(graph)
        _count(graph)
    for site in graph.sites:
        _log_site(site)
    return graph


def note(text: str, *, logs: bool = True) -> None:
    """Store an event of a compiled graph's run, and count and log it as a warning. Any thread may call this.

    Args:
        text: the event.
        logs: whether to count and log it. False for an event that was logged before.
    """
    with _lock:
        for report in (_last, *_collecting):
            if text not in report.remarks:
                report.remarks.append(text)
        counters["kvquant"]["notes"] += int(logs)
    if logs:
        log.warning("%s", text)


def served_eagerly() -> None:
    """Count a request of ``generate()`` that ran on a packed cache without a compiled step, in any thread."""
    with _lock:
        for report in (_last, *_collecting):
            report.eager_requests += 1


def served_by_steps() -> None:
    """Count a request of ``generate()`` that ran compiled decode steps, in any thread."""
    with _lock:
        for report in (_last, *_collecting):
            report.stepwise_requests += 1


def served_plainly(reason: str) -> None:
    """Store why a request of ``generate()`` ran without a packed cache, in any thread.

    A report on a block in which nothing was packed ends with these reasons.
    """
    with _lock:
        for report in (_last, *_collecting):
            report.plain_requests[reason] += 1


def ran(graph: GraphReport, plain_because: str | None = None) -> None:
    """Count a call of a graph with packed caches. Any thread may call this.

    The first plain call of a graph for a reason logs a warning. So does the first one after another compilation.

    Args:
        graph: the result of :func:`record` for this graph.
        plain_because: why the call runs as plain Inductor would; None if it runs on packed caches.
    """
    with _lock:
        for report in (_last, *_collecting):
            report.count_call(graph, plain_because)
        counters["kvquant"]["packed_calls" if plain_because is None else "plain_calls"] += 1
        is_known = plain_because is None or _last.runs[id(graph)].plain[plain_because] > 1
    if not is_known:
        log.warning("a call ran as plain Inductor would: %s", plain_because)


def last_report() -> Report:
    """The report of the last compiled graph in which attention was found, in any thread; empty before the first."""
    return _last


@contextlib.contextmanager
def collect_reports() -> Iterator[Report]:
    """Collect the reports of all graphs that any thread compiles inside the ``with`` block.

    If the block compiles no graph and calls no earlier graph with packed caches, the report ends with a note that says
    so, or why: in some modes ``generate()`` of Transformers skips compiled code without a warning.

    >>> with kvcompile.collect_reports() as report:
    ...     model.generate(...)
    >>> print(report)
    """
    known_breaks = num_breaks()
    with _collecting_into(Report()) as report:
        yield report
        if not (report.graphs or report.calls or report.eager_requests):
            for text in _why_unused(report, known_breaks):
                report.remarks.append(text)
                log.warning("%s", text)


@contextlib.contextmanager
def collect_explained(model: str) -> Iterator[Report]:
    """Collect reports as :func:`collect_reports` does, in a block that compiles a step of ``model`` to explain it.

    If the block compiles no attention, the report says that ``model`` has none.
    """
    known_breaks = num_breaks()
    with _collecting_into(Report()) as report:
        yield report
        if not report.graphs:
            report.remarks.append(f"no attention was found in {model}{_where_graphs_broke(known_breaks)}")


@contextlib.contextmanager
def _collecting_into(report: Report) -> Iterator[Report]:
    """Add what any thread compiles and calls inside the ``with`` block to ``report``."""
    with _lock:
        _collecting.append(report)
    try:
        yield report
    finally:
        with _lock:
            _collecting[:] = [other for other in _collecting if other is not report]


def _why_unused(report: Report, known_breaks: int) -> list[str]:
    """Why nothing was packed: the reasons of requests, as far as no remark says them; else what may be the cause."""
    if report.plain_requests and not report.stepwise_requests:
        return [reason for reason in report.plain_requests if reason not in report.remarks]
    text = NO_ATTENTION if report.stepwise_requests else UNUSED
    return [f"{text}{_where_graphs_broke(known_breaks)}"]


def _where_graphs_broke(known_breaks: int) -> str:
    """The end of a note: the lines of the graph breaks after the first ``known_breaks``; empty if there are none."""
    breaks = ", ".join(str(place) for place in breaks_since(known_breaks)[:_BREAKS])
    return f"; graphs broke at {breaks}" if breaks else ""


def _count(graph: GraphReport) -> None:
    count = counters["kvquant"]
    count["graphs"] += 1
    count["sites"] += len(graph.sites)
    for site in graph.sites:
        kind = outcome(site)
        count[kind] += 1
        if kind == "refused":
            count[f"refused_{site.reason_code}"] += 1


def _log_site(site: Site) -> None:
    where = site.module or "top level"
    if site.rewritten:
        formats = ", ".join(f"{cache.role} {cache.kind} {cache.write_form} -> {cache.format}" for cache in site.caches)
        log.debug("rewritten: %s: %s: %s", where, site.attention, formats)
    else:
        log.info("%s: %s: %s: %s", outcome(site), where, site.attention, site.reason)
