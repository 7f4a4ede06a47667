"""The report: what became of every attention site of every compiled graph, and why.

The backend calls :func:`record` once for every graph with attention that it compiles; that counts into
``torch._dynamo.utils.counters["kvquant"]``, logs, and adds the graph to the reports of all open
:func:`collect_reports` blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch._dynamo.utils import counters

from kvcompile.errors import UnsupportedSiteError
from kvcompile.passes.notes.surroundings import SiteView
from kvcompile.passes.refusal import Reason
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.policy.policy import OnUnsupported
from kvcompile.report.weight_bytes import WeightBytes

log = logging.getLogger(__name__)

Outcome = Literal["rewritten", "refused", "left alone"]

NOT_REFUSED = (Reason.policy_auto.name, Reason.no_cache.name)
"""Reasons of sites that are left alone without any fault: nobody wants them packed, or there is nothing to pack."""


def outcome(site: Site) -> Outcome:
    """``rewritten``; ``left alone`` if the policy says so or there is no cache; otherwise ``refused``."""
    if site.rewritten:
        return "rewritten"
    return "left alone" if site.reason_code in NOT_REFUSED else "refused"


def modules_by_reason(sites: Iterable[Site]) -> dict[str, list[str]]:
    """The modules of sites that were not rewritten, each once, under each distinct reason."""
    modules: dict[str, dict[str, None]] = {}
    for site in sites:
        if site.reason is not None:
            modules.setdefault(site.reason, {})[site.module or "top level"] = None
    return {reason: list(names) for reason, names in modules.items()}


def enumerate_modules(modules: list[str]) -> str:
    """``a, b, c and 29 more``."""
    return ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


@dataclass(frozen=True)
class GraphReport:
    """What became of one compiled graph: its attention sites, in the order of the graph.

    Attributes:
        sites: what became of each.
        views: what is around each in the graph, to be drawn; empty if the graph was not analysed.
        weights: the parameters that it takes.
        passes: seconds that each pass of ``passes/pipeline.py`` took, by name and in order.
    """

    sites: tuple[Site, ...]
    views: tuple[SiteView, ...] = ()
    weights: tuple[WeightBytes, ...] = ()
    passes: Mapping[str, float] = field(default_factory=dict)

    def enforce(self, on_unsupported: OnUnsupported) -> None:
        """Raise on or warn of the refused sites; one warning for every reason.

        Raises:
            UnsupportedSiteError: ``on_unsupported`` is ``error`` and a site was refused.
        """
        refused = [site for site in self.sites if outcome(site) == "refused"]
        if on_unsupported == "error" and refused:
            site = refused[0]
            raise UnsupportedSiteError(site.module, str(site.reason), str(site.remedy))
        if on_unsupported == "warn":
            for reason, modules in modules_by_reason(refused).items():
                log.warning("kvquant leaves %s to plain Inductor: %s", enumerate_modules(modules), reason)


@dataclass
class Runs:
    """How often a graph with packed caches was called while a report was open.

    Attributes:
        graph: the graph.
        packed: calls that ran on packed caches.
        plain: calls that ran as plain Inductor would, by reason.
    """

    graph: GraphReport
    packed: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    @property
    def num_plain(self) -> int:
        return sum(self.plain.values())

    @property
    def num_calls(self) -> int:
        return self.packed + self.num_plain

    def __str__(self) -> str:
        return f"{self.num_plain} of {self.num_calls} calls ran as plain Inductor would: {'; '.join(self.plain)}"


@dataclass(frozen=True)
class Totals:
    """Sums over a report.

    Attributes:
        graphs, sites, rewritten, refused, left_alone: counts.
        calls: how often graphs with packed caches were called.
        plain_calls: how many of these calls ran as plain Inductor would.
        bytes_per_token_before: bytes per token and KV head of all packed caches, had they stayed as they were. Caches
            of a graph whose calls all ran as plain Inductor would are not among them.
        bytes_per_token_after: the same packed, metadata included.
        residual_bytes: bytes per sequence and KV head of recent and first tokens that they keep as they are.
        weight_bytes_before: bytes of all parameters of the graphs in their own dtypes.
        weight_bytes_after: bytes that they take: fewer if a library such as torchao has quantized them.
    """

    graphs: int
    sites: int
    rewritten: int
    refused: int
    left_alone: int
    calls: int
    plain_calls: int
    bytes_per_token_before: int
    bytes_per_token_after: int
    residual_bytes: int
    weight_bytes_before: int
    weight_bytes_after: int

    @property
    def ratio(self) -> float | None:
        """How many times smaller the packed caches are, as they get long; None if there are none."""
        return self.bytes_per_token_before / self.bytes_per_token_after if self.bytes_per_token_after else None

    @property
    def weight_ratio(self) -> float | None:
        """How many times smaller the weights are than in their own dtypes; None if they are not."""
        is_smaller = self.weight_bytes_after < self.weight_bytes_before
        return self.weight_bytes_before / self.weight_bytes_after if is_smaller else None


@dataclass
class Report:
    """What became of every attention site of some compiled graphs; ``print`` it for a table.

    Attributes:
        graphs: in the order of their compilation.
        remarks: what happened when compiled graphs ran, one line each, e.g. that keys have outlier channels.
        runs: how the graphs with packed caches ran, by ``id`` of the graph, those that were compiled before included.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: dict[int, Runs] = field(default_factory=dict, compare=False)

    @property
    def notes(self) -> list[str]:
        """The remarks, and for every graph how many of its calls ran as plain Inductor would, if any did, and why."""
        numbers = {id(graph): f"graph {number}" for number, graph in enumerate(self.graphs, start=1)}
        plain = {graph: runs for graph, runs in self.runs.items() if runs.plain}
        earlier = "a graph that was compiled before"
        return [*self.remarks, *(f"{numbers.get(graph, earlier)}: {runs}" for graph, runs in plain.items())]

    @property
    def calls(self) -> int:
        """How often graphs with packed caches were called."""
        return sum(runs.num_calls for runs in self.runs.values())

    def count_call(self, graph: GraphReport, plain_because: str | None) -> None:
        """Count a call of a graph with packed caches, which ran as plain Inductor would if there is a reason."""
        runs = self.runs.setdefault(id(graph), Runs(graph))
        if plain_because is None:
            runs.packed += 1
        else:
            runs.plain[plain_because] += 1

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all graphs; a module that is compiled twice (prefill, decode) has a site in each."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def totals(self) -> Totals:
        outcomes = Counter(outcome(site) for site in self.sites)
        caches = self._caches()
        weights = {weight.identity: weight for graph in self.graphs for weight in graph.weights}.values()
        return Totals(
            graphs=len(self.graphs),
            sites=len(self.sites),
            rewritten=outcomes["rewritten"],
            refused=outcomes["refused"],
            left_alone=outcomes["left alone"],
            calls=self.calls,
            plain_calls=sum(runs.num_plain for runs in self.runs.values()),
            bytes_per_token_before=sum(cache.bytes_per_token_before for cache in caches),
            bytes_per_token_after=sum(cache.bytes_per_token_after for cache in caches),
            residual_bytes=sum(cache.residual_bytes for cache in caches),
            weight_bytes_before=sum(weight.plain for weight in weights),
            weight_bytes_after=sum(weight.stored for weight in weights),
        )

    def _caches(self) -> list[CacheSummary]:
        """Every packed cache once, although each graph that uses it reports it; none of graphs that only ran plain.

        Within a graph a cache is known by its source. Another graph may give it another source (made there, passed
        here), so across graphs it is known by its module, its role, and its place among those.
        """
        caches: dict[tuple[str, str, int], CacheSummary] = {}
        for graph in self.graphs:
            runs = self.runs.get(id(graph), Runs(graph))
            if runs.plain and not runs.packed:
                continue
            places: Counter[tuple[str, str]] = Counter()
            seen: set[tuple[str, str]] = set()
            for site in graph.sites:
                for cache in site.caches:
                    if (cache.role, cache.source) in seen:
                        continue
                    seen.add((cache.role, cache.source))
                    caches[site.module, cache.role, places[site.module, cache.role]] = cache
                    places[site.module, cache.role] += 1
        return list(caches.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: ``{"totals": {...}, "graphs": [{"sites": [...], "calls": 3, ...}, ...], "notes": [...]}``."""
        totals = {
            **dataclasses.asdict(self.totals),
            "ratio": self.totals.ratio,
            "weight_ratio": self.totals.weight_ratio,
        }
        return {"totals": totals, "graphs": [self._graph_dict(graph) for graph in self.graphs], "notes": self.notes}

    def _graph_dict(self, graph: GraphReport) -> dict[str, Any]:
        runs = self.runs.get(id(graph), Runs(graph))
        sites = [{**dataclasses.asdict(site), "outcome": outcome(site)} for site in graph.sites]
        return {"sites": sites, "calls": runs.num_calls, "plain_calls": runs.num_plain, "passes": dict(graph.passes)}

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write one page that needs nothing else: sites by layer, formats, reasons, bytes, and drawings of each site.

        Raises:
            OSError: ``path`` cannot be written.
        """
        from kvcompile.report.html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from kvcompile.report.table import render

        return render(self)


UNUSED = (
    "kvquant compiled no attention here, and nothing ran on packed caches; call the compiled model under no_grad, "
    "without graph breaks within attention (TORCH_LOGS=graph_breaks shows them); and with generate() of Transformers "
    "compile the model itself, model.compile(backend='kvquant'): a compile_config applies on accelerators, to static "
    "caches, and neither to beams nor to assisted decoding"
)
"""What a report notes of a block in which the backend had nothing to do."""

_lock = threading.Lock()
_last = Report()
_collecting: list[Report] = []


def record(
    sites: Iterable[Site],
    views: Iterable[SiteView] = (),
    weights: Iterable[WeightBytes] = (),
    passes: Mapping[str, float] | None = None,
) -> GraphReport:
    """Count, log and keep the report of a graph that is being compiled. Any thread may call this."""
    global _last
    graph = GraphReport(tuple(sites), tuple(views), tuple(weights), passes or {})
    with _lock:
        _last = Report([graph])
        for report in _collecting:
            report.graphs.append(graph)
        _count(graph)
    for site in graph.sites:
        _log_site(site)
    return graph


def note(text: str) -> None:
    """Warn of, count and keep something that happened when a compiled graph ran. Any thread may call this."""
    with _lock:
        for report in (_last, *_collecting):
            if text not in report.remarks:
                report.remarks.append(text)
        counters["kvquant"]["notes"] += 1
    log.warning("%s", text)


def ran(graph: GraphReport, plain_because: str | None = None) -> None:
    """Count a call of a graph with packed caches. Any thread may call this.

    Args:
        graph: what :func:`record` returned for it.
        plain_because: why the call runs as plain Inductor would, if it does.
    """
    with _lock:
        for report in (_last, *_collecting):
            report.count_call(graph, plain_because)
        counters["kvquant"]["packed_calls" if plain_because is None else "plain_calls"] += 1
    if plain_because is not None:
        log.warning("a call ran as plain Inductor would: %s", plain_because)


def last_report() -> Report:
    """The report of the graph that was compiled last, in any thread; an empty one if there was none."""
    return _last


@contextlib.contextmanager
def collect_reports() -> Iterator[Report]:
    """Collect the reports of all graphs that any thread compiles inside the block.

    If none is compiled, and none that was compiled before runs on packed caches, the report notes that at its end:
    ``generate()`` of Transformers does not call compiled code in every mode, and does not say so.

    >>> with kvcompile.collect_reports() as report:
    ...     model.generate(...)
    >>> print(report)
    """
    report = Report()
    with _lock:
        _collecting.append(report)
    try:
        yield report
        if not report.graphs and not report.calls:
            report.remarks.append(UNUSED)
            log.warning("%s", UNUSED)
    finally:
        with _lock:
            _collecting[:] = [other for other in _collecting if other is not report]


def _count(graph: GraphReport) -> None:
    count = counters["kvquant"]
    count["graphs"] += 1
    count["sites"] += len(graph.sites)
    for site in graph.sites:
        kind = outcome(site)
        count[kind.replace(" ", "_")] += 1
        if kind == "refused":
            count[f"refused_{site.reason_code}"] += 1


def _log_site(site: Site) -> None:
    where = site.module or "top level"
    if site.rewritten:
        formats = ", ".join(f"{cache.role} {cache.kind} {cache.write_form} -> {cache.format}" for cache in site.caches)
        log.debug("rewritten: %s: %s: %s", where, site.attention, formats)
    else:
        log.info("%s: %s: %s: %s", outcome(site), where, site.attention, site.reason)
