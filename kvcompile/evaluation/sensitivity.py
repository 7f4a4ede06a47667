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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
                halves.append(HalfCache(by_layer[index][0].module, role, heads, slots, width, tensor.dtype))
    return halves, sum(half.numel() for layer in cache.layers for half in (layer.keys, layer.values))


def format_costs(
    tap: AttentionTap,
    windows: Tensor,
    halves: Sequence[HalfCache],
    formats: Iterable[str],
    budget_bits: float,
    on_progress: OnProgress,
) -> list[list[FormatCost]]:
    """The cost of each format in each of ``halves``, in their order.

    Args:
        tap: the model.
        windows: int64 [num_windows, tokens].
        halves: key caches and value caches of the model.
        formats: the formats to consider; a format that cannot hold a cache is skipped there.
        budget_bits: the divergence is measured in the format whose bits per element are nearest to this number.
        on_progress: called for every module that is measured, and for every run.
    """
    sizes = [{name: size for name in formats if (size := half.nbytes(name)) is not None} for half in halves]
    wanted: dict[str, list[FormatPair]] = {}
    for half, nbytes in zip(halves, sizes, strict=True):
        wanted.setdefault(half.module, []).extend(pair_of(half.role, name) for name in nbytes)
    steps = len(windows) * len(wanted)
    measured = measure_sites(
        tap, windows, lambda site, call: wanted.get(site.module, ()), counted(on_progress, "formats", steps)
    )
    probing = counted(on_progress, "layers", len(halves) * len(windows))
    exact = [tap(window, lambda site, call: None) for window in windows]
    costs = []
    for half, nbytes in zip(halves, sizes, strict=True):
        found = measured.get(half.module)
        errors = {} if found is None else found.attention.errors()
        squared = {name: errors.get(pair_of(half.role, name), 0.0) ** 2 for name in nbytes}
        # A format without an error cannot tell the cost of an error.
        usable = [name for name in nbytes if squared[name] > 0]
        probe = min(usable, key=lambda name: abs(8 * nbytes[name] / half.numel - budget_bits), default=None)
        per_error = 0.0
        if probe is not None:
            pair = pair_of(half.role, probe)
            per_error = divergence_when(tap, windows, exact, half.module, pair, probing) / squared[probe]
        costs.append([FormatCost(name, size, per_error * squared[name]) for name, size in nbytes.items()])
    return costs
