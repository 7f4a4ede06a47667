"""What an evaluation found, as plain data."""

from __future__ import annotations

import dataclasses
import math
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


@dataclass(frozen=True)
class PolicyResult:
    """What one policy does to a model.

    Attributes:
        policy: its name or file.
        formats: the formats of keys and values, ``K / V``, of every kind of layer.
        packed_layers: attention modules whose caches are packed in every graph.
        num_layers: attention modules.
        unpacked_modules: those whose caches are not packed in every graph.
        effective_bits: bits that an element of the cache takes, metadata, padding and unquantized tokens included.
        quality: bits per byte or perplexity.
        change: by what part the metric is greater than the reference's.
        change_error: standard error of ``change``, from the differences of the losses of the single tokens, which are
            taken as independent.
        mean_divergence, median_divergence, p999_divergence: Kullback-Leibler divergence of the predictions from the
            reference's in nats: mean, median and 99.9th percentile over the tokens.
        same_top1: the part of tokens for which both models think the same token most likely.
        attention_errors: by module, the relative L2 error of its outputs; errors of earlier layers are in it.
        seconds: what it took, most of it compilation.
        notes: what was left unpacked and why.
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
    unpacked_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def mean_attention_error(self) -> float:
        """Mean over the modules."""
        return sum(self.attention_errors.values()) / max(len(self.attention_errors), 1)


@dataclass
class Evaluation:
    """The policies that were evaluated on one model and text.

    Attributes:
        model: its name.
        data: the name of the file.
        metric: ``bits per byte`` or ``perplexity``.
        prefill, decode, chunk, num_windows: how the text was read.
        tokens: how many were predicted.
        dtype: of the weights and the plain cache.
        device: what it ran on.
        reference: the metric of the unquantized model.
        reference_bits: bits of an element of its cache.
        versions: of the software.
        results: by policy, in the order of the evaluation.
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
    versions: dict[str, str] = field(default_factory=lambda: software_versions())
    results: list[PolicyResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not finite becomes None."""
        return finite(dataclasses.asdict(self))


def finite(value: Any) -> Any:
    """Plain data in which None takes the place of numbers that are not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def software_versions() -> dict[str, str]:
    """Versions of what a result depends on."""
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
