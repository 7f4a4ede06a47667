"""The results of an evaluation, as plain data."""

from __future__ import annotations

import dataclasses
import math
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from kvcompile.evaluation.recall import Recalled


@dataclass(frozen=True)
class PolicyResult:
    """The quality of a model under one policy.

    Attributes:
        policy: the name or the file of the policy.
        formats: the distinct format pairs of the layers, as ``K / V``.
        packed_layers: number of attention modules whose caches are packed in every graph.
        num_layers: number of all attention modules.
        unpacked_modules: modules whose caches are not packed in every graph.
        effective_bits: bits per element of the cache, with metadata, padding and exact tokens.
        packed_bits: bits per element without exact tokens.
        exact_tokens: number of tokens that a cache can keep in full precision, on average over all keys and values.
        exact_share: the fraction of the tokens of a window that are in full precision, on average over all keys and
            values.
        quality: bits per byte or perplexity.
        change: the relative increase of the metric over the reference.
        change_error: standard error of ``change``, from the differences of the losses of single tokens, which are
            assumed to be independent.
        mean_divergence, median_divergence, p999_divergence: Kullback-Leibler divergence of the predictions from the
            reference's, in nats: mean, median and 99.9th percentile over the tokens.
        divergence_error: standard error of ``mean_divergence``, from the means of the windows; NaN for one window.
        prefill_divergence, decode_divergence: mean divergence of the predictions of the prefill, and of later steps.
            Only later steps read recent tokens in full precision.
        decode_divergence_error: standard error of ``decode_divergence``, as for ``mean_divergence``.
        same_top1: the fraction of positions at which both models predict the same most likely token.
        attention_errors: by module, the relative L2 error of its outputs, which includes the errors of earlier layers.
        seconds: the duration, most of it compilation.
        notes: the unpacked modules and the reasons.
        recalled: by distance, the planted numbers that the model has retrieved; empty if the text has none.
    """

    policy: str
    formats: tuple[str, ...]
    packed_layers: int
    num_layers: int
    effective_bits: float
    quality: float
    change: float
    change_error: float
    mean_divergence: float
    median_divergence: float
    p999_divergence: float
    same_top1: float
    attention_errors: dict[str, float]
    seconds: float
    packed_bits: float = math.nan
    exact_tokens: float = 0.0
    exact_share: float = 0.0
    divergence_error: float = math.nan
    prefill_divergence: float = math.nan
    decode_divergence: float = math.nan
    decode_divergence_error: float = math.nan
    unpacked_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    recalled: tuple[Recalled, ...] = ()

    @property
    def mean_attention_error(self) -> float:
        """Mean over the modules."""
        return sum(self.attention_errors.values()) / max(len(self.attention_errors), 1)


@dataclass
class Evaluation:
    """The evaluation of policies on one model and one text.

    Attributes:
        model: the name of the model.
        data: the name of the text's file.
        metric: ``bits per byte`` or ``perplexity``.
        prefill, decode, chunk, num_windows: the steps of reading, see :mod:`kvcompile.evaluation.schedule`.
        exact_prompt: whether the prefill attended to its own tokens as the policies say, rather than packed.
        tokens: the number of predicted tokens.
        dtype: the dtype of the weights and the plain cache.
        device: ``cpu``, or the name of a GPU.
        reference: the metric of the unquantized model.
        reference_bits: bits per element of the unquantized model's cache.
        versions: versions of the software.
        results: one for each policy, in the order of the evaluation.
    """

    model: str
    data: str
    metric: str
    prefill: int
    decode: int
    chunk: int
    num_windows: int
    tokens: int
    dtype: str
    device: str
    reference: float
    reference_bits: float
    exact_prompt: bool = False
    versions: dict[str, str] = field(default_factory=lambda: software_versions())
    results: list[PolicyResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; numbers that are not finite become None."""
        return finite(dataclasses.asdict(self))


def finite(value: Any) -> Any:
    """Plain data in which None replaces numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def software_versions() -> dict[str, str]:
    """Versions of the software that a result depends on."""
    versions = {"python": platform.python_version()}
    for package in ("kvcompile", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def device_name(device: torch.device) -> str:
    """``cpu``, or the name of a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
