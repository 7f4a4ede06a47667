"""An estimate of the divergence that every format of every layer's keys and values would cause, from a few model runs.

For a small error of one attention output, the divergence of the predictions grows with the square of the error: to
second order it is a quadratic form, whose matrix is the Fisher information. Two measurements are therefore enough:

- the squared relative error of the attention output under each format, with only the keys or only the values of one
  layer packed; one run of the model measures all formats;
- the divergence of the predictions with only these keys, or values, packed in one format; this takes one run for each
  layer and role. The divergence over the squared error is the cost of an error in this place.

The product of both is the divergence under each format. Errors of different layers, and of keys and values, are nearly
independent, so divergences add up.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.transformers import with_cache
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.evaluation.measure import OnProgress, counted
from kvcompile.evaluation.models import running_eagerly
from kvcompile.evaluation.replay import new_cache
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.site_errors import EXACT, ROLES, divergence_when, measure_sites
from kvcompile.kernels.layout.packed_layout import PackedLayout, Role
from kvcompile.passes.site import FormatPair, Site


@dataclass(frozen=True)
class FormatCost:
    """The cost of storing the keys, or the values, of one layer in a format.

    Attributes:
        format: the name of the format.
        nbytes: bytes of the storage for one sequence, with metadata, padding of the last block and exact tokens.
        divergence: the estimated divergence of the predictions, in nats.
    """

    format: str
    nbytes: int
    divergence: float


@dataclass(frozen=True)
class HalfCache:
    """The cache of the keys, or of the values, of one layer: [1, num_kv_heads, capacity, width] in a dtype."""

    module: str
    layer: int | None
    role: Role
    num_kv_heads: int
    slots: int
    width: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return self.num_kv_heads * self.slots * self.width

    def nbytes(self, format_name: str) -> int | None:
        """Bytes of the storage in a format; None if the format cannot hold it."""
        layout: PackedLayout = pair_of(self.role, format_name).layout(self.role, self.width, self.dtype)
        if layout.unsupported(self.dtype) is not None:
            return None
        blocks, batch, heads, block_bytes = layout.shape(self.slots, 1, self.num_kv_heads)
        return blocks * batch * heads * block_bytes


def pair_of(role: Role, format_name: str) -> FormatPair:
    """The format pair with a format for one role and exact storage for the other."""
    return FormatPair(format_name, EXACT) if role == "key" else FormatPair(EXACT, format_name)


def half_caches(model: Any, schedule: Schedule, sites: Sequence[Site]) -> tuple[list[HalfCache], int]:
    """The key and value caches of all layers with exactly one of ``sites``, and the elements of the whole cache."""
    cache = new_cache(model, schedule)
    with torch.no_grad(), running_eagerly():
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), **with_cache(model, cache))
    by_layer: dict[int | None, list[Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, []).append(site)
    halves = []
    for index, layer in enumerate(cache.layers):
        if len(by_layer.get(index, ())) == 1:
            for role, tensor in zip(ROLES, (layer.keys, layer.values), strict=True):
                _, heads, slots, width = tensor.shape
                module = by_layer[index][0].module
                halves.append(HalfCache(module, index, role, heads, slots, width, tensor.dtype))
    return halves, sum(half.numel() for layer in cache.layers for half in (layer.keys, layer.values))


@dataclass
class Sensitivity:
    """The measured costs of formats in the key caches and value caches of a model.

    Attributes:
        halves: the caches.
        nbytes: for each cache, the bytes of its storage by format.
        squared: for each cache, the squared relative error of the attention output by format.
        per_error: the divergence of the predictions over the squared error, by the index of a cache. Caches that were
            not measured yet are missing.
    """

    halves: Sequence[HalfCache]
    nbytes: list[dict[str, int]]
    squared: list[dict[str, float]]
    per_error: dict[int, float] = field(default_factory=dict)

    def costs(self) -> list[list[FormatCost]]:
        """The cost of each format in each cache. A cache that was not measured counts like the mean of the others."""
        mean = statistics.fmean(self.per_error.values()) if self.per_error else 0.0
        return [
            [FormatCost(name, size, self.per_error.get(index, mean) * squared[name]) for name, size in nbytes.items()]
            for index, (nbytes, squared) in enumerate(zip(self.nbytes, self.squared, strict=True))
        ]


NamedIn = Callable[[HalfCache, str], str]
"""The name of a format in a cache. The name of a calibrated format includes the basis of the layer."""


def measure_errors(
    tap: AttentionTap,
    windows: Tensor,
    halves: Sequence[HalfCache],
    formats: Iterable[str],
    named: NamedIn,
    on_progress: OnProgress,
) -> Sensitivity:
    """The errors of each format in each of ``halves``.

    Args:
        tap: the model.
        windows: int64 [num_windows, tokens].
        halves: key caches and value caches of the model.
        formats: the formats to consider; a format that cannot hold a cache is skipped there.
        named: the names of formats in a cache.
        on_progress: called for every module that is measured.
    """
    nbytes = [{name: size for name in formats if (size := half.nbytes(name)) is not None} for half in halves]
    pairs = [
        {name: pair_of(half.role, named(half, name)) for name in sizes}
        for half, sizes in zip(halves, nbytes, strict=True)
    ]
    wanted: dict[str, list[FormatPair]] = {}
    for half, names in zip(halves, pairs, strict=True):
        wanted.setdefault(half.module, []).extend(names.values())
    steps = len(windows) * len(wanted)
    measured = measure_sites(
        tap, windows, lambda site, call: wanted.get(site.module, ()), counted(on_progress, "formats", steps)
    )
    squared = []
    for half, names in zip(halves, pairs, strict=True):
        found = measured.get(half.module)
        errors = {} if found is None else found.attention.errors()
        squared.append({name: errors.get(pair, 0.0) ** 2 for name, pair in names.items()})
    return Sensitivity(halves, nbytes, squared)


def measure_divergences(
    known: Sensitivity, tap: AttentionTap, windows: Tensor, budget_bits: float, named: NamedIn, on_progress: OnProgress
) -> None:
    """Add the divergence over the squared error to ``known``, cache by cache.

    Args:
        known: the errors of formats.
        tap: the model.
        windows: int64 [num_windows, tokens].
        budget_bits: the divergence is measured in the format whose bits per element are nearest to this number.
        named: the names of formats in a cache.
        on_progress: called for every run.
    """
    probing = counted(on_progress, "layers", len(known.halves) * len(windows))
    exact = [tap(window, lambda site, call: None) for window in windows]
    for index, (half, nbytes, squared) in enumerate(zip(known.halves, known.nbytes, known.squared, strict=True)):
        # A format without an error cannot tell the cost of an error.
        usable = [name for name in nbytes if squared[name] > 0]
        probe = min(usable, key=lambda name: abs(8 * nbytes[name] / half.numel - budget_bits), default=None)
        divergence = 0.0
        if probe is not None:
            pair = pair_of(half.role, named(half, probe))
            divergence = divergence_when(tap, windows, exact, half.module, pair, probing) / squared[probe]
        known.per_error[index] = divergence
