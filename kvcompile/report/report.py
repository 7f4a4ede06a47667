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


UNUSED = (
    "kvquant compiled no attention here, and nothing ran on packed caches; call the compiled model under no_grad, "
    "without graph breaks within attention (TORCH_LOGS=graph_breaks shows them); and with generate() of Transformers "
    "compile the model itself, model.compile(backend='kvquant'): a compile_config applies only on accelerators and to "
    "static caches, not to beam search, and to assisted decoding only since Transformers 5.24"
)
"""The note of a report on a block in which nothing was packed. Graph breaks follow it."""

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


def note(text: str) -> None:
    """Count, log as a warning, and store an event of a compiled graph's run. Any thread may call this."""
    with _lock:
        for report in (_last, *_collecting):
            if text not in report.remarks:
                report.remarks.append(text)
        counters["kvquant"]["notes"] += 1
    log.warning("%s", text)


def served_eagerly() -> None:
    """Count a request of ``generate()`` that got a packed cache and compiles no decode step, in any thread."""
    with _lock:
        for report in (_last, *_collecting):
            report.eager_requests += 1


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
    so: in some modes ``generate()`` of Transformers skips compiled code without a warning.

    >>> with kvcompile.collect_reports() as report:
    ...     model.generate(...)
    >>> print(report)
    """
    report, known_breaks = Report(), num_breaks()
    with _lock:
        _collecting.append(report)
    try:
        yield report
        if not (report.graphs or report.calls or report.eager_requests):
            breaks = ", ".join(str(place) for place in breaks_since(known_breaks)[:_BREAKS])
            report.remarks.append(f"{UNUSED}; graphs broke at {breaks}" if breaks else UNUSED)
            log.warning("%s", report.remarks[-1])
    finally:
        with _lock:
            _collecting[:] = [other for other in _collecting if other is not report]


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
