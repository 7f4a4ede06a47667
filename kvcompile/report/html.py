"""The report as one self-contained page, with its script, style and drawings.

:mod:`kvcompile.report.markup` escapes all text that comes from a model, such as names of modules and reasons. The
content security policy of the page is a second guard: it allows only the page's own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources

from kvcompile.errors import plural
from kvcompile.passes.notes.surroundings import SiteSurroundings, Surroundings
from kvcompile.passes.site import CacheSummary, Site
from kvcompile.report.data import Outcome, ReportData, enumerate_modules, modules_by_reason, outcome
from kvcompile.report.drawing import arrow_head, describe, draw
from kvcompile.report.markup import Markup, element, join

_TITLE = "KV caches under kvquant"
_OUTCOMES: dict[Outcome, str] = {"rewritten": "✓", "refused": "✕", "skipped": "○"}
_REASONS_IN_SIGHT = 6
_COLUMNS = ("Layer", "Module", "Outcome", "Attention", "Keys", "Values", "Written by", "Bytes", "")


def page(report: ReportData) -> str:
    """A complete HTML document."""
    drawings = _Drawings()
    sites = [element("tbody", *_graph_rows(report, number, drawings), role="rowgroup") for number in _numbers(report)]
    body = [_origins(report), _summary(report), _reasons(report), _notes(report)]
    if report.sites:
        body += [_filters(report), _table(sites), element("p", "No site matches.", id="none", hidden=True)]
    script, style = _asset("filter.js"), _asset("style.css")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", _TITLE),
        element("style", style),
    )
    main = element("main", element("h1", _TITLE), *body)
    document = element(
        "html", head, element("body", drawings.definitions(), main, element("script", script)), lang="en"
    )
    return f"<!DOCTYPE html>\n{document}\n"


def _asset(name: str) -> Markup:
    return Markup(resources.files("kvcompile.report").joinpath("page", name).read_text(encoding="utf-8"))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _numbers(report: ReportData) -> range:
    return range(1, len(report.graphs) + 1)


# The summary


def _origins(report: ReportData) -> Markup:
    """The distinct models, policies, versions and times of the graphs."""
    origins = [graph.origin for graph in report.graphs if graph.origin is not None]
    if not origins:
        return Markup()
    policies = dict.fromkeys((origin.policy, origin.policy_text) for origin in origins)
    facts: dict[str, list[str]] = {
        "Model": [_name(text) for text in dict.fromkeys(origin.model for origin in origins)],
        "Policy": [_policy(name, text) for name, text in policies],
        "Versions": list(dict.fromkeys(origin.versions for origin in origins)),
        "Compiled": list(dict.fromkeys(origin.time for origin in origins)),
    }
    pairs = []
    for name, texts in facts.items():
        pairs.append(element("div", element("dt", name), *(element("dd", text) for text in texts)))
    return element("dl", *pairs, class_="origin")


def _policy(name: str, text: str) -> Markup:
    """The name of a policy. If it is not a preset, its text unfolds."""
    if not text:
        return _name(name)
    return element("details", element("summary", name), element("pre", text))


def _summary(report: ReportData) -> Markup:
    if not report.graphs:
        return element("p", f"{report.without_graphs()[0]}.")
    totals = report.totals
    counts: dict[Outcome, int] = {
        "rewritten": totals.packed_layers,
        "refused": totals.refused_layers,
        "skipped": totals.skipped_layers,
    }
    shares: list[tuple[str, int]] = list(counts.items())
    legend = [element("li", _badge(kind), f" {count}") for kind, count in counts.items()]
    title = f"{plural(totals.layers, 'attention layer')} in {plural(totals.graphs, 'graph')}"
    cards = [_card(title, _bar(shares, totals.layers), element("ul", *legend, class_="inline"))]
    if totals.plain_calls:
        shares = [("rewritten", totals.calls - totals.plain_calls), ("refused", totals.plain_calls)]
        title = f"{totals.plain_calls} of {plural(totals.calls, 'call')} ran as plain Inductor would"
        what = element("p", "The bytes of a graph count if one of its calls ran on packed caches.", class_="muted")
        cards.append(_card(title, _bar(shares, totals.calls), what))
    if totals.ratio is not None:
        rows = _saving(totals.model_bytes_before, totals.model_bytes_after)
        text = "per token and KV head, all layers together, scales included"
        if totals.unpacked_bytes_per_token:
            text += f"; {totals.unpacked_bytes_per_token:,} of them in unpacked layers"
            text += f"; packed layers alone are {totals.packed_ratio:.2f} times smaller"
        if totals.residual_bytes:
            text += f"; and {totals.residual_bytes:,} bytes per sequence and KV head for recent and first tokens"
        what = element("p", text, class_="muted")
        dtypes = ", ".join(totals.plain_dtypes)
        cards.append(_card(f"Caches {totals.ratio:.2f} times smaller than {dtypes}", *rows, what))
    if totals.weight_ratio is not None:
        rows = _saving(totals.weight_bytes_before, totals.weight_bytes_after)
        what = element("p", "of all weights of the graphs, quantized by another library", class_="muted")
        cards.append(_card(f"Weights {totals.weight_ratio:.2f} times smaller", *rows, what))
    return element("div", *cards, class_="cards")


def _card(title: str, *content: str) -> Markup:
    return element("section", element("h2", title), *content, class_="card")


def _saving(before: int, after: int) -> list[Markup]:
    return [
        element("dl", *_memory_row("before", [("before", before)], before, before)),
        element("dl", *_memory_row("after", [("after", after)], after, before)),
    ]


def _memory_row(name: str, shares: Sequence[tuple[str, int]], count: int, whole: int) -> Iterator[Markup]:
    yield element("dt", name)
    yield element("dd", _bar(shares, whole), element("span", f"{count:,} bytes", class_="number"))


def _bar(shares: Sequence[tuple[str, int]], whole: int) -> Markup:
    """A bar with a segment for each (kind, count). The numbers are also given as text."""
    start, parts = 0.0, []
    for kind, count in shares:
        width = 100 * count / whole if whole else 0.0
        parts.append(element("rect", x=f"{start:.2f}%", width=f"{width:.2f}%", height="100%", class_=kind))
        start += width
    return element("svg", *parts, class_="bar", aria_hidden="true")


def _badge(kind: Outcome) -> Markup:
    sign = element("span", _OUTCOMES[kind], aria_hidden="true")
    return element("span", sign, f" {kind}", class_=f"badge {kind.replace(' ', '-')}")


def _name(text: str) -> Markup:
    """A name that may break into a new line after a dot or an underscore."""
    parts = re.split(r"(?<=[._])", text)
    return element("span", *(piece for part in parts for piece in (part, element("wbr"))), class_="name")


def _reasons(report: ReportData) -> Markup:
    """Every reason once, with its modules; the first few are unfolded."""
    items = []
    for kind in ("refused", "skipped"):
        sites = [site for site in report.sites if outcome(site) == kind]
        for reason, modules in modules_by_reason(sites).items():
            remedy = next((site.remedy for site in sites if site.reason == reason and site.remedy), None)
            todo = [element("div", element("strong", "To do: "), remedy)] if kind == "refused" and remedy else []
            items.append(element("li", _badge(kind), " ", _name(enumerate_modules(modules)), ": ", reason, *todo))
    if not items:
        return Markup()
    lists = [element("ul", *items[:_REASONS_IN_SIGHT], class_="reasons")]
    if rest := items[_REASONS_IN_SIGHT:]:
        more = element("summary", f"{plural(len(rest), 'more reason')}")
        lists.append(element("details", more, element("ul", *rest, class_="reasons")))
    return element("section", element("h2", "Why some sites are not packed"), *lists)


def _notes(report: ReportData) -> Markup:
    notes = report.notes if report.graphs else report.without_graphs()[1]
    if not notes:
        return Markup()
    items = [element("li", note) for note in notes]
    return element("section", element("h2", "Notes of the run"), element("ul", *items, class_="reasons"))


# The table of sites


def _filters(report: ReportData) -> Markup:
    layers = sorted({site.layer for site in report.sites if site.layer is not None})
    controls = [_choice("layer", "Layer", "all layers", layers)]
    if len(report.graphs) > 1:
        controls.append(_choice("graph", "Graph", "all graphs", _numbers(report)))
    boxes = [
        element("label", element("input", type="checkbox", name="outcome", value=kind, checked=True), _badge(kind))
        for kind in _OUTCOMES
    ]
    controls.append(element("fieldset", element("legend", "Outcome"), *boxes))
    text = element("input", type="search", id="text", placeholder="module, format, reason", autocomplete="off")
    controls.append(element("div", element("label", "Text", for_="text"), text))
    controls.append(element("button", "Show all", type="button", id="reset"))
    shown = element("output", "", id="shown", role="status")
    parts = [element("h2", "Attention sites"), element("div", *controls, class_="controls"), shown]
    return element("section", *parts, role="search", aria_label="Filter the sites", class_="filters")


def _choice(name: str, label: str, everything: str, values: Sequence[int]) -> Markup:
    options = [element("option", everything, value="")]
    options += [element("option", str(value), value=value) for value in values]
    return element("div", element("label", label, for_=name), element("select", *options, id=name))


def _table(bodies: Sequence[Markup]) -> Markup:
    cells = [element("th", name or _unseen("Details"), scope="col", role="columnheader") for name in _COLUMNS]
    head = element("thead", element("tr", *cells, role="row"), role="rowgroup")
    return element("table", head, *bodies, role="table", aria_label="Attention sites")


def _unseen(text: str) -> Markup:
    return element("span", text, class_="unseen")


def _graph_rows(report: ReportData, number: int, drawings: _Drawings) -> Iterator[Markup]:
    graph = report.graphs[number - 1]
    if len(report.graphs) > 1:
        title = element("th", f"Graph {number}", colspan=len(_COLUMNS), scope="rowgroup", role="rowheader")
        yield element("tr", title, role="row", class_="graph")
    for place, site in enumerate(graph.sites):
        key = f"site-{number}-{place}"
        around = graph.surroundings[place] if graph.surroundings else SiteSurroundings()
        data = {"data_layer": site.layer, "data_graph": number, "data_outcome": outcome(site)}
        yield element("tr", *_cells(site, key), role="row", class_="site", **data)
        details = element("td", *_details(site, around, drawings), colspan=len(_COLUMNS), role="cell")
        yield element("tr", details, role="row", class_="details", id=key)


def _cells(site: Site, key: str) -> Iterator[Markup]:
    module = site.module or "top level"
    yield _cell("Layer", "" if site.layer is None else str(site.layer), class_="number")
    yield _cell("Module", _name(module))
    yield _cell("Outcome", _badge(outcome(site)))
    yield _cell("Attention", site.attention)
    if site.rewritten:
        for name, role in (("Keys", "key"), ("Values", "value")):
            yield _cell(name, _name(_once(cache.format for cache in site.caches if cache.role == role)))
        yield _cell("Written by", _once(f"{cache.write_form} ({cache.kind})" for cache in site.caches))
        before = sum(cache.bytes_per_token_before for cache in site.caches)
        after = sum(cache.bytes_per_token_after for cache in site.caches)
        sizes = element("span", f"{before:,} → {after:,}", class_="number")
        yield _cell("Bytes", sizes, _bar([("after", after)], before))
    else:
        yield _cell("Reason", str(site.reason), colspan=4, class_="reason")
    button = {"aria_expanded": "true", "aria_controls": key, "aria_label": f"Details of {module}"}
    yield _cell("Details", element("button", "Details", type="button", class_="toggle", **button))


def _cell(label: str, *content: str, **attributes: str | int) -> Markup:
    return element("td", *content, role="cell", data_label=label, **attributes)


def _once(texts: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(texts))


def _details(site: Site, around: SiteSurroundings, drawings: _Drawings) -> Iterator[Markup]:
    if site.reason is not None:
        code = element("code", site.reason_code or "")
        yield element("p", f"Left to plain Inductor: {site.reason} (", code, ").")
        if site.remedy is not None:
            yield element("p", f"To do: {site.remedy}.")
    for cache in site.caches:
        yield _cache(cache)
    if around.before is not None:
        yield drawings.figure("Before the rewrite", _as_called(around.before, site))
    if around.after is not None:
        yield drawings.figure("After the rewrite", around.after)


def _as_called(before: Surroundings, site: Site) -> Surroundings:
    """The drawing with the kind of attention in place of the marker, if the model's code is not known."""
    boxes = [
        replace(box, detail=(site.attention, *box.detail[1:])) if "kvcompile.sdpa" in box.detail else box
        for box in before.boxes
    ]
    return replace(before, boxes=tuple(boxes))


