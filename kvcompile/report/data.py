"""A report as data: the outcome of every attention site of every compiled graph, the calls, and the sums over both."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvcompile.errors import UnsupportedSiteError, plural
from kvcompile.passes.notes.surroundings import SiteSurroundings
from kvcompile.passes.refusal import Reason
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.policy.policy import OnUnsupported
from kvcompile.report.origin import Origin, PlainCache
from kvcompile.report.weight_bytes import WeightBytes

log = logging.getLogger(__name__)

Outcome = Literal["rewritten", "refused", "skipped"]

Layer = tuple[str, int]
"""An attention layer: the name of its module, and its number among the attentions of this module."""

NOT_REFUSED = (Reason.policy_auto.name, Reason.no_cache.name)
"""Reasons that are not faults: the policy leaves the cache unpacked, or the site has no cache."""


NO_ATTENTION = "kvquant has found no attention in a compiled graph yet"
"""The text of a report without graphs, calls and notes."""


def outcome(site: Site) -> Outcome:
    """``rewritten``; ``skipped`` if the policy says ``auto`` or there is no cache; otherwise ``refused``."""
    if site.rewritten:
        return "rewritten"
    return "skipped" if site.reason_code in NOT_REFUSED else "refused"


def modules_by_reason(sites: Iterable[Site]) -> dict[str, list[str]]:
    """The distinct modules of sites that were not rewritten, by reason."""
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
    """The outcome of one compiled graph: its attention sites, in the order of the graph.

    Attributes:
        sites: the attention sites and their outcomes.
        surroundings: the graph around each site, for a drawing; empty if the graph was not analysed.
        weights: the parameters among the inputs of the graph.
        passes: seconds of each pass of ``passes/pipeline.py`` that ran, by name and in order; with ``verify``, also the
            seconds of the check.
        origin: the model, the policy and the versions; None if they are not known.
        verified_steps: the number of random steps in which the rewritten graph equalled the original; None without
            ``verify``.
    """

    sites: tuple[Site, ...]
    surroundings: tuple[SiteSurroundings, ...] = ()
    weights: tuple[WeightBytes, ...] = ()
    passes: Mapping[str, float] = field(default_factory=dict)
    origin: Origin | None = None
    verified_steps: int | None = None

    def layers(self) -> Iterator[tuple[Layer, Site]]:
        """Every site with the attention layer that it belongs to."""
        places: Counter[str] = Counter()
        for site in self.sites:
            yield (site.module, places[site.module]), site
            places[site.module] += 1

    def enforce(self, on_unsupported: OnUnsupported) -> None:
        """Raise an error for the refused sites, or log one warning for every reason, as ``on_unsupported`` says.

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
    """The number of calls of a graph with packed caches while a report was open.

    Attributes:
        graph: the graph.
        packed: the number of calls that ran on packed caches.
        plain: the number of calls that ran as plain Inductor would, by reason.
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
        graphs, sites, rewritten, refused, skipped: counts. A layer that is compiled twice has two sites.
        layers: attention layers, each counted once.
        packed_layers: layers that at least one graph packs.
        partly_refused_layers: the packed layers that at least one other graph refuses.
        refused_layers: layers that no graph packs and at least one graph refuses. The other layers are skipped.
        calls: the number of calls of graphs with packed caches.
        plain_calls: the number of these calls that ran as plain Inductor would.
        bytes_per_token_before: bytes per token and KV head of all packed caches, counted in their original dtypes. The
            caches of a graph are excluded if all its calls ran as plain Inductor would.
        bytes_per_token_after: the same caches packed, metadata included.
        unpacked_bytes_per_token: bytes per token and KV head of the caches that stay unpacked: caches of refused
            layers, caches that the policy leaves unpacked, and caches of graphs whose calls all ran as plain Inductor
            would. A cache that several of these layers share counts once for each layer.
        plain_dtypes: the dtypes of the caches before packing.
        residual_bytes: bytes per sequence and KV head of the recent and first tokens that caches keep exact.
        weight_bytes_before: bytes of all parameters of the graphs in their own dtypes.
        weight_bytes_after: bytes of the same parameters as stored; fewer if a library such as torchao has quantized
            them.
    """

    graphs: int
    sites: int
    rewritten: int
    refused: int
    skipped: int
    layers: int
    packed_layers: int
    partly_refused_layers: int
    refused_layers: int
    calls: int
    plain_calls: int
    bytes_per_token_before: int
    bytes_per_token_after: int
    unpacked_bytes_per_token: int
    plain_dtypes: tuple[str, ...]
    residual_bytes: int
    weight_bytes_before: int
    weight_bytes_after: int

    @property
    def skipped_layers(self) -> int:
        """Number of layers without a cache, or whose cache the policy leaves unpacked."""
        return self.layers - self.packed_layers - self.refused_layers

    @property
    def model_bytes_before(self) -> int:
        """Bytes per token and KV head of the caches of all layers, in their original dtypes."""
        return self.bytes_per_token_before + self.unpacked_bytes_per_token

    @property
    def model_bytes_after(self) -> int:
        """Bytes per token and KV head of the same caches after packing."""
        return self.bytes_per_token_after + self.unpacked_bytes_per_token

    @property
    def ratio(self) -> float | None:
        """Compression ratio of long caches over all layers; None without packed caches."""
        return self.model_bytes_before / self.model_bytes_after if self.bytes_per_token_after else None

    @property
    def packed_ratio(self) -> float | None:
        """Compression ratio of the packed caches alone; None without packed caches."""
        return self.bytes_per_token_before / self.bytes_per_token_after if self.bytes_per_token_after else None

    @property
    def weight_ratio(self) -> float | None:
        """Compression ratio of the weights, compared with their own dtypes; None if they are not smaller."""
        is_smaller = self.weight_bytes_after < self.weight_bytes_before
        return self.weight_bytes_before / self.weight_bytes_after if is_smaller else None


