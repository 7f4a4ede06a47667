"""The divergence due to each format of each layer's keys and values, estimated and measured.

For small errors ``e`` of keys or values, the divergence of the predictions is a quadratic form, whose matrix is the
Fisher information. It is estimated as the mean of ``(e . g)**2 / 2`` over the vectors of a text, where ``g`` is the
gradient of the loss (:mod:`kvcompile.evaluation.gradients`). One backward pass for each window thus serves all formats
of all layers. Errors of different vectors, of different layers, and of keys and values are nearly independent, so
divergences add up.

Gradients do not predict large errors: keys of few bits can cause a hundred times the estimated divergence. A search
therefore measures the divergence of each format that it chooses, with only these keys or values packed. Each
measurement takes one run of the model. The ratio of the measured to the estimated divergence corrects the estimates of
the other formats of the same cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcompile.compat.modules import running_eagerly
from kvcompile.compat.transformers import with_cache
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.evaluation.gradients import calls_with_gradients, differentiable_inputs, gradient
from kvcompile.evaluation.measure import OnProgress, counted
from kvcompile.evaluation.replay import new_cache
from kvcompile.evaluation.schedule import Schedule
from kvcompile.evaluation.site_errors import EXACT, ROLES, divergence_when
from kvcompile.kernels.layout.packed_layout import BLOCK_TOKENS, PackedLayout, Role
from kvcompile.passes.site import FormatPair, Site

SAMPLED_BLOCKS = 16
"""The number of blocks of tokens in each window that are quantized for the estimate."""


@dataclass(frozen=True)
class FormatCost:
    """The cost of storing the keys, or the values, of one layer in a format.

    Attributes:
        format: the name of the format.
        nbytes: bytes of the storage for one sequence, with metadata, padding of the last block and exact tokens.
        divergence: the divergence of the predictions, in nats.
        is_measured: whether the divergence was measured; otherwise it is an estimate.
    """

    format: str
    nbytes: int
    divergence: float
    is_measured: bool = False

    @property
    def is_known(self) -> bool:
        """Whether the divergence needs no measurement: it was measured, or the format has no error."""
        return self.is_measured or self.divergence == 0


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
    """The format pair that has this format for one role and full precision for the other."""
    return FormatPair(format_name, EXACT) if role == "key" else FormatPair(EXACT, format_name)


def half_caches(model: Any, schedule: Schedule, sites: Sequence[Site]) -> tuple[list[HalfCache], int]:
    """The key and value caches of all layers with exactly one of ``sites``; the number of elements of all caches."""
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
    """The costs of formats in the key caches and value caches of a model.

    Attributes:
        halves: the caches.
        nbytes: for each cache, the bytes of its storage by format.
        estimated: for each cache, the estimated divergence by format.
        measured: for each cache, the measured divergence of some formats.
        estimated_windows: the windows of the estimate, and all windows. They differ only after Ctrl-C.
    """

    halves: Sequence[HalfCache]
    nbytes: list[dict[str, int]]
    estimated: list[dict[str, float]]
    measured: list[dict[str, float]]
    estimated_windows: tuple[int, int]

    @property
    def is_interrupted(self) -> bool:
        """Whether Ctrl-C ended the estimate."""
        return self.estimated_windows[0] < self.estimated_windows[1]

    @property
    def num_measured(self) -> int:
        """The number of caches in which at least one format was measured."""
        return sum(map(bool, self.measured))

    def costs(self) -> list[list[FormatCost]]:
        """The cost of each format in each cache."""
        return [
            [
                FormatCost(name, size, measured[name], is_measured=True)
                if name in measured
                else FormatCost(name, size, _corrected(name, estimated, measured))
                for name, size in nbytes.items()
            ]
            for nbytes, estimated, measured in zip(self.nbytes, self.estimated, self.measured, strict=True)
        ]


def _corrected(name: str, estimated: dict[str, float], measured: dict[str, float]) -> float:
    """The estimate of a format, corrected by the measured formats with the next smaller and the next larger estimate.

    Between them, the logarithm of the ratio of measured to estimated divergence is interpolated.
    """
    estimate = estimated[name]
    known = sorted((estimated[other], found) for other, found in measured.items() if estimated[other] > 0 and found > 0)
    if not known or estimate <= 0:
        return estimate
    points = [(math.log(value), math.log(found / value)) for value, found in known]
    place = math.log(estimate)
    below = max((point for point in points if point[0] <= place), default=points[0])
    above = min((point for point in points if point[0] >= place), default=points[-1])
    share = (place - below[0]) / (above[0] - below[0]) if above[0] > below[0] else 0.0
    return estimate * math.exp(below[1] + share * (above[1] - below[1]))


NamedIn = Callable[[HalfCache, str], str]
"""The name of a format in a cache. The name of a calibrated format includes the basis of the layer."""


def estimate_divergences(
    model: Any,
    tap: AttentionTap,
    windows: Tensor,
    halves: Sequence[HalfCache],
    formats: Iterable[str],
    named: NamedIn,
    on_progress: OnProgress,
) -> Sensitivity:
    """The estimated divergence of each format in each of ``halves``.

    Ctrl-C ends the estimate after the completed windows. If no window is complete, KeyboardInterrupt is raised.

    Args:
        model: the model.
        tap: the :class:`AttentionTap` of the model.
        windows: int64 [num_windows, tokens].
        halves: key caches and value caches of the model. A cache that no gradient reaches gets no formats.
        formats: the formats to consider; a format that cannot hold a cache is skipped there.
        named: the names of formats in a cache.
        on_progress: called for every cache in every window.
    """
    nbytes = [{name: size for name in formats if (size := half.nbytes(name)) is not None} for half in halves]
    step, generator = counted(on_progress, "formats", len(windows) * len(halves)), torch.Generator().manual_seed(0)
    complete: list[list[dict[str, float]]] = []
    try:
        for window in windows:
            with differentiable_inputs(model):
                calls = calls_with_gradients(tap, window, generator)
            of_window: list[dict[str, float]] = []
            for half, sizes in zip(halves, nbytes, strict=True):
                step(half.module)
                of_window.append(_estimates(half, sizes, calls.get(half.module), named))
            complete.append(of_window)
    except KeyboardInterrupt:
        if not complete:
            raise
    means: list[dict[str, float]] = [{} for _ in halves]
    for of_window in complete:
        for mean, found in zip(means, of_window, strict=True):
            for name, divergence in found.items():
                mean[name] = mean.get(name, 0.0) + divergence / len(complete)
    nbytes = [sizes if mean else {} for sizes, mean in zip(nbytes, means, strict=True)]
    return Sensitivity(halves, nbytes, means, [{} for _ in halves], (len(complete), len(windows)))


def _estimates(half: HalfCache, formats: Iterable[str], call: AttentionCall | None, named: NamedIn) -> dict[str, float]:
    """The estimated divergence of each format in a cache, from one window; empty if no gradient reached it."""
    if call is None or (slope := gradient(call, half.role)) is None:
        return {}
    x, weights = (_sampled_blocks(y.detach()) for y in (call.of_kv_heads(half.role), slope))
    found = {}
    for name in formats:
        fmt = pair_of(half.role, named(half, name)).layout(half.role, half.width, half.dtype).format
        error = fmt.decode(fmt.encode(x)).to(half.dtype).float() - x.float()
        found[name] = (error * weights.float()).sum(-1).square().sum().item() / (2 * x.shape[2] * x.shape[3])
    return found


def _sampled_blocks(x: Tensor) -> Tensor:
    """At most SAMPLED_BLOCKS blocks of [1, heads, n, channels], spread evenly: [1, heads, blocks, tokens, channels]."""
    blocks = F.pad(x, (0, 0, 0, -x.shape[2] % BLOCK_TOKENS)).unflatten(2, (-1, BLOCK_TOKENS))
    if blocks.shape[2] <= SAMPLED_BLOCKS:
        return blocks
    return blocks[:, :, torch.linspace(0, blocks.shape[2] - 1, SAMPLED_BLOCKS, device=x.device).round().long()]


def measure_divergences(
    known: Sensitivity,
    tap: AttentionTap,
    windows: Tensor,
    exact: Sequence[Tensor],
    wanted: Sequence[tuple[HalfCache, str]],
    named: NamedIn,
    on_progress: OnProgress,
) -> None:
    """Measure the divergence of formats in single caches, and add it to ``known``.

    Args:
        known: the estimates.
        tap: the :class:`AttentionTap` of the model.
        windows: int64 [num_windows, tokens].
        exact: the logits of the unquantized model for each window.
        wanted: the caches, and the formats to measure in each.
        named: the names of formats in a cache.
        on_progress: called for every run.
    """
    step = counted(on_progress, "layers", len(wanted) * len(windows))
    for half, name in wanted:
        pair = pair_of(half.role, named(half, name))
        found = divergence_when(tap, windows, exact, half.module, pair, step)
        known.measured[known.halves.index(half)][name] = max(found, 0.0)