def _cache(cache: CacheSummary) -> Markup:
    shape = ", ".join(map(str, cache.shape))
    facts = {
        "source": _name(cache.source),
        "shape": f"{cache.dtype} [{shape}]",
        "kind": f"{cache.kind}, written by {cache.write_form}",
        "format": cache.format,
        "bytes per token and KV head": f"{cache.bytes_per_token_before} → {cache.bytes_per_token_after}",
    }
    if cache.residual_bytes:
        facts["bytes per sequence and KV head for recent and first tokens"] = f"{cache.residual_bytes:,}"
    pairs = [element("div", element("dt", name), element("dd", fact)) for name, fact in facts.items()]
    return element("div", element("h3", f"{cache.role.capitalize()} cache"), element("dl", *pairs), class_="cache")


class _Drawings:
    """All drawings of a page. Equal drawings are stored once, because most layers of a model look the same."""

    def __init__(self) -> None:
        self._known: dict[Surroundings, tuple[str, float, float]] = {}
        self._symbols: list[Markup] = []
        self._texts: list[Markup] = []

    def figure(self, name: str, surroundings: Surroundings) -> Markup:
        """A figure with the drawing of ``surroundings``."""
        key, width, height = self._drawn(surroundings)
        picture = element(
            "svg",
            element("use", href=f"#{key}"),
            viewBox=f"0 0 {width:.0f} {height:.0f}",
            width=f"{width:.0f}",
            height=f"{height:.0f}",
            role="img",
            aria_label=name,
            aria_describedby=f"{key}-text",
        )
        scrolled = element("div", picture, class_="scroll", tabindex=0, role="region", aria_label=f"{name}, drawing")
        return element("figure", element("figcaption", name), scrolled)

    def definitions(self) -> Markup:
        """The hidden symbols that the figures refer to."""
        if not self._symbols:
            return Markup()
        symbols = element("svg", element("defs", arrow_head()), *self._symbols, class_="unseen", aria_hidden="true")
        return join([symbols, element("div", *self._texts, hidden=True)])

    def _drawn(self, surroundings: Surroundings) -> tuple[str, float, float]:
        if surroundings not in self._known:
            key = f"drawing-{len(self._known) + 1}"
            content, width, height = draw(surroundings)
            self._known[surroundings] = (key, width, height)
            self._symbols.append(element("symbol", content, id=key))
            self._texts.append(element("p", describe(surroundings), id=f"{key}-text"))
        return self._known[surroundings]
