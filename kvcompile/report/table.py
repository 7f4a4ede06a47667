"""The text of a report for a terminal: plain ASCII, as wide as the terminal but at most 100 characters."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

from kvcompile.passes.site import Site
from kvcompile.report.data import ReportData, Totals, enumerate_modules, modules_by_reason, outcome
from kvcompile.tables import LABEL_WIDTH, broken, width

Row = tuple[str, str, str, str, str]

_HEADER = ("module", "cache", "attention", "formats (K / V)", "bytes")


def render(report: ReportData) -> str:
    """One table for each graph, the reasons of sites that were not rewritten, and the totals."""
    if not report.graphs:
        line, notes = report.without_graphs()
        return "\n".join([line, *(f"note: {note}" for note in notes)])
    text = io.StringIO()
    console = Console(file=text, width=width(), color_system=None, markup=False, emoji=False, highlight=False)
    first_with: dict[tuple[Row, ...], int] = {}
    for number, graph in enumerate(report.graphs, start=1):
        rows = tuple(_row(site) for site in graph.sites)
        twin = first_with.setdefault(rows, number)
        title = f"graph {number}: {len(rows)} attention layer{'s' if len(rows) != 1 else ''}"
        console.print(title if twin == number else f"{title}, as in graph {twin}")
        if rows and twin == number:
            console.print(_table(rows))
        if graph.verified_steps:
            console.print(f"verified: {graph.verified_steps} random steps give the same results as the original graph")
    for kind in ("refused", "skipped"):
        sites = [site for site in report.sites if outcome(site) == kind]
        remedies = {site.reason: site.remedy for site in sites}
        for reason, modules in modules_by_reason(sites).items():
            console.print(f"{kind}: {enumerate_modules(modules)}: {reason}")
            if kind == "refused":
                console.print(f"  to do: {remedies[reason]}")
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(_totals(report.totals))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _table(rows: tuple[Row, ...]) -> Table:
    """Formats and bytes keep their lines, and other cells break between words; modules break after dots."""
    table = Table(box=box.MARKDOWN, header_style="")
    longest = [max(len(word) for row in rows for word in row[column].split() or [""]) for column in range(len(_HEADER))]
    kept = [max(len(line) for row in rows for line in row[column].splitlines() or [""]) for column in (3, 4)]
    others = sum(max(room, len(title)) for room, title in zip([*longest[1:3], *kept], _HEADER[1:], strict=True))
    borders = 3 * len(_HEADER) + 1
    module_width = min(max(longest[0], len("module")), LABEL_WIDTH, max(width() - others - borders, len("module")))
    table.add_column(_HEADER[0], overflow="fold", width=max(module_width, _longest_piece(rows)))
    table.add_column(_HEADER[1], min_width=longest[1])
    table.add_column(_HEADER[2], min_width=longest[2])
    table.add_column(_HEADER[3], no_wrap=True)
    table.add_column(_HEADER[4], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(broken(row[0], max(module_width, _longest_piece(rows))), *row[1:])
    return table


def _longest_piece(rows: tuple[Row, ...]) -> int:
    """The longest part of a module's name, at most LABEL_WIDTH."""
    return min(LABEL_WIDTH, max(len(line) for row in rows for line in broken(row[0], 1).splitlines()))


def _row(site: Site) -> Row:
    module = site.module or "top level"
    if not site.rewritten:
        return module, "", site.attention, f"{outcome(site)}:\n{site.reason_code}", ""
    caches = _joined(f"{cache.kind} {cache.write_form}" for cache in site.caches)
    formats = _joined((cache.format for cache in site.caches), separator=" /\n")
    before = sum(cache.bytes_per_token_before for cache in site.caches)
    after = sum(cache.bytes_per_token_after for cache in site.caches)
    return module, caches, site.attention, formats, f"{before} -> {after}"


def _joined(halves: Iterable[str], separator: str = " / ") -> str:
    """The texts for the key and the value; one text if both are the same."""
    return separator.join(dict.fromkeys(halves))


def _totals(totals: Totals) -> str:
    counts = f"{totals.packed_layers} rewritten, {totals.refused_layers} refused, {totals.skipped_layers} skipped"
    text = f"{totals.layers} attention layer{'s' if totals.layers != 1 else ''}: {counts}"
    if totals.graphs > 1:
        text += f" (in {totals.graphs} graphs)"
    if totals.partly_refused_layers:
        text += f"\nanother graph refuses {totals.partly_refused_layers} of the rewritten layers"
    if totals.plain_calls:
        text += f"\n{totals.plain_calls} of {totals.calls} calls ran as plain Inductor would"
    if totals.ratio is not None:
        dtypes = ", ".join(totals.plain_dtypes)
        sizes = f"{totals.model_bytes_before} -> {totals.model_bytes_after} bytes per token and KV head"
        text += f"\n{sizes} over all layers: {totals.ratio:.2f} times smaller than {dtypes}"
    if totals.ratio is not None and totals.unpacked_bytes_per_token:
        sizes = f"{totals.bytes_per_token_before} -> {totals.bytes_per_token_after}"
        text += f"\n  {sizes} in packed layers, {totals.packed_ratio:.2f} times smaller; "
        text += f"{totals.unpacked_bytes_per_token} in unpacked layers"
    if totals.residual_bytes:
        text += f"\n{totals.residual_bytes} bytes per sequence and KV head for recent and first tokens"
    if totals.weight_ratio is not None:
        sizes = f"{totals.weight_bytes_before} -> {totals.weight_bytes_after}"
        text += f"\n{sizes} bytes of weights, quantized by another library: {totals.weight_ratio:.2f} times smaller"
    return text
