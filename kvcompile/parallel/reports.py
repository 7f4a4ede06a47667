"""The report of all ranks together: sums over the ranks, and an error if their decisions differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import KVCompileError, OptionsError
from kvcompile.parallel.context_parallel import first_difference
from kvcompile.parallel.ranks import Ranks
from kvcompile.passes.site import CacheSummary
from kvcompile.report.data import ReportData, Totals, modules_by_reason


@dataclass(frozen=True)
class RankReport:
    """The sums over a grid of ranks.

    Attributes:
        context_parallel: ranks that divide the tokens of each cache.
        tensor_parallel: ranks that divide the KV heads.
        sites: attention sites of all ranks.
        rewritten, refused, skipped: the numbers of sites with each outcome.
        refusals: the modules of the sites that were not rewritten, by reason. They are the same on all ranks.
        plain_calls: calls on any rank that ran as plain Inductor would.
        bytes_before: bytes of all packed caches in their original dtypes. Tokens that context-parallel ranks divide
            count once, and KV heads count for each tensor-parallel rank that holds them. None if a size is symbolic.
        bytes_after: bytes of the same caches packed, without tokens in full precision.
    """

    context_parallel: int
    tensor_parallel: int
    sites: int
    rewritten: int
    refused: int
    skipped: int
    refusals: dict[str, list[str]]
    plain_calls: int
    bytes_before: int | None
    bytes_after: int | None

    @property
    def ranks(self) -> int:
        return self.context_parallel * self.tensor_parallel

    def __str__(self) -> str:
        lines = [
            f"{self.ranks} ranks ({self.context_parallel} context parallel, {self.tensor_parallel} tensor parallel)",
            f"{self.sites} attention sites: {self.rewritten} rewritten, {self.refused} refused, {self.skipped} skipped",
        ]
        lines += [f"not packed: {', '.join(modules)}: {reason}" for reason, modules in self.refusals.items()]
        if self.plain_calls:
            lines.append(f"{self.plain_calls} calls ran as plain Inductor would")
        if self.bytes_before and self.bytes_after:
            ratio = self.bytes_before / self.bytes_after
            lines.append(f"{self.bytes_before} -> {self.bytes_after} bytes of caches: {ratio:.2f} times smaller")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Part:
    """The data that one rank contributes."""

    decisions: list[list[str | None]]
    totals: Totals
    bytes: tuple[int, int] | None


def report_of_ranks(report: ReportData, *, context_parallel: Any = None, tensor_parallel: Any = None) -> RankReport:
    """The report of all ranks together. Every rank must call it at the same time, with its own report.

    Args:
        report: the report of this rank, from :func:`collect_reports` or :func:`last_report`.
        context_parallel: the ranks that divide the tokens of the caches, a DeviceMesh of one dimension or a process
            group.
        tensor_parallel: the ranks that divide their heads.

    Returns:
        The sums, equal on every rank.

    Raises:
        OptionsError: neither option is given, or an option has another type.
        KVCompileError: on every rank, if two ranks have refused or packed different attention.
    """
    ranks = Ranks.of(context_parallel, tensor_parallel, "report_of_ranks")
    if ranks is None:
        raise OptionsError("report_of_ranks: give context_parallel, tensor_parallel or both")
    mine = _Part([[site.module, site.reason] for site in report.sites], report.totals, _bytes_of(report.caches))
    parts = ranks.gather(mine)
    _check_alike(parts, ranks)
    totals = [part.totals for part in parts]
    known = [part.bytes for part in parts[: ranks.tensor.size]]  # a rank for each share of the heads
    before, after = zip(*(one for one in known if one is not None), strict=True) if None not in known else (None, None)
    return RankReport(
        ranks.context.size,
        ranks.tensor.size,
        sites=sum(one.sites for one in totals),
        rewritten=sum(one.rewritten for one in totals),
        refused=sum(one.refused for one in totals),
        skipped=sum(one.skipped for one in totals),
        refusals=modules_by_reason(report.sites),
        plain_calls=sum(one.plain_calls for one in totals),
        bytes_before=None if before is None else sum(before),
        bytes_after=None if after is None else sum(after),
    )


def _check_alike(parts: Sequence[_Part], ranks: Ranks) -> None:
    first = parts[0].decisions
    for rank, part in enumerate(parts):
        if part.decisions != first:
            here, there = first_difference(first, part.decisions), first_difference(part.decisions, first)
            raise KVCompileError(
                f"report_of_ranks: {ranks.name(0)} and {ranks.name(rank)} differ: {here} on the first, {there} on the "
                "second; give all ranks the same model, policy, inputs and versions"
            )


def _bytes_of(caches: Iterable[CacheSummary]) -> tuple[int, int] | None:
    """The bytes of all caches in their own dtypes, and packed; None if a size is symbolic."""
    before = after = 0
    for cache in caches:
        if not all(isinstance(size, int) for size in cache.shape):
            return None
        plain = math.prod(int(size) for size in cache.shape) * getattr(torch, cache.dtype).itemsize
        before += plain
        after += plain // cache.bytes_per_token_before * cache.bytes_per_token_after
    return before, after
