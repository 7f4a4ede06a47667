"""The bytes of a graph's weights. Quantized weights are tensor subclasses that hold codes and scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.tensors import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class WeightBytes:
    """The bytes of one weight.

    Attributes:
        identity: a number that is equal in all graphs that share the weight.
        plain: bytes of its elements in its own dtype.
        stored: bytes of the tensors that hold it: codes and scales, if it is quantized.
    """

    identity: int
    plain: int
    stored: int


def weight_bytes(inputs: Iterable[Any]) -> tuple[WeightBytes, ...]:
    """The parameters among the inputs of a graph. Only this process's part of a distributed parameter counts."""
    weights = [value for value in inputs if isinstance(value, torch.nn.Parameter)]
    return tuple(WeightBytes(id(weight), _nbytes(_local(weight)), _stored(weight)) for weight in weights)


def _parts(x: Tensor) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(x):
        return []
    parts = (getattr(x, name) for name in x.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]


def _local(x: Tensor) -> Tensor:
    """``x`` without wrapper subclasses that only describe a distribution. They hold one tensor of the same dtype."""
    parts = _parts(x)
    return _local(parts[0]) if len(parts) == 1 and parts[0].dtype == x.dtype else x


def _stored(x: Tensor) -> int:
    parts = _parts(x)
    return sum(map(_stored, parts)) if parts else _nbytes(x)


def _nbytes(x: Tensor) -> int:
    return math.prod(x.shape) * x.dtype.itemsize