@dataclass
class ReportData:
    """The outcomes of compiled graphs, and the calls of these graphs.

    Attributes:
        graphs: in the order of their compilation.
        remarks: events of the run, one line each, e.g. that keys have outlier channels.
        runs: the calls of every graph with packed caches, by ``id`` of the graph. Graphs that were compiled before the
            report was opened are included.
        eager_requests: the requests of ``generate()`` that ran on a packed cache without a compiled step.
        stepwise_requests: the requests of ``generate()`` that ran compiled decode steps.
        plain_requests: the other requests of ``generate()`` of a compiled model, by the reason why they got no packed
            cache.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    runs: dict[int, Runs] = field(default_factory=dict, compare=False)
    eager_requests: int = 0
    stepwise_requests: int = field(default=0, compare=False)
    plain_requests: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def notes(self) -> list[str]:
        """The remarks, and a line for every graph with calls that ran as plain Inductor would."""
        numbers = {id(graph): f"graph {number}" for number, graph in enumerate(self.graphs, start=1)}
        plain = {graph: runs for graph, runs in self.runs.items() if runs.plain}
        earlier = "a graph that was compiled before"
        return [*self.remarks, *(f"{numbers.get(graph, earlier)}: {runs}" for graph, runs in plain.items())]

    def without_graphs(self) -> tuple[str, list[str]]:
        """What a report without graphs says in one line: what ran, or why nothing was packed; and its other notes."""
        ran = []
        if self.calls:
            ran.append(f"{plural(self.calls, 'call')} ran graphs that were compiled before")
        if self.eager_requests:
            ran.append(f"{plural(self.eager_requests, 'request')} of generate() ran on packed caches in eager code")
        if ran:
            return f"no attention was compiled here; {' and '.join(ran)}", self.notes
        line, *others = self.notes or [NO_ATTENTION]
        return line, others

    @property
    def calls(self) -> int:
        """The number of calls of graphs with packed caches."""
        return sum(runs.num_calls for runs in self.runs.values())

    def count_call(self, graph: GraphReport, plain_because: str | None) -> None:
        """Count a call of a graph with packed caches.

        Args:
            graph: the graph.
            plain_because: why the call ran as plain Inductor would; None if it ran on packed caches.
        """
        runs = self.runs.get(id(graph))  # this runs at every step, so it avoids needless objects
        if runs is None:
            runs = self.runs[id(graph)] = Runs(graph)
        if plain_because is None:
            runs.packed += 1
        else:
            runs.plain[plain_because] += 1

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of all graphs; a module that is compiled twice (prefill, decode) has a site in each."""
        return tuple(site for graph in self.graphs for site in graph.sites)

    @property
    def is_verified(self) -> bool:
        """Whether ``verify`` was on, at least one site was rewritten, and the check has refused no site."""
        refused = {Reason.differs.name, Reason.not_verified.name}
        checked = all(graph.verified_steps for graph in self.graphs if any(site.rewritten for site in graph.sites))
        return (
            checked
            and any(site.rewritten for site in self.sites)
            and refused.isdisjoint(site.reason_code for site in self.sites)
        )

    @property
    def totals(self) -> Totals:
        outcomes = Counter(outcome(site) for site in self.sites)
        layers = self._outcomes_of_layers()
        caches, unpacked = self.caches, self._unpacked()
        dtypes = [cache.dtype for cache in caches] + [plain.dtype for plain in unpacked]
        weights = {weight.identity: weight for graph in self.graphs for weight in graph.weights}.values()
        return Totals(
            graphs=len(self.graphs),
            sites=len(self.sites),
            rewritten=outcomes["rewritten"],
            refused=outcomes["refused"],
            skipped=outcomes["skipped"],
            layers=len(layers),
            packed_layers=sum("rewritten" in found for found in layers.values()),
            partly_refused_layers=sum({"rewritten", "refused"} <= found for found in layers.values()),
            refused_layers=sum("refused" in found and "rewritten" not in found for found in layers.values()),
            calls=self.calls,
            plain_calls=sum(runs.num_plain for runs in self.runs.values()),
            bytes_per_token_before=sum(cache.bytes_per_token_before for cache in caches),
            bytes_per_token_after=sum(cache.bytes_per_token_after for cache in caches),
            unpacked_bytes_per_token=sum(plain.bytes_per_token for plain in unpacked),
            plain_dtypes=tuple(dict.fromkeys(dtypes)),
            residual_bytes=sum(cache.residual_bytes for cache in caches),
            weight_bytes_before=sum(weight.plain for weight in weights),
            weight_bytes_after=sum(weight.stored for weight in weights),
        )

    def _ran_plain(self, graph: GraphReport) -> bool:
        """Whether all calls of the graph ran as plain Inductor would."""
        runs = self.runs.get(id(graph), Runs(graph))
        return bool(runs.plain) and not runs.packed

    def _outcomes_of_layers(self) -> dict[Layer, set[Outcome]]:
        """The outcomes of every attention layer in all graphs."""
        found: dict[Layer, set[Outcome]] = {}
        for graph in self.graphs:
            for layer, site in graph.layers():
                found.setdefault(layer, set()).add(outcome(site))
        return found

    def _unpacked(self) -> list[PlainCache]:
        """The caches of all layers that no graph packs."""
        packed: set[Layer] = set()
        plain: dict[Layer, PlainCache] = {}
        for graph in self.graphs:
            for layer, site in graph.layers():
                if site.rewritten and not self._ran_plain(graph):
                    packed.add(layer)
                elif graph.origin is not None and site.reason_code != Reason.no_cache.name:
                    cache = graph.origin.plain_cache(site, layer[1])
                    if cache is not None:
                        plain[layer] = cache
        return [cache for layer, cache in plain.items() if layer not in packed]

    @property
    def caches(self) -> list[CacheSummary]:
        """The distinct packed caches. Each graph that uses a cache reports it.

        Caches are skipped in graphs whose calls all ran as plain Inductor would. Within a graph, a cache is identified
        by its source. In another graph the same cache may have another source. Across graphs, a cache is therefore
        identified by its module, its role, and its place among the caches with the same module and role.
        """
        caches: dict[tuple[str, str, int], CacheSummary] = {}
        for graph in self.graphs:
            if self._ran_plain(graph):
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
            "model_bytes_per_token_before": self.totals.model_bytes_before,
            "model_bytes_per_token_after": self.totals.model_bytes_after,
            "ratio": self.totals.ratio,
            **dataclasses.asdict(self.totals),
            "packed_ratio": self.totals.packed_ratio,
            "weight_ratio": self.totals.weight_ratio,
        }
        return {"totals": totals, "graphs": [self._graph_dict(graph) for graph in self.graphs], "notes": self.notes}

    def _graph_dict(self, graph: GraphReport) -> dict[str, Any]:
        runs = self.runs.get(id(graph), Runs(graph))
        sites = [{**dataclasses.asdict(site), "outcome": outcome(site)} for site in graph.sites]
        found = {
            "sites": sites,
            "calls": runs.num_calls,
            "plain_calls": runs.num_plain,
            "passes": dict(graph.passes),
            "verified_steps": graph.verified_steps,
        }
        if graph.origin is not None:
            named = ("model", "policy", "policy_text", "versions", "time")
            found["origin"] = {name: getattr(graph.origin, name) for name in named}
        return found

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, default=str)
